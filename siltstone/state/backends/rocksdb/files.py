"""Rows as files that never change: RocksDB's table files of one moment, with what it needs to open them.

    000012.sst ...       table files, of rows only (`database.Database.copy_rows`)
    MANIFEST-000020      which of them lie in which level
    CURRENT              the name of that

Later states share table files with earlier ones, by hard links. Only an owner of the directory may open it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backends.rocksdb.database import CURRENT, TABLE_FILE, Changes, Database
from siltstone.state.backends.rocksdb.header import open_tables
from siltstone.state.backends.rocksdb.undo import Image
from siltstone.state.schema import TableSchema
from siltstone.store.files import link_or_copy, make_durable
from siltstone.store.private import private_mode, write_private_file


def manifest_of(directory: Path) -> Path:
    """Return the file that `CURRENT` names."""
    return directory / (directory / CURRENT).read_text().strip()


def write_manifest(directory: Path, name: str, data: bytes) -> None:
    """Write the two files that make table files a database."""
    write_private_file(directory / name, data)
    write_private_file(directory / CURRENT, f"{name}\n".encode())


def table_files(directory: Path) -> list[str]:
    """Return the names of the table files, sorted."""
    return sorted(name for name in os.listdir(directory) if name.endswith(TABLE_FILE))


def copy_files(source: Path, target: Path) -> None:
    """Copy a directory of such files: RocksDB may go on from the copy. All of it is durable on return."""
    target.mkdir(private_mode(of_directory=True))
    for name in table_files(source):
        link_or_copy(source / name, target / name)
    write_manifest(target, manifest_of(source).name, manifest_of(source).read_bytes())
    for path in [*target.iterdir(), target]:
        make_durable(path)


class RowFiles:
    """Reads the rows of such a directory. Close it after use.

    Args:
        schemas: of all the tables that it holds.

    Raises:
        StateError: RocksDB cannot open it.
    """

    def __init__(
        self, directory: Path, schemas: Mapping[str, TableSchema], groups: KeyGroupRange, max_parallelism: int
    ) -> None:
        self.schemas = schemas
        self._database = Database(directory, only_rows=True)
        self._tables = open_tables(self._database, schemas, groups, max_parallelism, _refuse)

    def scan(self, name: str, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield a table's rows of some key groups, as `StateTable.scan` does.

        Raises:
            StateError: RocksDB cannot read them.
        """
        return self._tables[name].scan(groups)

    def close(self) -> None:
        """Close it; idempotent."""
        self._database.close()


def _refuse(changes: Changes, image: Image | None) -> None:
    raise AssertionError("files do not change")
