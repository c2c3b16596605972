"""Keep Spark's own record of what a query has read as Siltstone's input log (DBSP's first approach).

Before a batch runs, Structured Streaming writes which source offsets it covers. Siltstone copies that record into the
catalog with the checkpoint that includes the batch. The next start writes it into the checkpoint location of the new
writer epoch:

    <epoch>/spark/
      metadata              the query's id
      offsets/<batch>       the source offsets of each batch (header lines, then one line per source)
      commits/<batch>       a mark that the batch is done
      sources/<i>/<n>       the files that a file source has seen, one JSON line per file; <n>.compact holds all up to n

So after a crash the batches after the last completed checkpoint run again (each row takes effect exactly once, promise
2), even if the machine that ran them is gone, and a writer of an older epoch cannot change the newer one's record.
Because Spark runs a batch that has offsets but no commit with exactly those offsets, any logged batch can be run again
with the same rows, watermark and `current_timestamp()` (DBSP's replay).

The warehouse may be moved: the catalog records a file below it as `file://{warehouse}/source/...`. The checkpoint
location gets the current path, because Spark compares whole URLs to know which files it has seen.

Until the first batch is committed, Spark asks a source at each start where it begins, and one that begins at "latest"
begins later each time. A source with a log of its own (Kafka, rate) keeps its first answer there, and that entry is
written again. For any other source, the recorded beginning is written as a committed batch that ends where the source
begins. It has Spark's number 0, so in such a location Spark's numbers are one higher than ours (`number`).

A stream that names its sources is recorded by these names, whatever their order in a query (`spark.source_places`). A
source that it gets later has the offset at which it begins in all steps before, and one that it has no longer stays
where it was read to in all steps after: Spark does not get that offset, but code that has the source again after a
rollback does.
"""

import json
import re
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siltstone.catalog.records.beginnings import names_in
from siltstone.catalog.records.source_entries import (
    NAMED,
    NO_OFFSET,
    OFFSET_VERSIONS,
    LoggedFile,
    add_sizes,
    check_offset_version,
    decode_offsets,
    decode_sources,
    encode_offsets,
    has_unread,
    is_file_log,
    leave_out,
    list_files,
    name_of_log,
    names_sources,
    split,
    to_spark,
)
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.decoding import check_object, parse_json, translate_decode_errors
from siltstone.errors import StateError, UsageError
from siltstone.spark.source_places import SourcePlaces
from siltstone.store.directories import path_below
from siltstone.store.private import make_private_directory, write_private_file

COMPACT_INTERVAL = "spark.sql.streaming.fileSource.log.compactInterval"
COMMIT_VERSION = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_WAREHOUSE = ("{warehouse}", "{warehouse-resolved}")
"""placeholders for the path of the warehouse, as given and without symbolic links; no URL has braces"""
_LOCAL_FILE = re.compile(r'^(\{"path":"file:(?://)?)(/[^"]*)', re.MULTILINE)
_MOVED_FILE = re.compile(r'^(\{"path":"file:(?://)?)(\{[a-z-]+\})', re.MULTILINE)


@dataclass(frozen=True)
class RecordForm:
    """How a session's Spark reads its record.

    Attributes:
        offset_versions: the versions of the offset log that it can read.
        commit_version: the version of the commit log, its setting `COMMIT_VERSION`; before 4.2 it must be just that.
        compact_interval: its setting `COMPACT_INTERVAL`: how many entries of a file source's log make a compact one.
    """

    offset_versions: Sequence[str] = OFFSET_VERSIONS
    commit_version: str = "1"
    compact_interval: int = 10


