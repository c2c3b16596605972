"""Rows staged for a sink that is a table: Parquet files, which the table's log later refers to as they are.

columns      those of Spark's SQL, which every engine that reads Delta tables knows; others are refused by name
files        zstd, row groups of `ROW_GROUP_BYTES`, no encodings that old readers lack
statistics   as Delta's log has them: rows, nulls, and the extremes of integers, dates and short strings, by which
             readers skip files
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from enum import IntEnum
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.errors import UsageError
from siltstone.format.output import OBJECT_BYTES, OutputWriter, Staged, encode_inline
from siltstone.model import SinkFile
from siltstone.state.types import count_leaves, is_wider

ROW_GROUP_BYTES = 32 << 20
"""uncompressed bytes of a row group, about"""
ROW_GROUP_ROWS = 1 << 20
_SAME = (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
_SAME = (*_SAME, pa.string(), pa.binary(), pa.date32())
_WIDER = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
_INSTEAD = {
    pa.uint8(): "int16",
    pa.uint16(): "int32",
    pa.uint32(): "int64",
    pa.uint64(): "decimal128(20, 0), or int64",
    pa.float16(): "float32",
    pa.date64(): "date32",
    pa.null(): "the type of its values",
}
_NOT_IN_NAMES = frozenset(" ,;{}()\n\t=")
"""characters that a column of a Delta table cannot have in its name"""
_SHORT = 32
"""most bytes of a string in the statistics"""


def table_schema(schema: pa.Schema, what: str) -> pa.Schema:
    """Return the schema of a table's files for rows of `schema`: all columns nullable, timestamps in UTC.

    Timestamps without a zone are in UTC, as everywhere in Siltstone.

    Args:
        what: names the rows in errors, such as "the output of totals".

    Raises:
        UsageError: a Delta table has no column of that type or name; the message says what to declare.
    """
    seen: dict[str, str] = {}
    fields = []
    for column in schema:
        if not column.name or _NOT_IN_NAMES & set(column.name):
            raise UsageError(
                f"{what}: a column of a Delta table cannot be named {column.name!r}: rename it, without spaces and "
                "without , ; { } ( ) ="
            )
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise UsageError(f"{what}: columns {other} and {column.name} differ only in case: rename one")
        fields.append(pa.field(column.name, _table_type(column.type, f"{what}: column {column.name}")))
    return pa.schema(fields)


def _table_type(kind: pa.DataType, what: str) -> pa.DataType:
    if kind in _SAME:
        return kind
    if kind in _WIDER:
        return _WIDER[kind]
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return pa.timestamp("us", "UTC")
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return kind
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_table_type(kind.value_type, what))
    if pa.types.is_struct(kind):
        return pa.struct(list(table_schema(pa.schema(list(kind)), what)))
    if pa.types.is_map(kind):
        return pa.map_(_table_type(kind.key_type, what), _table_type(kind.item_type, what))
    raise UsageError(
        f"{what} is {kind}, which a Delta table does not have: declare {suggest_type(kind)}, or give the operator "
        "another sink (a function, or a ParquetSink on one machine)"
    )


class Change(IntEnum):
    """What a column of a table needs to take values of another type."""

    NOTHING = 0
    """it has this type"""
    MORE_FIELDS = 1
    """a struct gets more fields, which are null in the rows there are"""
    WIDER = 2
    """a wider type (`state.types.is_wider`), in which all rows have to be written again"""
    REFUSED = 3
    """it cannot take them"""


def change_of(there: pa.DataType, wanted: pa.DataType) -> Change:
    """Return how a column's type must change to take values of another one; both as `table_schema` returns them."""
    if there == wanted:
        return Change.NOTHING
    if pa.types.is_struct(there) and pa.types.is_struct(wanted):
        before, after = ({field.name: field.type for field in kind} for kind in (there, wanted))
        if not before.keys() <= after.keys():
            return Change.REFUSED
        more = Change.MORE_FIELDS if len(after) > len(before) else Change.NOTHING
        return max([more, *(change_of(kind, after[name]) for name, kind in before.items())])
    if pa.types.is_list(there) and pa.types.is_list(wanted):
        return change_of(there.value_type, wanted.value_type)
    if pa.types.is_map(there) and pa.types.is_map(wanted):
        return max(change_of(there.key_type, wanted.key_type), change_of(there.item_type, wanted.item_type))
    return Change.WIDER if is_wider(wanted, there) else Change.REFUSED


