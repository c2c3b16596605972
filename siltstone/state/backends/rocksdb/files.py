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
from siltstone.state.backends.checks import as_table
from siltstone.state.backends.rocksdb.coding import KeyCoding, RowCoding
from siltstone.state.backends.rocksdb.database import CURRENT, TABLE_FILE
from siltstone.state.backends.rocksdb.header import ROWS, table_prefix
from siltstone.state.backends.rocksdb.packing import Packed
from siltstone.state.backends.rocksdb.scan_process import ScanProcess
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
    """Reads the rows of such a directory in a process of its own, which starts at once: the files may be crafted. Close
    it after use.

    Args:
        schemas: of all the tables that it holds.
        stored_bytes: how large its files are.

    Raises:
        Unreachable: the process cannot be started.
    """

    def __init__(self, directory: Path, schemas: Mapping[str, TableSchema], stored_bytes: int) -> None:
        self._place = directory, stored_bytes
        self._tables = {
            name: (KeyCoding(schemas[name], table_prefix(ROWS, ordinal)), RowCoding(schemas[name]), schemas[name])
            for ordinal, name in enumerate(sorted(schemas))
        }
        self._process: ScanProcess | None = ScanProcess(*self._place)

    def scan(self, name: str, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield a table's rows of some key groups, as `StateTable.scan` does.

        Raises:
            ValueError: they cannot be read, or are not rows of this table.
            Unreachable: the process was ended, or the disk is full.
        """
        if name not in self._tables:
            raise ValueError(f"there is no table {name}")
        keys, values, schema = self._tables[name]
        process, self._process, last = self._process or ScanProcess(*self._place), None, groups.start
        try:
            for packed in process.scan(keys.group_start(groups.start), keys.group_start(groups.end)):
                rows, owners = decode_rows(schema, keys, values, *packed)
                if owners[0] < last or owners[-1] >= groups.end or np.any(np.diff(owners.astype(np.int32)) < 0):
                    raise ValueError(f"rows of {name} are not in order of key group")
                last = owners[-1]
                yield rows, owners
            self._process, process = process, None
        finally:
            if process is not None:  # it stands in the middle
                process.close()

    def close(self) -> None:
        """Close it; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


def decode_rows(
    schema: TableSchema, keys: KeyCoding, values: RowCoding, packed_keys: Packed, packed_values: Packed
) -> tuple[pa.Table, np.ndarray]:
    """Decode rows, which may be crafted, and their key groups (uint16[n]).

    Raises:
        ValueError: they are not rows of this table.
    """
    columns, owners = keys.decode(packed_keys)
    columns += values.decode(packed_values, values.records(packed_values))
    table = as_table(columns, schema.rows, len(owners))
    table.validate(full=True)
    return table, owners
