"""The working state of one subtask in one RocksDB database, moved from version to version in steps.

    h                                the header: version, shape, counts and digests of the tables
    o <variable> <key group>         the bytes of an opaque variable
    t <table> <key group> <key>      a row (`coding`); rows have a column family, and so files, of their own
    c <table> <interval> <n>         a list of changed keys, from the nth on
    u <step> <n>                     before-images of a step that can be rolled back; n = 0 is the header before it

Every change is one batch together with its before-images, and a batch is written completely or not at all. A step
begins by copying the current header; images of a step above the header's version therefore belong to an interrupted
step, and are rolled back at open. A restart of the machine may lose the newest batches, never ones before them, so
that what is left is an earlier version, complete, or an interrupted step after it.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import StateError, Unreachable
from siltstone.model import KeyGroupRange
from siltstone.state.backend import LOCAL_SETS, TIME_INDEXES, StateSnapshot, StateTable, TableSnapshot
from siltstone.state.backends.checks import check_begin, check_commit, check_opaque, tracks
from siltstone.state.backends.pins import LOCK, PINS, held_pins, make_pin, remove_pin, snapshot_gone_error
from siltstone.state.backends.rocksdb.database import DATABASE, DISTRUST, AtomicWrite, Database
from siltstone.state.backends.rocksdb.files import copy_files
from siltstone.state.backends.rocksdb.header import (
    HEADER,
    OPAQUE,
    UNDO,
    key_after,
    open_tables,
    read_opaque,
    render,
)
from siltstone.state.backends.rocksdb.packing import from_list
from siltstone.state.backends.rocksdb.table import RocksDBCounts
from siltstone.state.backends.rocksdb.undo import Image
from siltstone.state.backends.table_records import load_record, record_empty, record_tables
from siltstone.state.schema import TableSchema
from siltstone.store.private import make_private_directory


class RocksDBSnapshot(StateSnapshot):
    """Implements `StateSnapshot`. The owner has `lock`; other processes read it by `RocksDBSnapshot(path)`."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        """Open a pinned version.

        Raises:
            StateError: the pin is gone.
        """
        self.path = path
        self._lock = lock
        if not (path / DATABASE / "CURRENT").exists():  # rocksdict would make the directory
            raise snapshot_gone_error(path)
        try:
            self._database = Database(path / DATABASE, read_only=True)
            header = json.loads(self._database.get(HEADER) or b"")
        except (StateError, ValueError):
            raise snapshot_gone_error(path) from None
        self.version: int = header["version"]
        self.groups = KeyGroupRange(*header["groups"])
        self.opaque = read_opaque(self._database, header["opaque"])
        schemas = {name: TableSchema.from_json(schema) for name, schema in header["schemas"].items()}
        tables = open_tables(self._database, schemas, self.groups, header["max_parallelism"], _refuse)
        for name, table in tables.items():
            table.reset(*load_record(header, name, table.schema, RocksDBCounts))
        self.tables: Mapping[str, TableSnapshot] = tables

    def release(self) -> None:
        """Let the files of this version go; idempotent. A process that does not own the snapshot only closes it."""
        self.tables = {}
        self._database.close()
        if self._lock is not None:
            remove_pin(self.path)
            os.close(self._lock)
            self._lock = None


def _refuse(changes: AtomicWrite, image: Image | None) -> None:
    raise StateError("a snapshot does not change")


FORMAT = 2
"""2: rows have a column family of their own"""


class RocksDBBackend:
    """Implements `Backend` with `RocksDBState`."""

    def open(
        self,
        directory: Path,
        schemas: Mapping[str, TableSchema],
        opaque: tuple[str, ...],
        groups: KeyGroupRange,
        max_parallelism: int,
    ) -> "RocksDBState":
        """Open the state in `directory`, or create it empty at version 0 if it is missing."""
        return RocksDBState(directory, schemas, opaque, groups, max_parallelism)

    def open_snapshot(self, path: Path) -> RocksDBSnapshot:
        """Open a snapshot that another process may hold."""
        return RocksDBSnapshot(path)


class RocksDBState:
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
        self._shape: dict[str, Any] = {
            "format": FORMAT,
            "groups": [groups.start, groups.end],
            "max_parallelism": max_parallelism,
            "schemas": {name: schema.to_json() for name, schema in sorted(schemas.items())},
            "opaque": sorted(opaque),
        }
        self._step: int | None = None
        self._changed: dict[str, set[int]] = {}
        self._database = Database(_make_home(directory))
        try:
            self._open(schemas)
        except BaseException:
            self._database.close()
            raise

    def _open(self, schemas: Mapping[str, TableSchema]) -> None:
        self._header = self._read_or_create()
        self.version: int = self._header["version"]
        self.opaque: Mapping[str, dict[int, bytes]] = read_opaque(self._database, self._shape["opaque"])
        self._schemas = schemas
        self._tables = open_tables(self._database, schemas, self.groups, self.max_parallelism, self._write)
        self.tables: Mapping[str, StateTable] = self._tables
        self._reset_tables()
        self._pending: dict[int, int] = {}
        """steps that can be rolled back, and how many values under `u` each has"""
        for key in self._database.keys(UNDO, key_after(UNDO)):
            step = int.from_bytes(key[1:9], "big")
            self._pending[step] = self._pending.get(step, 0) + 1
        for step in sorted((step for step in self._pending if step > self.version), reverse=True):
            self._undo_step(step)

    # Steps

    def begin(self, step: int, *, tracking: bool | Collection[str]) -> None:
        """Begin to write version `step`; `tracking` says whether changes are noted from now on, or of which tables."""
        check_begin(step, self._step, self.version)
        held_pins(self.directory)
        changes = self._database.changes()
        changes.put([_undo_key(step, 0)], [render(self._header)])
        self._database.write(changes)
        self._pending[step] = 1
        self._step = step
        for name, table in self._tables.items():
            table.begin(tracking=tracks(tracking, name))

    def _write(self, changes: AtomicWrite, image: Image | None) -> None:
        if self._step is None:
            raise StateError("state can only change within a step", advice="call begin first")
        ordinal = self._pending[self._step]
        if image is not None and len(image.keys):
            changes.put([_undo_key(self._step, ordinal)], [image.pack()])
            self._pending[self._step] += 1
        try:
            self._database.write(changes)
        except BaseException:
            self._pending[self._step] = ordinal
            raise

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """Replace the bytes of some key groups of one opaque variable."""
        if self._step is None:
            raise StateError("state can only change within a step", advice="call begin first")
        check_opaque(variable, values, self.opaque, self.groups)
        own = self.opaque[variable]
        keys = [self._opaque_key(variable, group) for group in values]
        data = [bytes(value) for value in values.values()]
        changes = self._database.changes()
        changes.put(keys, data)
        self._write(changes, Image(from_list(keys), from_list([own.get(group) for group in values])))
        own.update(zip(values, data, strict=True))
        self._changed.setdefault(variable, set()).update(values)

    @property
    def changed_opaque(self) -> Mapping[str, Collection[int]]:
        """The opaque variables that the open step has set -> the key groups whose values it set."""
        return self._changed

    def commit(self) -> None:
        """Complete the step: it becomes `version`."""
        step = check_commit(self._step)
        header = self._shape | {"version": step, "tables": record_tables(self._tables, self.groups)}
        changes = self._database.changes()
        changes.put([HEADER], [render(header)])
        self._database.write(changes)
        self._header, self.version = header, step
        self._end_step()

    def rollback(self) -> None:
        """Undo the newest step, begun or committed; StateError if its before-images are gone."""
        step = self.version if self._step is None else self._step
        if step not in self._pending:
            raise StateError(f"the before-images of step {step} are gone", advice=DISTRUST)
        self._undo_step(step)
        self._end_step()

    def _end_step(self) -> None:
        self._step = None
        self._changed.clear()

    def _undo_step(self, step: int) -> None:
        # If this is interrupted, all of it is repeated: header and images are replaced last, together.
        images = [_undo_key(step, ordinal) for ordinal in range(self._pending[step])]
        before = self._header_before(step)
        for key in images[:0:-1]:
            data = self._database.get(key)
            if data is None:
                raise StateError(f"before-images of step {step} are missing", advice=DISTRUST)
            changes = self._database.changes()
            Image.unpack(data).undo(changes)
            self._database.write(changes)
        changes = self._database.changes()
        for name, table in self._tables.items():
            if not before["tables"][name]["live"]:
                table.clear(changes)
        changes.put([HEADER], [render(before)])
        changes.delete(images)
        self._database.write(changes)
        del self._pending[step]
        self._header, self.version = before, before["version"]
        self.opaque = read_opaque(self._database, self._shape["opaque"])
        self._reset_tables()

    def release(self, step: int) -> None:
        """Drop before-images of steps up to and including `step`."""
        released = [old for old in self._pending if old <= min(step, self.version)]
        if not released:
            return
        changes = self._database.changes()
        changes.delete([_undo_key(old, ordinal) for old in released for ordinal in range(self._pending[old])])
        for old in released:
            del self._pending[old]
        headers = [self._header, *map(self._header_before, sorted(self._pending))]
        for name, table in self._tables.items():
            table.sweep(min(header["tables"][name]["interval"] for header in headers), changes)
        self._database.write(changes)

    def snapshot(self, version: int | None = None) -> RocksDBSnapshot:
        """Pin a version (the newest committed one by default): the later steps are undone in the pin.

        Raises:
            StateError: a later step's before-images are gone, or there never was such a version.
        """
        wanted = self.version if version is None else version
        later = sorted(step for step in self._pending if step > wanted)
        if wanted != self.version and (not later or self._header_before(later[0])["version"] != wanted):
            raise StateError(f"{self.directory} has version {self.version}, and version {wanted} no more")

        def fill(pin: Path) -> None:
            self._database.copy_to(pin / DATABASE)
            opaque = tuple(self._shape["opaque"])
            copy = RocksDBState(pin, self._schemas, opaque, self.groups, self.max_parallelism)
            try:
                while copy.version > wanted:
                    copy.rollback()
            finally:
                copy.close()

        return RocksDBSnapshot(*make_pin(self.directory, wanted, fill))

    def copy_rows(self, directory: Path) -> dict[str, tuple[int, int]]:
        """Copy the rows as they are now into a new directory (`RowFilesState`)."""
        self._database.copy_rows(directory)
        return {name: (table.counts.live, table.counts.interval + 1) for name, table in self._tables.items()}

    def load_rows(self, name: str, batches: Iterable[tuple[pa.Table, np.ndarray]]) -> None:
        """Fill key groups of an empty table in order of key (`RowFilesState`)."""
        if self._step is None:
            raise StateError("state can only change within a step", advice="call begin first")
        self._tables[name].load(batches)

    def adopt_rows(
        self, source: Path, counts: Mapping[str, tuple[int, int]], digests: Mapping[str, np.ndarray]
    ) -> None:
        """Let empty state have the rows of a directory (`RowFilesState`)."""
        if self.version or self._pending:
            raise StateError(f"{self.directory} has version {self.version} already", advice=DISTRUST)
        self._database.close()
        home = self.directory / DATABASE
        shutil.rmtree(home)
        copy_files(source, home)
        # If this ends here, rows without a header are not trusted.
        self._database = Database(home)
        tables = open_tables(self._database, self._schemas, self.groups, self.max_parallelism, self._write)
        for name, table in tables.items():
            live, interval = counts[name]
            table.reset(RocksDBCounts(live=live, interval=interval), digests[name].copy())
        changes = self._database.changes()
        header = self._shape | {"version": 0, "tables": record_tables(tables, self.groups)}
        changes.put([HEADER], [render(header)])
        self._database.write(changes)
        self._open(self._schemas)

    def close(self) -> None:
        """Close the database; idempotent. An open step is rolled back at the next open."""
        self._end_step()
        self._database.close()

    # The header

    def _read_or_create(self) -> dict[str, Any]:
        data = self._database.get(HEADER)
        if data is not None:
            return self._check_header(json.loads(data))
        if not self._database.is_empty():
            raise StateError(f"{self.directory} has no header", advice=DISTRUST)
        empty = record_empty(self._shape["schemas"], RocksDBCounts())
        header = self._shape | {"version": 0, "tables": empty}
        changes = self._database.changes()
        changes.put([HEADER], [render(header)])
        self._database.write(changes)
        return header

    def _check_header(self, header: dict[str, Any]) -> dict[str, Any]:
        for what, mine in self._shape.items():
            if header.get(what) != mine:
                raise StateError(
                    f"{self.directory} has other {what} ({header.get(what)}) than asked for ({mine})", advice=DISTRUST
                )
        return header

    def _header_before(self, step: int) -> dict[str, Any]:
        data = self._database.get(_undo_key(step, 0))
        if data is None:
            raise StateError(f"the header before step {step} is missing", advice=DISTRUST)
        return json.loads(data)

    def _reset_tables(self) -> None:
        for name, table in self._tables.items():
            table.reset(*load_record(self._header, name, table.schema, RocksDBCounts))

    # Opaque values

    def _opaque_key(self, variable: str, group: int) -> bytes:
        return OPAQUE + self._shape["opaque"].index(variable).to_bytes(2, "big") + int(group).to_bytes(2, "big")


def _make_home(directory: Path) -> Path:
    """Make the directory of the database.

    Raises:
        StateError: the directory has something else, such as state of another backend.
        Unreachable: it cannot be made.
    """
    home = directory / DATABASE
    try:
        make_private_directory(home)
        others = sorted({*os.listdir(directory)} - {DATABASE, PINS, LOCK, LOCAL_SETS, TIME_INDEXES})
    except OSError as error:
        raise Unreachable(
            f"cannot use {directory}: {error.strerror}", advice="check its owner and permissions"
        ) from error
    if others:
        raise StateError(f"{directory} has {others[0]}, which is not of RocksDB's backend", advice=DISTRUST)
    return home


def _undo_key(step: int, ordinal: int) -> bytes:
    return UNDO + step.to_bytes(8, "big") + ordinal.to_bytes(8, "big")
