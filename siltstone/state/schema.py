"""The schema of a state table, and which changes of it recorded state can follow."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from siltstone.errors import SchemaConflict, UsageError

DELETED = "__deleted"
"""name of the boolean column that marks a delete in a table of changes"""
RESERVED_PREFIX = "__"
_DECIMAL = re.compile(r"decimal128\(([0-9]{1,2}), (-?[0-9]{1,4})\)")
_TIMESTAMP = re.compile(r"timestamp\[us(?:, tz=([A-Za-z0-9_+:/-]{1,64}))?\]")
_WIDE_SUM = "decimal128(38, 0)"
_NULLABLE = "nullable"
_SUPPORTED = "an integer, float, decimal128, bool, string, binary, date32 or timestamp[us]"


def _supported(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_date32(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us")
    )


def _advice(kind: pa.DataType) -> str:
    """Say which supported type holds the values of one that is not supported."""
    types = pa.types
    if types.is_decimal(kind):
        if kind.precision <= 38:
            return f"use decimal128({kind.precision}, {kind.scale})"
        return "use decimal128, which has up to 38 digits as Spark's decimals do, or a string"
    if types.is_dictionary(kind):
        return f"use its values' type: {kind.value_type if _supported(kind.value_type) else _SUPPORTED}"
    for matches, advice in (
        (types.is_struct, "use one column per field"),
        (types.is_map, "use a MapState, with one row per entry"),
        (types.is_list, "use a ListState, with one row per element"),
        (types.is_large_list, "use a ListState, with one row per element"),
        (types.is_fixed_size_list, "use one column per element, or a ListState"),
        (types.is_large_string, "use string"),
        (types.is_string_view, "use string"),
        (types.is_large_binary, "use binary"),
        (types.is_binary_view, "use binary"),
        (types.is_fixed_size_binary, "use binary"),
        (types.is_float16, "use float32"),
        (types.is_date64, "use date32, or timestamp[us] if it has a time of day"),
        (types.is_timestamp, "use timestamp[us]"),
        (types.is_time, "use int64, such as microseconds since midnight"),
        (types.is_duration, "use int64, such as microseconds"),
    ):
        if matches(kind):
            return advice
    return f"use {_SUPPORTED}"


@dataclass(frozen=True)
class TableSchema:
    """One state table: operator key columns, further primary-key columns, value columns.

    `key` is the operator's key, which alone determines the key group. `subkey` is the rest of the primary key (a map's
    key, a list's position) and may be empty. A column of either holds nulls only if its field is nullable; null is then
    one more value, as in Spark's `groupBy`, and comes last. Value columns may be null.
    Types: signed and unsigned integers, float32/64, decimal128, bool, string, binary, date32, timestamp("us", zone).

    Raises:
        UsageError: a type is not supported, a name is used twice or starts with two underscores, or there is no key.
    """

    key: pa.Schema
    subkey: pa.Schema
    value: pa.Schema

    def __post_init__(self) -> None:
        names = [*self.key.names, *self.subkey.names, *self.value.names]
        if not self.key.names:
            raise UsageError("a state table needs at least one key column")
        if len(set(names)) != len(names):
            raise UsageError(f"column names must be distinct: {', '.join(names)}")
        for field in [*self.key, *self.subkey, *self.value]:
            if field.name.startswith(RESERVED_PREFIX) or not field.name:
                raise UsageError(f"column name {field.name!r} is reserved")
            if not _supported(field.type):
                raise UsageError(f"column {field.name} has type {field.type}: {_advice(field.type)}")

    @property
    def primary_key(self) -> pa.Schema:
        """Key then subkey columns."""
        return pa.schema([*self.key, *self.subkey])

    @property
    def rows(self) -> pa.Schema:
        """Primary key, then value columns: the shape of a full table, a base, or a restore."""
        return pa.schema([*self.primary_key, *self.value])

    @property
    def changes(self) -> pa.Schema:
        """`rows` plus the boolean column `__deleted`: the shape of a delta (a delete has null values)."""
        return self.rows.append(pa.field(DELETED, pa.bool_(), nullable=False))

    def to_json(self) -> dict[str, Any]:
        """Return a plain description: {"key": [[name, type], ...], "subkey": ..., "value": ...}; of a nullable column
        of the key or subkey it is [name, type, "nullable"]."""
        value = [[f.name, str(f.type)] for f in self.value]
        return {"key": describe_key(self.key), "subkey": describe_key(self.subkey), "value": value}

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Self:
        """Make a schema from the result of `to_json`."""
        value = pa.schema([(name, type_of(kind)) for name, kind in text["value"]])
        return cls(_parse_key(text["key"]), _parse_key(text["subkey"]), value)

    def check_follows(self, recorded: "TableSchema", what: str) -> None:
        """Check that recorded state can follow this definition: value columns may be added (read as null), and columns
        of the key may become nullable.

        Raises:
            SchemaConflict: it cannot; the message shows both schemas and names the table (`what`).
        """
        old, new = recorded.to_json(), self.to_json()
        kept = {n: t for n, t in new["value"]}
        same = all(key_follows(new[part], old[part]) for part in ("key", "subkey"))
        if not same or any(kept.get(n) != t for n, t in old["value"]):
            averages = [n for n, t in old["value"] if n.endswith("_sum") and (t, kept.get(n)) == ("int64", _WIDE_SUM)]
            why = (
                f"averages of integers keep an exact sum since 0.2 ({', '.join(averages)}), and an older state's sum "
                "may have wrapped: start a stream with another name from the source"
                if averages
                else "only new value columns may be added, and key columns become nullable"
            )
            raise SchemaConflict(f"{what} changed shape: recorded {old}, now {new}; {why}")


def describe_key(key: pa.Schema) -> list[list[str]]:
    """Return the columns of a key as `TableSchema.to_json` does."""
    return [[f.name, str(f.type), *([_NULLABLE] if f.nullable else [])] for f in key]


def key_follows(now: Sequence[Sequence[str]], recorded: Sequence[Sequence[str]]) -> bool:
    """Whether described keys have the same columns, of which those that may hold nulls still may."""
    return len(now) == len(recorded) and all(
        list(new) in (list(old), [*old, _NULLABLE]) for new, old in zip(now, recorded, strict=True)
    )


def _parse_key(columns: Sequence[Sequence[str]]) -> pa.Schema:
    fields = []
    for name, kind, *nullable in columns:
        if nullable not in ([], [_NULLABLE]):
            raise UsageError(f"column {name!r} is {nullable}: a column of a key is {_NULLABLE} or nothing")
        fields.append(pa.field(name, type_of(kind), bool(nullable)))
    return pa.schema(fields)


def type_of(text: str) -> pa.DataType:
    """Parse the text of an Arrow type, as `str(type)` returns it, without evaluating anything.

    Raises:
        UsageError: it is not the name of a supported type.
    """
    names = {"float": pa.float32(), "double": pa.float64(), "date32[day]": pa.date32()}
    kind: pa.DataType | None = None
    if found := _DECIMAL.fullmatch(text):
        precision, scale = int(found[1]), int(found[2])
        kind = pa.decimal128(precision, scale) if 1 <= precision <= 38 else None
    elif found := _TIMESTAMP.fullmatch(text):
        kind = pa.timestamp("us", tz=found[1])
    else:
        with suppress(ValueError):
            kind = names.get(text) or pa.type_for_alias(text)
    if kind is None or not _supported(kind):
        raise UsageError(f"{text[:80]!r} is not a column type that Siltstone supports: use {_SUPPORTED}")
    return kind
