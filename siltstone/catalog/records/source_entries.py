"""What Spark writes about the sources of a batch, as recorded with a step: their offsets, and entries of their logs.

`Step.offsets` is an entry of Spark's offset log: its version, a line about the batch as JSON, then a line per source.
In version 1 they are in the order of the sources, which are named by number. In version 2 (Spark 4.2; the only one with
names of sources) each line begins with the name of its source:

    v2
    {"batchWatermarkMs":0,"batchTimestampMs":1795706471837,"conf":{}}
    clicks:{"logOffset":0}

For a stream that names its sources (`Stream.sources`), we record version 1 the same way, under the version `v1 named`:
`spark.source_log` puts the lines in the order of each query. A named source may be several of Spark's; those after the
first are called `clicks.1`, `clicks.2` and so on. A record by position is of the source `source`.

`Step.sources` are the entries of the sources' logs: source -> number -> text, as JSON. A file source's entry has a line
with the version, and then one line per file of the batch with that number:

    v1
    {"path":"file:///in/a.parquet","timestamp":1372896000000,"batchId":7}

to which we add the file's size in bytes: ..."batchId":7,"size":4096}. If Spark could not read the file, and the batch
was run without it, we add the reason instead: ..."batchId":7,"unread":"EOFException: ..."}. Spark gets such a line with
a batch that does not exist (`to_spark`), so that no batch reads the file, and Spark knows it as one that it has seen.
Other sources write one entry, with their initial offset. A source is called what its offset is: the numbers 0, 1 and 2
in a record by position are `source`, `source.1` and `source.2` (`name_of_log`).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from siltstone.decoding import check_integer, check_object, parse_json, translate_decode_errors
from siltstone.errors import StateError, UsageError
from siltstone.operator import SOURCE

NO_ENTRIES = "{}"
"""the entries of a step that added nothing to any source's log"""
NO_OFFSET = "-"
"""what Spark writes for a source without an offset"""
OFFSET_VERSIONS = ("v1", "v2")
"""the versions of Spark's offset log that can be read"""
NAMED = "v1 named"
"""the version of offsets that are recorded by the names of a stream's sources"""
NO_BATCH = 10**15
"""the batch id in Spark's log of a file that no batch reads; not negative, which Spark does not expect"""
_SIZE = re.compile(r',"size":[0-9]{1,18}\}$', re.MULTILINE)
_UNREAD = ',"unread":'
"""what a line of an unread file has, and no other: in a path, the quotes are escaped"""
_SOURCE = re.compile(r"[A-Za-z0-9_-]{1,255}(?:\.[1-9][0-9]{0,8})?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_NUMBER_MAX = 10**18
_WHERE, _WHAT = "an entry of the input log in the catalog", "what a source's log holds"


def record_name(source: str, number: int) -> str:
    """Return what the record calls one of Spark's sources, the `number`th from 0 on of a stream's source."""
    return f"{source}.{number}" if number else source


def number_of(name: str, source: str = SOURCE) -> int | None:
    """Return which of Spark's sources of a stream's source is called `name`; None if it is of another one."""
    own, _, number = name.partition(".")
    return int(number or "0") if own == source else None


def name_of_log(offsets: str, log: str) -> str:
    """Return the name of the source whose entries a step has under `log`.

    Args:
        offsets: those of the step: only in Spark's version 2 is a number a name.
    """
    return record_name(SOURCE, int(log)) if log.isdecimal() and not offsets.startswith("v2\n") else log


def decode_offsets(offsets: str) -> dict[str, str]:
    """Decode the offsets of a step: source -> its offset as JSON, or `NO_OFFSET`, in the order of the record.

    Raises:
        UsageError: a later version of Spark wrote them.
        StateError: the text is damaged.
    """
    if not offsets:  # of a step without a batch
        return {}
    lines = offsets.rstrip("\n").split("\n")  # Spark ends a line with nothing else
    if lines[0] != NAMED:
        check_offset_version(lines[0])
    if not names_sources(offsets):
        return {record_name(SOURCE, number): line for number, line in enumerate(lines[2:])}
    with translate_decode_errors(_WHERE, "offsets", StateError):
        if not all(":" in line for line in lines[2:]):
            raise ValueError("a line has no name of a source")
        found = {name: offset for name, _, offset in (line.partition(":") for line in lines[2:])}
        if lines[0] == NAMED and not (len(found) == len(lines[2:]) and all(map(_SOURCE.fullmatch, found))):
            raise ValueError("two lines are of one source, or a line has a name that no source has")
        return found


def encode_offsets(header: str, offsets: Iterable[tuple[str, str]]) -> str:
    """Encode offsets of sources, after the first two lines of an entry of Spark's offset log or of our record."""
    if not names_sources(header):
        return "\n".join([header, *(offset for _, offset in offsets)])
    return "\n".join([header, *(f"{name}:{offset}" for name, offset in dict(offsets).items())])


def header_of(offsets: str) -> str:
    """Return the line about the batch.

    Raises:
        StateError: there is none.
    """
    with translate_decode_errors(_WHERE, "offsets", StateError):
        return offsets.split("\n")[1]


def names_sources(offsets: str) -> bool:
    """Whether each line of offsets names its source: in Spark's log from version 2 on, and where we recorded names."""
    return not offsets.startswith("v1\n") and offsets != ""


def check_offset_version(version: str) -> None:
    """Check that a version of Spark's offset log can be read.

    Raises:
        UsageError: a later version of Spark has it.
        StateError: it is not one.
    """
    if not re.fullmatch(r"v[0-9]{1,9}", version):
        raise StateError(f"{_WHERE} is damaged: {version[:20]!r} is not a version of Spark's offset log")
    if version not in OFFSET_VERSIONS:
        raise UsageError(
            f"Spark writes its offset log in version {version[:20]!r}, of which Siltstone knows only "
            f"{' and '.join(OFFSET_VERSIONS)}: set spark.sql.streaming.offsetLog.formatVersion to 1"
        )


def decode_sources(sources: str) -> dict[str, dict[int, str]]:
    """Decode a step's entries: source -> number -> text. Both become file names, so they are checked (no path may lead
    outside the warehouse: promise 8).

    Raises:
        StateError: the text is damaged; none of it may be used.
    """
    with translate_decode_errors(_WHERE, _WHAT, StateError):
        found: dict[str, dict[int, str]] = {}
        for source, numbered in check_object(parse_json(sources), "the step").items():
            if not _SOURCE.fullmatch(source):
                raise ValueError(f"{source[:80]!r} is not a source of Spark's")
            for number, text in check_object(numbered, f"source {source}").items():
                if not _NUMBER.fullmatch(number) or not isinstance(text, str):
                    raise ValueError(f"{number[:80]!r} of source {source} is not an entry of a log")
                found.setdefault(source, {})[int(number)] = text
        return found


def check_sources(sources: str) -> None:
    """Check that a step's entries can be read in every way in which a run reads them.

    Raises:
        StateError: they are damaged.
    """
    for numbered in decode_sources(sources).values():
        for entry in split(numbered).values():
            list_files(entry)


@dataclass(frozen=True)
class LoggedFile:
    """A file of a batch: its URL, its modification time then, its size, if that was recorded, and if the batch was run
    without it, why."""

    path: str
    modified_ms: int
    size: int | None = None
    unread: str | None = None


def list_files(entry: str) -> list[LoggedFile]:
    """List the files in one entry of a file source's log, unread ones too; none of another source's.

    Raises:
        StateError: the entry is damaged.
    """
    if not is_file_log(entry):
        return []
    with translate_decode_errors(_WHERE, _WHAT, StateError):
        found = []
        for line in entry.splitlines()[1:]:
            of = _parse_line(line)
            size = None if of.get("size") is None else check_integer(of["size"], 0, _NUMBER_MAX, "a file's size")
            modified_ms = check_integer(of.get("timestamp", 0), -_NUMBER_MAX, _NUMBER_MAX, "timestamp")
            unread = of.get("unread")
            if not isinstance(unread, str | None):
                raise ValueError(f"why a file was not read is {unread!r}")
            found.append(LoggedFile(path_of(line), modified_ms, size, unread))
        return found


def add_sizes(entry: str, sizes: Mapping[str, int]) -> str:
    """Add the sizes of files (URL -> bytes) to an entry that Spark wrote."""
    if not is_file_log(entry):
        return entry
    header, *lines = entry.splitlines()
    known = ((line, sizes.get(path_of(line))) for line in lines)
    return "\n".join([header, *(line if size is None else f'{line[:-1]},"size":{size}}}' for line, size in known)])


def to_spark(entry: str) -> str:
    """Return an entry as Spark reads it: without sizes, and unread files under `NO_BATCH`."""
    entry = _SIZE.sub("}", entry)
    if _UNREAD not in entry:
        return entry
    return "\n".join(_unread_line(line) if _UNREAD in line else line for line in entry.splitlines())


def _unread_line(line: str) -> str:
    of = _parse_line(line)
    kept = {"path": path_of(line), "timestamp": of.get("timestamp", 0), "batchId": NO_BATCH}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def has_unread(sources: str) -> bool:
    """Whether a step's entries may have unread files; if not, they have none."""
    return json.dumps(_UNREAD)[1:-1] in sources


def leave_out(entry: str, reason: Callable[[LoggedFile], str | None]) -> str:
    """Mark files of an entry that Spark wrote as unread.

    Args:
        reason: returns why a file is left out, None for one that is not.
    """
    if not is_file_log(entry):
        return entry
    header, *lines = entry.splitlines()
    reasons = (reason(file) for file in list_files(entry))
    return "\n".join(
        [header, *(_marked(line, why) if why is not None else line for line, why in zip(lines, reasons, strict=True))]
    )


def _marked(line: str, reason: str) -> str:
    return f"{line[:-1]}{_UNREAD}{json.dumps(reason)}}}"


def is_file_log(entry: str) -> bool:
    """Whether a file source wrote this entry.

    Raises:
        StateError: the entry is damaged.
    """
    lines = entry.splitlines()[1:]
    if not lines or not lines[-1].startswith("{"):
        return False
    return "batchId" in _parse_line(lines[-1])


def path_of(line: str) -> str:
    """Return the URL of the file in a line of a file source's log.

    Raises:
        StateError: the line is damaged.
    """
    with translate_decode_errors(_WHERE, _WHAT, StateError):
        path = _parse_line(line)["path"]
        if not isinstance(path, str):
            raise ValueError(f"a file's path is {path!r}")
        return path


def _parse_line(line: str) -> dict[str, object]:
    with translate_decode_errors(_WHERE, _WHAT, StateError):
        return dict(check_object(parse_json(line), "a line"))


def merge(sources: Iterable[str]) -> str:
    """Merge the entries of many steps: each file source gets one entry, under its newest number, with all lines in
    order. `split` is the inverse.

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
    """Split the merged entries of one source, each under its own number again.

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
            with translate_decode_errors(_WHERE, _WHAT, StateError):
                own = check_integer(_parse_line(line)["batchId"], 0, _NUMBER_MAX, "batchId")
            found.setdefault(own, [header]).append(line)
    return {number: "\n".join(lines) for number, lines in found.items()}


def count_files(sources: str) -> int:
    """Count the files in these entries."""
    texts = [entry for numbered in decode_sources(sources).values() for entry in numbered.values()]
    return sum(len(text.splitlines()) - 1 for text in texts if is_file_log(text))


def without_files(sources: str) -> str:
    """Return the entries without those of file sources, as if no file had been read."""
    kept = {
        source: {str(number): entry for number, entry in numbered.items() if not is_file_log(entry)}
        for source, numbered in decode_sources(sources).items()
    }
    return json.dumps({source: numbered for source, numbered in kept.items() if numbered})
