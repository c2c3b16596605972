"""Read a database at one version, in any process, while later steps change the original (docs/adr/0050).

A pin has a database of its own: RocksDB's checkpoint, whose table files are hard links to those of the original. They
never change, and stay until the pin is removed, whatever becomes of the original.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from siltstone.errors import StateError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import StateSnapshot, TableSnapshot
from siltstone.state.backends.pins import remove_pin, snapshot_gone_error
from siltstone.state.backends.rocksdb.database import DATABASE, AtomicWrite, Database
from siltstone.state.backends.rocksdb.header import HEADER, open_tables, read_opaque
from siltstone.state.backends.rocksdb.table import RocksDBCounts
from siltstone.state.backends.rocksdb.undo import Image
from siltstone.state.backends.table_records import load_record
from siltstone.state.schema import TableSchema


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
            table.reset(*load_record(header, name, RocksDBCounts))
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