def suggest_type(kind: pa.DataType) -> str:
    """Return what to declare in place of a type that tables lack."""
    if pa.types.is_timestamp(kind):
        return 'timestamp("us", tz="UTC")'
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return "int64, in microseconds"
    if pa.types.is_dictionary(kind):
        return str(kind.value_type)
    if pa.types.is_decimal(kind):
        return "decimal128 with a scale from 0 to its precision, at most 38 digits"
    if pa.types.is_fixed_size_binary(kind):
        return "binary"
    return _INSTEAD.get(kind, "a type that Spark has")


@dataclass
class TableWriter(OutputWriter):
    """Stages batches of one schema as Parquet files, in order, otherwise as `OutputWriter`.

    In memory are the file being made, compressed, and the rows of one row group.
    """

    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    _waiting_bytes: int = 0
    _file: tuple[pa.BufferOutputStream, pq.ParquetWriter] | None = None

    def __post_init__(self) -> None:
        self.schema = table_schema(self.schema, "staged rows")

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch.

        Raises:
            Unreachable: the store cannot be written.
        """
        if not batch.num_rows:
            return
        self._waiting.append(batch.cast(self.schema))
        self._waiting_bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def finish(self) -> Staged:
        """Stage the rest, or return all rows inline if `inline_bytes` are enough.

        Raises:
            Unreachable: the store cannot be written.
        """
        if self._file is None and not self._objects and self._waiting:
            inline = encode_inline(self._waiting, self.inline_bytes)
            if inline is not None:
                return Staged(self._rows, inline=inline)
        self._write_row_group()
        self._close_file()
        return Staged(self._rows, tuple(self._objects))

    def _write_row_group(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            out = pa.BufferOutputStream()
            self._file = out, pq.ParquetWriter(out, self.schema, compression="zstd", version="2.6")
        out, writer = self._file
        writer.write_table(pa.Table.from_batches(self._waiting), row_group_size=ROW_GROUP_ROWS)
        self._waiting, self._waiting_bytes = [], 0
        if out.tell() >= OBJECT_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is None:
            return
        (out, writer), self._file = self._file, None
        writer.close()
        data = out.getvalue()
        stored = self.store.put(self.name(len(self._objects)), data)
        statistics = file_statistics(pq.read_metadata(pa.BufferReader(data)), self.schema)
        self._objects.append(SinkFile(stored.name, stored.bytes, stored.checksum, statistics=statistics))


def file_statistics(metadata: Any, schema: pa.Schema) -> str:
    """Return a file's statistics for Delta's log, as JSON, from the footer just written.

    Readers skip files by minimum and maximum, and would lose rows by wrong ones. So types whose text may be rounded or
    cut have neither.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    leaf = 0  # not by path: `a.b` is that of a column, and of field b of a struct a
    for column in schema:
        if not pa.types.is_nested(column.type):
            found = [group.column(leaf).statistics for group in groups]
            if all(each is not None and each.has_null_count for each in found):
                nulls[column.name] = sum(each.null_count for each in found)
            known = list(_extremes(found, column.type))
            if known:
                lows[column.name], highs[column.name] = min(low for low, _ in known), max(high for _, high in known)
        leaf += count_leaves(column.type)
    plain = {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return json.dumps(plain, default=date.isoformat)


def _extremes(found: Sequence[Any], kind: pa.DataType) -> Iterator[tuple[Any, Any]]:
    """Yield (lowest, highest) of each row group that has values; nothing at all if one of them is not known."""
    if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_string(kind)):
        return
    pairs = []
    for each in found:
        if each is None or not each.has_min_max:
            if each is not None and each.has_null_count and not each.num_values:
                continue  # nulls only
            return
        try:
            pairs.append((each.min, each.max))
        except (ValueError, OverflowError):  # a day or a text that Python does not have
            return
    if pa.types.is_string(kind) and any(len(text.encode()) > _SHORT for pair in pairs for text in pair):
        return
    yield from pairs
