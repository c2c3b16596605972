"""The keys of a subtask's database besides rows, and its header: counts, digests and shapes of one version."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from siltstone.model import KeyGroupRange
from siltstone.state.backends.rocksdb.database import Database
from siltstone.state.backends.rocksdb.table import RocksDBTable, Write
from siltstone.state.schema import TableSchema

HEADER = b"h"
OPAQUE, ROWS, LISTS, UNDO = b"o", b"t", b"c", b"u"


def key_after(prefix: bytes) -> bytes:
    """Return the least key after all with this prefix of one byte."""
    return bytes([prefix[0] + 1])


def render(header: dict[str, Any]) -> bytes:
    """Return the bytes of a header."""
    return json.dumps(header).encode()


def open_tables(
    database: Database, schemas: Mapping[str, TableSchema], groups: KeyGroupRange, max_parallelism: int, write: Write
) -> dict[str, RocksDBTable]:
    """Return the tables of a database, whose changes `write` writes; they have no counts and digests yet."""
    tables = {}
    for ordinal, name in enumerate(sorted(schemas)):
        prefixes = table_prefix(ROWS, ordinal), table_prefix(LISTS, ordinal)
        schema = schemas[name]
        held = schema.held(groups, max_parallelism)
        tables[name] = RocksDBTable(schema, held, max_parallelism, database, write, prefixes)
    return tables


def table_prefix(kind: bytes, ordinal: int) -> bytes:
    """Return what the keys of one kind begin with that are of the nth table by name."""
    return kind + ordinal.to_bytes(2, "big")


def read_opaque(database: Database, names: Sequence[str]) -> dict[str, dict[int, bytes]]:
    """Return the opaque values: variable -> key group -> bytes. `names` are sorted."""
    opaque: dict[str, dict[int, bytes]] = {variable: {} for variable in names}
    for pairs in database.items(OPAQUE, key_after(OPAQUE)):
        for key, value in pairs:
            opaque[names[int.from_bytes(key[1:3], "big")]][int.from_bytes(key[3:5], "big")] = value
    return opaque
