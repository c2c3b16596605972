"""The working state of one subtask in one directory, moved from version to version in steps.

    header                     the current version: counts, digests, shapes; replaced by renaming
    undo/<step>                before-images of a step that can be rolled back; `spare` is a file to reuse
    opaque/<variable>.<step>   the values of an opaque variable after that step (Arrow IPC)
    pins/<version>-<random>/   hard links that keep a version for a snapshot's readers (`pins`)
    tables/<name>/<n>/         rows, slots, offsets, bytes, changes.<interval> of a table, its nth generation

A step begins by copying the current header to `undo/<step>`; an undo file of a step above the header's version
therefore belongs to an interrupted step, and is rolled back at open. The header contains the boot id: a restarted
machine may have lost pages that were never synced, so its state is not trusted.
"""

import os
import subprocess
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from siltstone.errors import StateError, Unreachable
from siltstone.model import KeyGroupRange
from siltstone.state.backend import StateTable
from siltstone.state.backends.checks import check_begin, check_commit, check_opaque, tracks
from siltstone.state.backends.heap.header import DISTRUST, parse, render
from siltstone.state.backends.heap.mapped_array import forget_removed_files
from siltstone.state.backends.heap.opaque import read_opaque, render_opaque
from siltstone.state.backends.heap.pins import drop_pins, fill_pin, link_undo
from siltstone.state.backends.heap.snapshot import HeapSnapshot
from siltstone.state.backends.heap.table import HeapCounts, HeapTable
from siltstone.state.backends.heap.undo import HEADER, UndoWriter, read_frames
from siltstone.state.backends.pins import make_pin
from siltstone.state.backends.table_records import load_record, record_empty, record_tables
from siltstone.state.schema import TableSchema
from siltstone.store.private import make_private_directory, private_mode, write_private_file

FORMAT = 3
_MADE_FIRST = {"undo", "opaque", "header.new"}
"""what a new directory has before its header"""


class HeapBackend:
    """Implements `Backend` with `HeapState`."""

    def open(
        self,
        directory: Path,
        schemas: Mapping[str, TableSchema],
        opaque: tuple[str, ...],
        groups: KeyGroupRange,
        max_parallelism: int,
    ) -> "HeapState":
        """Open the state in `directory`, or create it empty at version 0 if it is missing."""
        return HeapState(directory, schemas, opaque, groups, max_parallelism)

    def open_snapshot(self, path: Path) -> HeapSnapshot:
        """Open a snapshot that another process may hold."""
        return HeapSnapshot(path)


