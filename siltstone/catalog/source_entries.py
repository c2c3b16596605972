"""The entries of Spark's logs of its sources, as a step keeps them (`Step.sources`): source -> number -> text, as JSON.

A file source's entry is a line about each file that a batch of that number was given, after a line with the version:

    v1
    {"path":"file:///in/a.parquet","timestamp":1372896000000,"batchId":7}

Other sources write one entry: where they begin.
"""

import json
import re
from collections.abc import Iterable

from siltstone.decoding import check_integer, check_object, decoding, parse_json
from siltstone.errors import StateError

NO_ENTRIES = "{}"
"""of a step that added nothing to any source's log"""
_SOURCE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_NUMBER_MAX = 10**18
_WHERE, _WHAT = "an entry of the input log in the catalog", "what a source's log holds"


def decode_sources(sources: str) -> dict[str, dict[int, str]]:
    """The entries of a step: source -> number -> text. Sources and numbers become names of files (promise 8).

    Raises:
        StateError: that is not what the catalog has; none of it may be used.
    """
    with decoding(_WHERE, _WHAT, StateError):
        found: dict[str, dict[int, str]] = {}
        for source, numbered in check_object(parse_json(sources), "the step").items():
            if not _SOURCE.fullmatch(source):
                raise ValueError(f"{source[:80]!r} is no source of Spark's")
            for number, text in check_object(numbered, f"source {source}").items():
                if not _NUMBER.fullmatch(number) or not isinstance(text, str):
                    raise ValueError(f"{number[:80]!r} of source {source} is no entry of a log")
                found.setdefault(source, {})[int(number)] = text
        return found


def is_file_log(entry: str) -> bool:
    """Whether a file source wrote this entry.

    Raises:
        StateError: it is damaged.
    """
    lines = entry.splitlines()[1:]
    if not lines or not lines[-1].startswith("{"):
        return False
    return "batchId" in _parse_line(lines[-1])


def path_of(line: str) -> str:
    """The URL of the file that a line of a file source's log is about.

    Raises:
        StateError: it is damaged.
    """
    with decoding(_WHERE, _WHAT, StateError):
        path = _parse_line(line)["path"]
        if not isinstance(path, str):
            raise ValueError(f"a file's path is {path!r}")
        return path


def _parse_line(line: str) -> dict[str, object]:
    with decoding(_WHERE, _WHAT, StateError):
        return dict(check_object(parse_json(line), "a line"))


def merge(sources: Iterable[str]) -> str:
    """The entries of many steps as those of one: of each file source one entry, under the newest number, that holds the
    lines of all of them in their order. `split` takes it apart again.

    Args:
        sources: `Step.sources` of each step, oldest first; the first may be merged already.
    """
    entries: dict[str, dict[int, str]] = {}
    for text in sources:
        for source, numbered in decode_sources(text).items():
            entries.setdefault(source, {}).update(numbered)
    merged: dict[str, dict[str, str]] = {}
    for source, numbered in entries.items():
        newest = max(numbered)
        if is_file_log(numbered[newest]):
            ordered = [numbered[number] for number in sorted(numbered)]
            lines = [line for entry in ordered for line in entry.splitlines()[1:]]
            merged[source] = {str(newest): "\n".join([numbered[newest].splitlines()[0], *lines])}
        else:
            merged[source] = {str(number): numbered[number] for number in sorted(numbered)}
    return json.dumps(merged)


def split(numbered: dict[int, str]) -> dict[int, str]:
    """The entries of one source, each under its own number again, however they were merged.

    Raises:
        StateError: one of them is damaged.
    """
    found: dict[int, list[str]] = {}
    for number in sorted(numbered):
        if not is_file_log(numbered[number]):
            found[number] = numbered[number].splitlines()
            continue
        header, *lines = numbered[number].splitlines()
        for line in lines:
            with decoding(_WHERE, _WHAT, StateError):
                own = check_integer(_parse_line(line)["batchId"], 0, _NUMBER_MAX, "batchId")
            found.setdefault(own, [header]).append(line)
    return {number: "\n".join(lines) for number, lines in found.items()}


def count_files(sources: str) -> int:
    """How many files these entries say have been read."""
    texts = [entry for numbered in decode_sources(sources).values() for entry in numbered.values()]
    return sum(len(text.splitlines()) - 1 for text in texts if is_file_log(text))


def without_files(sources: str) -> str:
    """These entries but those of file sources, as if no file had been read yet."""
    kept = {
        source: {str(number): entry for number, entry in numbered.items() if not is_file_log(entry)}
        for source, numbered in decode_sources(sources).items()
    }
    return json.dumps({source: numbered for source, numbered in kept.items() if numbered})
