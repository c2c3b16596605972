"""Columns of a database's table for the output of an operator: their types, values, and whether a table has them.

docs/sinks.md shows the types. SQLite keeps decimals as text, because its numbers are not exact, and timestamps
as text in UTC.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow.csv import WriteOptions, write_csv
from sqlalchemy import (
    REAL,
    VARCHAR,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Enum,
    Float,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    String,
    Text,
    Time,
)
from sqlalchemy.types import TypeEngine

from siltstone.errors import StateError, UsageError
from siltstone.format.table_file import suggest_type

_TYPES: Mapping[pa.DataType, type[TypeEngine[Any]]] = {
    **dict.fromkeys((pa.int8(), pa.uint8(), pa.int16()), SmallInteger),
    **dict.fromkeys((pa.uint16(), pa.int32()), Integer),
    **dict.fromkeys((pa.uint32(), pa.int64()), BigInteger),
    **dict.fromkeys((pa.float16(), pa.float32()), REAL),
    pa.float64(): Double,
    pa.bool_(): Boolean,
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), Text),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), LargeBinary),
    **dict.fromkeys((pa.date32(), pa.date64()), Date),
    **dict.fromkeys((pa.time32("s"), pa.time32("ms"), pa.time64("us")), Time),
}
_UINT64_DIGITS, _NAME_BYTES = 20, 63


def make_columns(schema: pa.Schema, key: Collection[str], what: str, *, sqlite: bool) -> list[Column[Any]]:
    """Make the columns of a table for rows of this schema; those of the key are its primary key.

    Args:
        what: the output, as errors call it.
        sqlite: whether the table is in SQLite; else it is in PostgreSQL.

    Raises:
        UsageError: a column has a type or a name that no table has; or one of the key is missing.
    """
    if missing := [name for name in key if name not in schema.names]:
        raise UsageError(f"{what} has no column {missing[0]}, which the key of its sink names: it has {schema.names}")
    seen: dict[str, str] = {}
    for name in schema.names:
        check_length(name, f"{what}: column", sqlite=sqlite)
        if name.lower() in seen:
            raise UsageError(f"{what}: columns {seen[name.lower()]} and {name} differ in case alone: rename one")
        seen[name.lower()] = name
    return [
        Column(f.name, kind, primary_key=f.name in key, autoincrement=False)
        for f in schema
        for kind in [_sql_type(f.type, f"{what}: column {f.name}", sqlite=sqlite)]
    ]


def check_length(name: str, what: str, *, sqlite: bool) -> None:
    """Check that a name is not longer than a database's may be.

    Raises:
        UsageError: PostgreSQL would cut it.
    """
    if not sqlite and len(name.encode()) > _NAME_BYTES:
        raise UsageError(f"{what} {name} is longer than {_NAME_BYTES} bytes, where PostgreSQL cuts names: use another")


def to_rows(batch: pa.RecordBatch, what: str, *, sqlite: bool) -> list[dict[str, Any]]:
    """Return rows as SQLAlchemy takes them: column -> value. Timestamps with a zone are in UTC.

    Args:
        what: the table, as errors call it.

    Raises:
        StateError: a date or time is outside the years 1 to 9999, the only ones that Python has.
    """
    rows = batch.cast(pa.schema([f.with_type(_value_type(f.type, sqlite=sqlite)) for f in batch.schema]))
    columns = list[list[Any]]()
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError) as error:
            raise StateError(
                f"{what}: column {name} has a date or time outside the years 1 to 9999 ({error})",
                advice="refuse such rows in the operator, or give it another sink",
            ) from None
    return [dict(zip(rows.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def to_csv(batch: pa.RecordBatch) -> memoryview:
    """Return rows as PostgreSQL's COPY takes them: null is nothing, and text is in quotes."""
    columns = [_to_text_of_copy(column) for column in batch.columns]
    sink = pa.BufferOutputStream()
    write_csv(pa.record_batch(columns, batch.schema.names), sink, WriteOptions(include_header=False))
    return memoryview(sink.getvalue())