class SourceLog:
    """Reads the record of a running query, and writes it for the next one.

    Args:
        location: the query's checkpoint location, a local directory.
        warehouse: the paths of the warehouse on this machine as Spark writes them in URLs: as given, and without
            symbolic links. If empty, URLs of files are not changed.
        form: of the session that will run the next query.
        names: per source of the next query, its name in the record; None to record what Spark writes.
    """

    def __init__(
        self,
        location: Path,
        warehouse: Sequence[str] = (),
        form: RecordForm = RecordForm(),
        names: Sequence[str] | None = None,
    ) -> None:
        self.location = location
        self._places = SourcePlaces(names)
        self._beginning: dict[str, str] = {}
        """source -> the offset at which it begins"""
        self._read: dict[str, str] = {}
        """source -> up to where the batches before the next one have read it"""
        self._form = form
        self._warehouse: dict[str, str] = dict(zip(_WAREHOUSE, warehouse, strict=False))
        self.query_id = ""
        """the id of the next query at this location"""
        self._shift = 0
        self._recorded: dict[str, int] = {}
        self._entries: dict[str, dict[int, str]] = {}
        """directory of a source's log -> its entries, needed until a query runs on by itself; cleared to save memory"""
        self._reduced: dict[Path, dict[int, str]] = {}
        """directory of a source's log -> its entries of the next batch, with files marked as unread"""

    @property
    def url(self) -> str:
        """The location as a URL of this machine's file system; not escaped, because Hadoop does not unescape it."""
        return f"file://{self.location.absolute()}"

    def prepare(self, position: InputPosition) -> None:
        """Replace the location's contents by the record of all batches before a position, as committed."""
        for step in filter(None, (*position.newest, position.beginning)):
            self._check_readable(step)
        shutil.rmtree(self.location, ignore_errors=True)
        self._recorded, self._entries = {}, {}
        before: list[Step] = list(position.newest)
        self._shift, self._beginning = 0, {}
        if position.beginning is not None:
            self._beginning = decode_offsets(position.beginning.offsets)
            self._take(position.beginning)
            if not before and self._begins_at_offsets():
                before, self._shift = [position.beginning], 1
        for step in position.entries:
            self._take(step)
        for source in self._entries:
            self._write_source(source)
        self.query_id = str(uuid.uuid4())
        _write(self.location / "metadata", json.dumps({"id": self.query_id}))
        self._read = dict(self._beginning)
        for step in before:
            # Spark reads the newest batch and the one before, and would purge older ones.
            _write(self._path("offsets", step.batch), self._places.offsets_for_spark(step, self._read))
            self._read |= decode_offsets(step.offsets)
            _write(self._path("commits", step.batch), self._commit_of(step.offsets))

    def _begins_at_offsets(self) -> bool:
        """Whether a source has a recorded offset to begin at, which Spark must use instead of asking the source."""
        every = self._places.names is None
        return any(
            offset != NO_OFFSET and (every or self._places.has(name)) for name, offset in self._beginning.items()
        )

    def _check_readable(self, step: Step) -> None:
        self._places.check_form(step)
        version = step.offsets.partition("\n")[0]
        if version in OFFSET_VERSIONS and version not in self._form.offset_versions:
            raise UsageError(
                f"this Spark cannot read its record of step {step.step}, of version {version}: run the stream with the "
                "version of Spark that wrote it, or a later one"
            )

    def number(self, batch: int) -> int:
        """Return Spark's number of a batch."""
        return batch + self._shift

    def batch(self, number: int) -> int:
        """Return the batch of a number of Spark's."""
        return number - self._shift

    def _path(self, log: str, batch: int) -> Path:
        return path_below(self.location, log, str(self.number(batch)))

    def find_new(self, position: InputPosition) -> set[str]:
        """Return the named sources of the query of which nothing is recorded, not even where they begin."""
        there = set[str]() if position.beginning is None else names_in(position.beginning)
        for step in position.newest[-1:]:
            there |= decode_offsets(step.offsets).keys()
        return set(self._places.names or ()) - there

    def read_beginning(
        self,
        starts: Sequence[str | None],
        names: Sequence[str] | None = None,
        *,
        batch: int = 0,
        only: Collection[str] | None = None,
    ) -> Step:
        """Read where the sources begin, as a step of batch `BEFORE_FIRST`. Call it while their first batch is running.

        A source with a log of its own has its initial offset there. A file source needs none: it begins with all of its
        files.

        Args:
            starts: per source, the offset (JSON) at which the batch begins; None for a source without one.
            names: per source, its name in Spark's records; by default its number.
            batch: their first batch.
            only: the sources to read this of, by the names that the stream gives them; None for all.

        Raises:
            StateError: the query does not use this location as its checkpoint location.
        """
        header = "\n".join(self.check(batch).read_text().splitlines()[:2])
        if self._places.names is not None:
            names, header = self._places.names, header.replace("v1", NAMED, 1)
        logs: dict[str, dict[str, str]] = {}
        for directory in sorted((self.location / "sources").glob("*")):
            log = self._places.log_of(directory.name)
            if only is not None and log not in only:
                continue
            fresh = {n: text for n, text in self._fresh_entries(directory).items() if not is_file_log(text)}
            if fresh:
                logs[log] = {str(n): text for n, text in sorted(fresh.items())}
                self._recorded[directory.name] = max(fresh)
        offsets = [
            (name, NO_OFFSET if start is None or name in logs or str(number) in logs else _one_line(start))
            for number, (name, start) in enumerate(zip(names or map(str, range(len(starts))), starts, strict=True))
            if only is None or name in only
        ]
        return Step(0, BEFORE_FIRST, encode_offsets(header, offsets), json.dumps(logs))

    def check_names(self, names: Sequence[str] | None, step: Step) -> None:
        """Check that a query has just the sources whose offsets or files are recorded up to `step`.

        Where the record names them, Spark would pass over the offsets of a source that is gone, and ask a new one where
        it begins at each start, until its first batch is committed. Otherwise it compares how many there are.

        Args:
            names: per source of the query, its name in Spark's records; None if this Spark has no names.

        Raises:
            UsageError: it has others.
        """
        if names is None or self._places.names is not None:
            return
        have, recorded = set(names), set(self._recorded)
        if all(map(str.isdigit, have | recorded)):  # a source that is used twice has two numbers
            recorded.clear()
        have_others = not recorded <= have
        if names_sources(step.offsets) and not step.offsets.startswith(f"{NAMED}\n"):
            recorded |= decode_offsets(step.offsets).keys()
            have_others = recorded != have
        if have_others:
            raise UsageError(
                f"the sources of the query are {', '.join(sorted(have))}, but the stream was recorded with "
                f"{', '.join(sorted(recorded))}: their names must stay as they are (DataStreamReader.name)"
            )

    def rerun(self, step: Step) -> None:
        """Make `step` the first batch of the next query at this location, as it was logged. No query may be running.

        Spark's record after the batch before `step` is removed. That batch must be the newest one prepared or rerun,
        and no batch may have been `read` since.

        Raises:
            UsageError: the batch read a source that the query does not have.
        """
        self._check_has_sources(step)
        for name in ("offsets", "commits"):
            _unlink_after(self.location / name, self.number(step.batch) - 1)
        for directory in (self.location / "sources").glob("*"):
            _unlink_after(directory, self._recorded.get(directory.name, -1))
        for source in self._take(step):
            self._write_source(source)
        if self.number(step.batch):
            before = step.batch - 1
            _write(self._path("commits", before), self._commit_of(self._path("offsets", before).read_text()))
        _write(self._path("offsets", step.batch), self._places.offsets_for_spark(step, self._read))
        self._read |= decode_offsets(step.offsets)

    def _check_has_sources(self, step: Step) -> None:
        self._places.check_form(step)
        if self._places.names is None and not step.offsets.startswith(f"{NAMED}\n"):
            return
        logs = {name_of_log(step.offsets, log) for log in decode_sources(step.sources)}
        for name, offset in decode_offsets(step.offsets).items():
            if not self._places.has(name) and (name in logs or offset != self._read.get(name, NO_OFFSET)):
                raise UsageError(
                    f"step {step.step} read the source {name}, which the code no longer has: run the code that has it"
                )

    def _take(self, step: Step) -> list[str]:
        """Add a logged batch's source log entries to those known; return the directories of the sources that have
        entries."""
        taken = []
        for log, texts in decode_sources(step.sources).items():
            source = self._places.directory_of(step, log)
            if source is None:
                continue
            taken.append(source)
            # The pruned part of the log is one entry; steps read before it may have some of its files, too.
            entries = split(texts) if step.batch_id == BEFORE_FIRST else texts
            fresh = {n: self._to_local(to_spark(text)) for n, text in entries.items()}
            self._entries.setdefault(source, {}).update(fresh)
            self._recorded[source] = max(self._entries[source])
        return taken

    def read(self, batch: int, step: int, sizes: Callable[[], Mapping[str, int]] = dict) -> Step:
        """Read the record of the batch that is running as `step`; each source log entry is returned only once.

        Args:
            sizes: returns the sizes of the files that the batch reads, by URL; called only if it reads any.

        Raises:
            StateError: the query does not use this location as its checkpoint location.
        """
        path = self.check(batch)
        self._entries.clear()
        sources: dict[str, dict[str, str]] = {}
        for directory in sorted((self.location / "sources").glob("*")):
            fresh = self._fresh_entries(directory) | self._reduced.pop(directory, {})
            if fresh:
                if any(map(is_file_log, fresh.values())):
                    found = sizes()
                    fresh = {n: add_sizes(text, found) for n, text in fresh.items()}
                log = self._places.log_of(directory.name)
                sources[log] = {str(n): self._to_portable(text) for n, text in sorted(fresh.items())}
                self._recorded[directory.name] = max(fresh)
        begins = self._beginning
        read = {name: offset for name, offset in self._read.items() if offset != begins.get(name, NO_OFFSET)}
        return Step(step, batch, self._places.offsets_to_record(path.read_text(), read), json.dumps(sources))

    def reduce(self, batch: int, reason: Callable[[LoggedFile], str | None]) -> bool:
        """Decide which files the running batch is to be run again without (`write_reduced`); return whether there are
        any. Nothing is written.

        Args:
            reason: returns why a file is left out, None for one that is not.
        """
        self.check(batch)
        found: dict[Path, dict[int, str]] = {}
        for directory in sorted((self.location / "sources").glob("*")):
            if directory in self._reduced:
                continue
            for number, text in self._fresh_entries(directory).items():
                reduced = leave_out(text, reason)
                if reduced != text:
                    found.setdefault(directory, {})[number] = reduced
        self._reduced |= found
        return bool(found)

    def write_reduced(self) -> None:
        """Let the next query at this location begin with the newest batch without the files that `reduce` decided on,
        and know them as seen. No query may be running, and Spark may not have committed the batch."""
        for directory, entries in self._reduced.items():
            for number, text in entries.items():
                compact = directory / f"{number}.compact"
                path = compact if compact.exists() else directory / str(number)
                header, *lines = path.read_text().splitlines()
                others = [line for line in lines if json.loads(line).get("batchId") != number]
                (directory / f".{path.name}.crc").unlink(missing_ok=True)
                _write(path, "\n".join([header, *others, *to_spark(text).splitlines()[1:]]))

    def files_of(self, step: Step) -> list[LoggedFile]:
        """List the files of a batch, as they were recorded: those that it reads from file sources, and those that it
        was run without."""
        texts = [text for entries in decode_sources(step.sources).values() for text in entries.values()]
        return [file for text in texts for file in list_files(self._to_local(text))]

    def unread_of(self, step: Step) -> list[LoggedFile]:
        """List the files that a batch was run without."""
        if not has_unread(step.sources):  # there may be a hundred thousand others
            return []
        return [file for file in self.files_of(step) if file.unread is not None]

    def _to_portable(self, entry: str) -> str:
        """Replace the warehouse's path in an entry by a placeholder, as the catalog records it."""

        def replace(found: re.Match[str]) -> str:
            for name, path in self._warehouse.items():
                if found[2].startswith(f"{path}/"):
                    return f"{found[1]}{name}{found[2].removeprefix(path)}"
            return found[0]

        return _LOCAL_FILE.sub(replace, entry)

    def _to_local(self, entry: str) -> str:
        """Replace the placeholder in an entry by the warehouse's current path."""

        def replace(found: re.Match[str]) -> str:
            # A placeholder without a path of its own (without symbolic links) gets the path as given.
            path = self._warehouse.get(found[2]) or next(iter(self._warehouse.values()), found[2])
            return f"{found[1]}{path}"

        return _MOVED_FILE.sub(replace, entry)

    def check(self, batch: int) -> Path:
        """Return the file with the offsets that a batch covers.

        Raises:
            StateError: it does not exist, so the query does not use this location as its checkpoint location.
        """
        path = self._path("offsets", batch)
        if not path.is_file():
            raise StateError(
                f"no record of batch {batch} in {self.location}",
                advice="start the query with .option('checkpointLocation', runner.checkpoint_location)",
            )
        with path.open() as file:
            check_offset_version(file.readline().strip())
        return path

    def _commit_of(self, offsets: str) -> str:
        """Make the commit record of a batch with these offsets; the next batch continues from its watermark."""
        with translate_decode_errors("a step of the input log in the catalog", "offsets", StateError):
            header = check_object(parse_json(offsets.splitlines()[1]), "the header")
        watermark = {"nextBatchWatermarkMs": header.get("batchWatermarkMs", 0)}
        return f"v{self._form.commit_version}\n{json.dumps(watermark)}"

    def _fresh_entries(self, directory: Path) -> dict[int, str]:
        recorded = self._recorded.get(directory.name, -1)
        fresh: dict[int, str] = {}
        for path in directory.iterdir():
            number = path.name.removesuffix(".compact")
            if not number.isdigit() or int(number) <= recorded:
                continue
            text = path.read_text()
            fresh[int(number)] = _only_entry(text, int(number)) if path.suffix == ".compact" else text
        return fresh

    def _write_source(self, source: str) -> None:
        """Write the missing files of a source's log."""
        directory, entries = path_below(self.location, "sources", source), self._entries[source]
        numbers = sorted(entries)
        compacted = -1
        if is_file_log(entries[numbers[-1]]):
            # At the last multiple of its interval, a file source expects one file with all entries up to it.
            compacted = (numbers[-1] + 1) // self._form.compact_interval * self._form.compact_interval - 1
        compact = directory / f"{compacted}.compact"
        if compacted >= 0 and not compact.exists():
            header = entries[numbers[0]].splitlines()[0]
            whole = [line for n in numbers if n <= compacted for line in entries[n].splitlines()[1:]]
            _write(compact, "\n".join([header, *whole]))
        for n in numbers[bisect_right(numbers, compacted) :]:
            if not (directory / str(n)).exists():
                _write(directory / str(n), entries[n])


