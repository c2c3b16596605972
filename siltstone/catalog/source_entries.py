"""The entries of Spark's logs of its sources, as a step keeps them (`Step.sources`): source -> number -> text, as JSON.

A file source's entry is a line about each file that a batch of that number was given, after a line with the version:

    v1
    {"path":"file:///in/a.parquet","timestamp":1372896000000,"batchId":7}

Other sources write one entry: where they begin.
"""

import json
from collections.abc import Iterable

NO_ENTRIES = "{}"
"""of a step that added nothing to any source's log"""


def is_file_log(entry: str) -> bool:
    """Whether a file source wrote this entry."""
    lines = entry.splitlines()[1:]
    return bool(lines) and lines[-1].startswith("{") and "batchId" in json.loads(lines[-1])


def merge(sources: Iterable[str]) -> str:
    """The entries of many steps as those of one: of each file source one entry, under the newest number, that holds the
    lines of all of them in their order. `split` takes it apart again.

    Args:
        sources: `Step.sources` of each step, oldest first; the first may be merged already.
    """
    entries: dict[str, dict[int, str]] = {}
    for text in sources:
        for source, numbered in json.loads(text).items():
            entries.setdefault(source, {}).update({int(number): entry for number, entry in numbered.items()})
    merged: dict[str, dict[str, str]] = {}
    for source, numbered in entries.items():
        newest = max(numbered)
        if is_file_log(numbered[newest]):
            ordered = [numbered[number] for number in sorted(numbered)]
            lines = [line for entry in ordered for line in entry.splitlines()[1:]]
            merged[source] = {str(newest): "\n".join([ordered[0].splitlines()[0], *lines])}
        else:
            merged[source] = {str(number): numbered[number] for number in sorted(numbered)}
    return json.dumps(merged)


def split(numbered: dict[int, str]) -> dict[int, str]:
    """The entries of one source, each under its own number again, however they were merged."""
    found: dict[int, list[str]] = {}
    for number in sorted(numbered):
        header, *lines = numbered[number].splitlines()
        if not is_file_log(numbered[number]):
            found[number] = numbered[number].splitlines()
            continue
        for line in lines:
            found.setdefault(json.loads(line)["batchId"], [header]).append(line)
    return {number: "\n".join(lines) for number, lines in found.items()}


def count_files(sources: str) -> int:
    """How many files these entries say have been read."""
    texts = [entry for numbered in json.loads(sources).values() for entry in numbered.values()]
    return sum(len(text.splitlines()) - 1 for text in texts if is_file_log(text))


def without_files(sources: str) -> str:
    """These entries but those of file sources, as if no file had been read yet."""
    kept = {
        source: {number: entry for number, entry in numbered.items() if not is_file_log(entry)}
        for source, numbered in json.loads(sources).items()
    }
    return json.dumps({source: numbered for source, numbered in kept.items() if numbered})