def check_columns(
    wanted: Sequence[Column[Any]], there: Sequence[Mapping[str, Any]], what: str, *, sqlite: bool
) -> None:
    """Check that a table has these columns, and needs no others.

    Args:
        wanted: as `make_columns` returns them.
        there: the table's columns, as SQLAlchemy's inspection returns them.
        what: the table, as errors call it.

    Raises:
        UsageError: it does not; the message names the column and says what to do.
    """
    found = {column["name"]: column for column in there}
    for column in wanted:
        if column.name not in found:
            others = ", ".join(sorted(found))
            raise UsageError(
                f"{what} has no column {column.name}, which the output has (the table has {others}): add it, as "
                f"{_show(column.type)}, or name another table"
            )
        if not _takes(found[column.name]["type"], column.type, sqlite=sqlite):
            raise UsageError(
                f"{what}: column {column.name} is {_show(found[column.name]['type'])}, and the output's is "
                f"{_show(column.type)}: change the type of one of the two, or name another table"
            )
        if found[column.name].get("computed") is not None:
            raise UsageError(
                f"{what}: column {column.name} is generated by the database, and the output has it, too: remove it "
                "from one of the two, or name another table"
            )
    names = {column.name for column in wanted}
    for name, column in found.items():
        if name not in names and _is_required(column):
            raise UsageError(
                f"{what}: column {name} must not be null and has no default, and the output does not have it: give it "
                "a default, or let it be null"
            )


def _sql_type(kind: pa.DataType, what: str, *, sqlite: bool) -> TypeEngine[Any]:
    if kind in _TYPES:
        return _TYPES[kind]()
    if pa.types.is_uint64(kind):
        return Text() if sqlite else Numeric(_UINT64_DIGITS, 0)
    if pa.types.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
        return Text() if sqlite else Numeric(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return DateTime(timezone=kind.tz is not None)
    if pa.types.is_fixed_size_binary(kind):
        return LargeBinary()
    if pa.types.is_nested(kind):
        raise UsageError(
            f"{what} is {kind}, and a column of a database takes no nested values: let the operator return its parts "
            "as columns of their own, or as one text, such as JSON"
        )
    raise UsageError(f"{what} is {kind}, which a database does not have: declare {suggest_type(kind)}")


def _value_type(kind: pa.DataType, *, sqlite: bool) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if sqlite and (pa.types.is_uint64(kind) or pa.types.is_decimal(kind)):
        return pa.string()
    return kind


def _to_text_of_copy(column: pa.Array) -> pa.Array:
    """Convert a column of which PostgreSQL does not read what Arrow would write; timestamps with a zone are in UTC."""
    kind = column.type
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    if _TYPES.get(kind) is LargeBinary or pa.types.is_fixed_size_binary(kind):
        return pa.array([None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()], pa.string())
    return column.cast(_value_type(kind, sqlite=False))


def _takes(there: TypeEngine[Any], wanted: TypeEngine[Any], *, sqlite: bool) -> bool:
    """Whether a column of one type takes every value of another and changes none. SQLite's integers and floats all have
    64 bits, its timestamps no zone, and its other types no limits."""
    if isinstance(wanted, Integer):
        return isinstance(there, Integer) and (sqlite or _bytes_of(there) >= _bytes_of(wanted))
    if isinstance(wanted, Float):
        return isinstance(there, Float) and (sqlite or isinstance(there, Double) or not isinstance(wanted, Double))
    if isinstance(wanted, Numeric):
        return isinstance(there, Numeric) and not isinstance(there, Float) and _has_digits(there, wanted)
    if isinstance(wanted, DateTime):
        return isinstance(there, DateTime) and (sqlite or (there.timezone == wanted.timezone and _has_fraction(there)))
    if isinstance(wanted, Time):
        return isinstance(there, Time) and (sqlite or (not there.timezone and _has_fraction(there)))
    if isinstance(wanted, Text):  # of PostgreSQL's others, CHAR(n) adds blanks, and "char" and NAME cut what is longer
        return isinstance(there, String if sqlite else Text | VARCHAR) and not isinstance(there, Enum)
    return any(isinstance(there, kind) and isinstance(wanted, kind) for kind in (Boolean, LargeBinary, Date))


def _bytes_of(kind: Integer) -> int:
    return 2 if isinstance(kind, SmallInteger) else 8 if isinstance(kind, BigInteger) else 4


def _has_digits(there: Numeric[Any], wanted: Numeric[Any]) -> bool:
    if there.precision is None:
        return True  # as many as it needs
    before, after = there.precision - (there.scale or 0), there.scale or 0
    return before >= (wanted.precision or 0) - (wanted.scale or 0) and after >= (wanted.scale or 0)


def _has_fraction(there: DateTime | Time) -> bool:
    """Whether a time of PostgreSQL has microseconds: one with fewer digits is rounded."""
    return getattr(there, "precision", None) in (None, 6)


def _is_required(column: Mapping[str, Any]) -> bool:
    given = (column.get(name) for name in ("default", "identity", "computed"))
    return not column["nullable"] and all(each is None for each in given) and column.get("autoincrement") is not True


def _show(kind: TypeEngine[Any]) -> str:
    if not isinstance(kind, DateTime | Time):
        return str(kind)
    digits = getattr(kind, "precision", None)
    return f"{kind}{'' if digits is None else f'({digits})'}{' WITH TIME ZONE' if kind.timezone else ''}"