def span(before: Step | None, step: Step) -> str:
    """Describe the offsets that a step read, as JSON for dead letters (`run.dead_letters`).

    They begin at the end of the batch `before`, or, for None, at the beginning of the sources. A step without a batch
    reads none.
    """
    named = any(names_sources(each.offsets) for each in (before, step) if each is not None)
    begin = _offsets(before, named) if before else None
    end = begin if step.batch_id is None else _offsets(step, named)
    return json.dumps({"batch": step.batch_id, "from": begin, "to": end})


def _offsets(step: Step, named: bool) -> list[Any] | dict[str, Any]:
    """Return the offset of each source: by name if `named`, or by position."""
    found = {
        source: None if offset == NO_OFFSET else json.loads(offset)
        for source, offset in decode_offsets(step.offsets).items()
    }
    return found if named else list(found.values())


def _unlink_after(directory: Path, newest: int) -> None:
    """Remove the files of one of Spark's logs whose number is above `newest`."""
    for path in directory.glob("*"):
        number = path.name.removesuffix(".compact")
        if number.isdigit() and int(number) > newest:
            path.unlink()


def _write(path: Path, text: str) -> None:
    make_private_directory(path.parent)
    write_private_file(path, text.encode())


def _one_line(offset: str) -> str:
    """Put an offset on one line for Spark's log; a source may write its JSON over several lines."""
    return json.dumps(json.loads(offset)) if len(offset.splitlines()) > 1 else offset


def _only_entry(compact: str, number: int) -> str:
    header, *lines = compact.splitlines()
    return "\n".join([header, *(line for line in lines if json.loads(line).get("batchId") == number)])