class HeapState:
    """Implements `SubtaskState`."""

    def __init__(
        self,
        directory: Path,
        schemas: Mapping[str, TableSchema],
        opaque: tuple[str, ...],
        groups: KeyGroupRange,
        max_parallelism: int,
    ) -> None:
        self.directory = directory
        self.groups = groups
        self.max_parallelism = max_parallelism
        forget_removed_files()
        self._shape: dict[str, Any] = {
            "format": FORMAT,
            "boot": boot_id(),
            "groups": [groups.start, groups.end],
            "max_parallelism": max_parallelism,
            "schemas": {name: schema.to_json() for name, schema in sorted(schemas.items())},
            "opaque": sorted(opaque),
        }
        self._step: int | None = None
        self._undo: UndoWriter | None = None
        self._changed: dict[str, set[int]] = {}
        self._header = self._read_or_create()
        self.version: int = self._header["version"]
        self.opaque: Mapping[str, dict[int, bytes]] = self._saved_opaque()
        self._tables: dict[str, HeapTable] = {}
        self.tables: Mapping[str, StateTable] = self._tables
        for name, schema in sorted(schemas.items()):
            counts, digests = load_record(self._header, name, schema, HeapCounts)
            held = schema.held(groups, max_parallelism)
            self._tables[name] = HeapTable(schema, held, max_parallelism, directory / "tables" / name, counts, digests)
        self._pending = set(self._undo_steps())
        """steps with before-images; an interval may have many, so they are read when they are needed"""
        for step in sorted((step for step in self._pending if step > self.version), reverse=True):
            self._undo_step(step)

    # Steps

    def begin(self, step: int, *, tracking: bool | Collection[str]) -> None:
        """Begin to write version `step`; `tracking` says whether changes are noted from now on, or of which tables."""
        check_begin(step, self._step, self.version)
        if not self._pending and any([table.compact_if_worth() for table in self._tables.values()]):
            self._write_header(self.version)
            self._sweep()
        path, spare = self._undo_path(step), self.directory / "undo" / "spare"
        if spare.exists():
            os.replace(spare, path)
        self._undo = UndoWriter(path, step, (self.directory / "header").read_bytes())
        link_undo(self.directory, step, path)
        self._pending.add(step)
        self._step = step
        for ordinal, (name, table) in enumerate(self._tables.items()):
            table.before = self._before_images(ordinal)
            table.tracking = tracks(tracking, name)

    def _before_images(self, ordinal: int) -> Any:
        undo = self._undo
        assert undo is not None
        return lambda rows, ids, records: undo.append(ordinal, rows, ids, records)

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """Replace the bytes of some key groups of one opaque variable."""
        if self._step is None:
            raise StateError("state can only change within a step", advice="call begin first")
        check_opaque(variable, values, self.opaque, self.groups)
        self.opaque[variable].update({group: bytes(value) for group, value in values.items()})
        self._changed.setdefault(variable, set()).update(values)

    @property
    def changed_opaque(self) -> Mapping[str, Collection[int]]:
        """The opaque variables that the open step has set -> the key groups whose values it set."""
        return self._changed

    def commit(self) -> None:
        """Complete the step: it becomes `version`."""
        step = check_commit(self._step)
        for variable in self._changed:
            self._save_opaque(variable, step)
        self._write_header(step)
        self.version = step
        self._end_step()

    def rollback(self) -> None:
        """Undo the newest step, begun or committed; StateError if its before-images are gone."""
        step = self.version if self._step is None else self._step
        if step not in self._pending:
            raise StateError(f"the before-images of step {step} are gone", advice=DISTRUST)
        self._undo_step(step)
        self._end_step()

    def _end_step(self) -> None:
        if self._undo:
            self._undo.close()
        self._undo, self._step = None, None
        self._changed.clear()
        for table in self._tables.values():
            table.before = None

    def _undo_step(self, step: int) -> None:
        # If this is interrupted, all of it is repeated: the header is written last, then the undo file is removed.
        before, path = self._header_before(step), self._undo_path(step)
        self._pending.remove(step)
        frames = list(read_frames(path, step))
        if before is not None:
            drop_pins(self.directory, above=before["version"])
            for ordinal, (name, table) in enumerate(self._tables.items()):
                images = [(f.rows, f.ids, f.records) for f in reversed(frames) if f.table == ordinal]
                table.restore(images, *load_record(before, name, table.schema, HeapCounts))
            self._replace(self.directory / "header", frames[0].records.tobytes())
            self._header = before
            self.version = before["version"]
            self.opaque = self._saved_opaque()
        path.unlink()

    def release(self, step: int) -> None:
        """Drop before-images of steps up to and including `step`."""
        released = [old for old in self._pending if old <= min(step, self.version)]
        for old in released:
            self._pending.remove(old)
            path = self._undo_path(old)
            if path.stat().st_nlink > 1:  # a snapshot's readers need it
                path.unlink()
            else:
                # The file's pages are in memory already, so the next step overwrites them.
                os.replace(path, self.directory / "undo" / "spare")
        if released:
            self._sweep()

    def snapshot(self, version: int | None = None) -> HeapSnapshot:
        """Pin a version (the newest committed one by default), in time that does not depend on its size.

        Raises:
            StateError: a later step's before-images are gone, or there never was such a version.
        """
        later = sorted(step for step in self._pending if step > (self.version if version is None else version))
        header = self._header
        if version is not None and version != self.version:
            before = self._header_before(later[0]) if later else None
            if before is None or before["version"] != version:
                raise StateError(f"{self.directory} has version {self.version}, and version {version} no more")
            header = before
        undo = [(step, self._undo_path(step)) for step in later]
        return HeapSnapshot(
            *make_pin(self.directory, header["version"], lambda pin: fill_pin(pin, self.directory, header, undo))
        )

    def close(self) -> None:
        """Flush and close the directory; idempotent. An open step is rolled back at the next open."""
        self._end_step()
        for table in self._tables.values():
            table.close()

    # The header

    def _read_or_create(self) -> dict[str, Any]:
        path = self.directory / "header"
        try:
            if path.exists():
                return self._check_header(parse(path.read_bytes(), path))
            if self.directory.exists() and {*os.listdir(self.directory)} - _MADE_FIRST:
                raise StateError(f"{path} is missing", advice=DISTRUST)
            for part in ("undo", "opaque"):
                make_private_directory(self.directory / part)
            empty = record_empty(self._shape["schemas"], HeapCounts())
            header = self._shape | {"version": 0, "tables": empty, "opaque_steps": {}}
            self._replace(path, render(header))
            (self.directory / "tables").mkdir(private_mode(of_directory=True), exist_ok=True)
            return header
        except OSError as error:
            raise Unreachable(
                f"cannot use {self.directory}: {error.strerror}", advice="check its owner and permissions"
            ) from error

    def _check_header(self, header: dict[str, Any]) -> dict[str, Any]:
        for what, mine in self._shape.items():
            if header.get(what) != mine:
                reason = {
                    "boot": "was written before this machine restarted",
                    "format": f"has format {header.get(what)}, not {mine}",
                }.get(what, f"has other {what} ({header.get(what)}) than asked for ({mine})")
                raise StateError(f"{self.directory} {reason}", advice=DISTRUST)
        return header

    def _write_header(self, version: int) -> None:
        tables = record_tables(self._tables, self.groups)
        saved = self._header["opaque_steps"] | dict.fromkeys(self._changed, self._step)
        self._header = self._shape | {"version": version, "tables": tables, "opaque_steps": saved}
        self._replace(self.directory / "header", render(self._header))

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        draft = path.with_name(path.name + ".new")
        try:
            write_private_file(draft, data)
            os.replace(draft, path)
        except OSError as error:
            raise Unreachable(f"cannot write {path}: {error.strerror}; free some space") from error

    # Files

    def _undo_path(self, step: int) -> Path:
        return self.directory / "undo" / f"{step:012d}"

    def _undo_steps(self) -> list[int]:
        try:
            return [int(path.name) for path in (self.directory / "undo").iterdir() if path.name.isdigit()]
        except FileNotFoundError:  # what removed the directory was killed half way
            raise StateError(f"{self.directory} has no before-images", advice=DISTRUST) from None

    def _header_before(self, step: int) -> dict[str, Any] | None:
        """Return the header before a step; None if the step was interrupted before anything was written."""
        path = self._undo_path(step)
        frame = next(read_frames(path, step), None)
        if frame is not None and frame.table == HEADER:
            return parse(frame.records.tobytes(), path)
        if step <= self.version:
            raise StateError(f"{path} is damaged", advice=DISTRUST)
        return None

    def _saved_opaque(self) -> dict[str, dict[int, bytes]]:
        opaque: dict[str, dict[int, bytes]] = {variable: {} for variable in self._shape["opaque"]}
        for variable, step in self._header["opaque_steps"].items():
            opaque[variable] = read_opaque(self.directory / "opaque" / f"{variable}.{step}")
        return opaque

    def _save_opaque(self, variable: str, step: int) -> None:
        self._replace(self.directory / "opaque" / f"{variable}.{step}", render_opaque(self.opaque[variable]))

    def _sweep(self) -> None:
        """Remove files to which neither the header nor a header before a pending step refers."""
        headers = [self._header]
        for step in sorted(self._pending):
            try:
                headers += [header] if (header := self._header_before(step)) else []
            except StateError:  # damaged: then the step can be undone no more, as if its before-images were gone
                self._pending.remove(step)
                self._undo_path(step).unlink(missing_ok=True)
        for name, table in self._tables.items():
            table.sweep({table.counts.interval, *(header["tables"][name]["interval"] for header in headers)})
        kept = {f"{name}.{step}" for header in headers for name, step in header["opaque_steps"].items()}
        for path in (self.directory / "opaque").iterdir():
            if path.name not in kept:
                path.unlink()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return an id of this machine's current boot; "unknown" if the system does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        pass
    try:
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
