"""The `.files` object: how table files of RocksDB are a database that holds the rows of one subtask.

A checkpoint in form `files` has, per subtask, one such object, and the table files that it lists by their checksums. It
does not name objects: the handles of the checkpoint do, and each is verified by its checksum. RocksDB's own manifest
is in it. That refers to files by numbers only, so it cannot lead out of a directory.

    "SILTFIL1" | JSON | xxh3-64
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from siltstone.decoding import (
    check_integer,
    check_object,
    decoded_bytes_max,
    parse_json,
    translate_decode_errors,
)
from siltstone.format.coding import Bytes, seal, unseal
from siltstone.model import MAX_MAX_PARALLELISM, KeyGroupRange, check_table_name
from siltstone.state.schema import TableSchema

MAGIC = b"SILTFIL1"
_NUMBER_MAX = (1 << 63) - 1
_INTERVAL_MAX = (1 << 32) - 2
_FILE_BYTES = 512
"""approximate memory of one entry of a file"""
_CHECKSUM_CHARACTERS = 200


@dataclass(frozen=True)
class TableFile:
    """One table file: its name in the database, its size in bytes, its checksum."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class TableRows:
    """One table in the files: its schema, the number of its live rows, and an interval of change tracking that is later
    than any that its rows are marked with."""

    schema: TableSchema
    rows: int
    interval: int


@dataclass(frozen=True)
class FilesIndex:
    """What a `.files` object says.

    Attributes:
        tables: all tables of the operator.
        files: the table files.
        manifest: name and bytes of RocksDB's manifest.
    """

    key_groups: KeyGroupRange
    max_parallelism: int
    tables: Mapping[str, TableRows]
    files: tuple[TableFile, ...]
    manifest: tuple[str, bytes]


def encode_files(index: FilesIndex) -> bytes:
    """Encode a `.files` object."""
    name, data = index.manifest
    plain = {
        "engine": "rocksdb",
        "key_groups": [index.key_groups.start, index.key_groups.end],
        "max_parallelism": index.max_parallelism,
        "tables": {
            table: {"schema": of.schema.to_json(), "rows": of.rows, "interval": of.interval}
            for table, of in sorted(index.tables.items())
        },
        "files": [[each.name, each.bytes, each.checksum] for each in index.files],
        "manifest": [name, base64.b64encode(data).decode()],
    }
    return seal(json.dumps(plain, separators=(",", ":")).encode(), MAGIC)


def decode_files(data: Bytes, name: str = "a .files object") -> FilesIndex:
    """Decode a `.files` object.

    Raises:
        CorruptObject: cut, altered, or something else; the message contains `name`.
        NewerFormat: a newer Siltstone wrote it.
    """
    with translate_decode_errors(name, "a .files object"):
        payload = unseal(data, MAGIC, name)
        plain = check_object(parse_json(bytes(payload)), "what it says")
        if plain["engine"] != "rocksdb":
            raise ValueError(f"its files are of {str(plain['engine'])[:40]!r}")
        most = check_integer(plain["max_parallelism"], 1, MAX_MAX_PARALLELISM, "max_parallelism")
        start, end = plain["key_groups"]
        groups = KeyGroupRange(
            check_integer(start, 0, most, "first key group"), check_integer(end, 0, most, "last key group")
        )
        if not groups:
            raise ValueError("it has no key groups")
        if _FILE_BYTES * len(plain["files"]) > decoded_bytes_max(len(payload)):
            raise ValueError(f"it claims {len(plain['files'])} files")
        files = tuple(_file(*each) for each in plain["files"])
        if len({each.name for each in files}) < len(files):
            raise ValueError("two of its files have the same name")
        tables = {
            check_table_name(table): _table(check_object(of, table))
            for table, of in check_object(plain["tables"], "tables").items()
        }
        manifest, text = plain["manifest"]
        _check_number(manifest, "MANIFEST-", "")
        return FilesIndex(groups, most, tables, files, (manifest, base64.b64decode(text, validate=True)))


def _file(name: object, size: object, checksum: object) -> TableFile:
    _check_number(name, "", ".sst")
    if not isinstance(checksum, str) or len(checksum) > _CHECKSUM_CHARACTERS:
        raise ValueError(f"the checksum of {str(name)[:40]} is not a text")
    return TableFile(str(name), check_integer(size, 0, _NUMBER_MAX, "size of a file"), checksum)


def _table(plain: Mapping[str, object]) -> TableRows:
    schema = TableSchema.from_json(check_object(plain["schema"], "a schema"))
    rows = check_integer(plain["rows"], 0, _NUMBER_MAX, "rows of a table")
    return TableRows(schema, rows, check_integer(plain["interval"], 1, _INTERVAL_MAX, "interval of a table"))


def _check_number(name: object, before: str, after: str) -> None:
    """Check that it is a number, of 6 digits or more, between two texts: so RocksDB names its files."""
    number = name.removeprefix(before).removesuffix(after) if isinstance(name, str) else ""
    digits = number.isascii() and number.isdigit() and 6 <= len(number) <= 20
    if not digits or name != before + number + after:
        raise ValueError(f"{str(name)[:40]!r} is not a name of RocksDB's files")
