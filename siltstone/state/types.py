"""The types of state tables' columns, and their texts in stored schemas.

A flat type's text is Arrow's own. A nested type, of value columns alone, is

    struct<"NAME": TYPE, ...>    names as JSON strings, since a name may hold any character
    list<TYPE>

Fields of a struct and elements of a list may always be null, whatever their Arrow fields say.
"""

import json
import re
from contextlib import suppress

import pyarrow as pa

from siltstone.errors import UsageError

DEPTH_MAX = 16
"""levels of nesting of one column"""
LEAVES_MAX = 256
"""fields of one nested column that are not nested themselves; a null struct has a slot for each of them in Arrow"""
_DECIMAL = re.compile(r"decimal128\(([0-9]{1,2}), (-?[0-9]{1,4})\)")
_TIMESTAMP = re.compile(r"timestamp\[us(?:, tz=([A-Za-z0-9_+:/-]{1,64}))?\]")
_FLAT = re.compile(r"[a-z0-9]+(?:\([^()]*\)|\[[^\[\]]*\])?")
_SUPPORTED = "an integer, float, decimal128, bool, string, binary, date32 or timestamp[us]"


def is_nested(kind: pa.DataType) -> bool:
    """Whether the type is a struct or a list."""
    return pa.types.is_struct(kind) or pa.types.is_list(kind)


def is_flat(kind: pa.DataType) -> bool:
    """Whether a column of any part of a table may have the type."""
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


def checked_type(kind: pa.DataType, column: str, *, nested: bool) -> pa.DataType:
    """Return the type as state tables have it: of a nested one, every field may be null.

    Args:
        column: its name, for errors.
        nested: whether the column may have a nested type.

    Raises:
        UsageError: the type is not supported; the message says which one to use instead.
    """
    if is_flat(kind):
        return kind
    if not is_nested(kind) or not nested:
        flat = kind.num_fields and not pa.types.is_map(kind) and not nested
        advice = "a key is flat: use one column per field or element" if flat else _advice(kind)
        raise UsageError(f"column {column} has type {kind}: {advice}")
    made = _inner(kind, f"column {column} of type {kind}", 1)
    if (leaves := count_leaves(made)) > LEAVES_MAX:
        raise UsageError(f"column {column} has {leaves} fields within it: use several columns of up to {LEAVES_MAX}")
    return made


def check_fields(given: pa.DataType, wanted: pa.DataType) -> None:
    """Refuse structs with other fields than the wanted ones: a cast drops a field, and makes nulls of a missing one.

    Raises:
        pa.ArrowInvalid: a field of a struct, at any depth, is missing or not wanted.
    """
    if pa.types.is_struct(wanted) and pa.types.is_struct(given):
        names = [field.name for field in given]
        for name in sorted({*names} ^ {field.name for field in wanted}):
            raise pa.ArrowInvalid(f"field {name} is {'not declared' if name in names else 'missing'}")
        for field in wanted:
            check_fields(given.field(field.name).type, field.type)
    elif pa.types.is_list(wanted) and hasattr(given, "value_type"):
        check_fields(given.value_type, wanted.value_type)


def count_leaves(kind: pa.DataType) -> int:
    """Count the fields within a type that are not nested themselves: the columns that a Parquet file has for it."""
    if not pa.types.is_nested(kind):
        return 1
    return sum(count_leaves(kind.field(i).type) for i in range(kind.num_fields))


def is_wider(kind: pa.DataType, than: pa.DataType) -> bool:
    """Whether a type of value columns is wider than another: it holds each of its values, with the same digest.

    Integers of more bits, float64 for float32, and a decimal of more digits and the same scale.
    """
    if pa.types.is_integer(kind) and pa.types.is_integer(than):
        same_sign = pa.types.is_signed_integer(kind) == pa.types.is_signed_integer(than)
        return kind.bit_width > than.bit_width and (same_sign or pa.types.is_signed_integer(kind))
    if pa.types.is_decimal128(kind) and pa.types.is_decimal128(than):
        return kind.precision > than.precision and kind.scale == than.scale
    return pa.types.is_float64(kind) and pa.types.is_float32(than)


def type_text(kind: pa.DataType) -> str:
    """Return the text of a type, for `type_of` or `value_type_of`."""
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{json.dumps(field.name)}: {type_text(field.type)}' for field in kind)}>"
    return f"list<{type_text(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def type_of(text: str) -> pa.DataType:
    """Parse the text of a flat type, without evaluating anything.

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
    if kind is None or not is_flat(kind):
        raise UsageError(f"{text[:80]!r} is not a column type that Siltstone supports: use {_SUPPORTED}")
    return kind


def is_nested_text(text: str) -> bool:
    """Whether a text is to be of a nested type."""
    return text.startswith(("struct<", "list<"))


def value_type_of(text: str) -> pa.DataType:
    """Parse the text of a flat or nested type.

    Raises:
        UsageError: it is not one of a supported type.
    """
    if not is_nested_text(text):
        return type_of(text)
    with suppress(ValueError):
        kind, end = _parse(text, 0, 1)
        if end == len(text):
            return checked_type(kind, "value", nested=True)
    raise UsageError(f"{text[:80]!r} is not a nested type that Siltstone supports")


def _inner(kind: pa.DataType, what: str, level: int) -> pa.DataType:
    if is_nested(kind) and level > DEPTH_MAX:
        raise UsageError(f"{what[:200]} is nested more than {DEPTH_MAX} deep: use a MapState or several columns")
    if pa.types.is_list(kind):
        return pa.list_(_inner(kind.value_type, what, level + 1))
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if not names or not all(names) or len(set(names)) < len(names):
            raise UsageError(f"{what}: a struct needs fields with distinct names")
        return pa.struct([(field.name, _inner(field.type, what, level + 1)) for field in kind])
    if not is_flat(kind):
        raise UsageError(f"{what} has {kind} within it: {_advice(kind)}")
    return kind


def _parse(text: str, at: int, level: int) -> tuple[pa.DataType, int]:
    """Parse the type that begins at a position; return it and where it ends, or raise ValueError or UsageError."""
    if level > DEPTH_MAX + 1:
        raise ValueError("it is nested too deep")
    if text.startswith("list<", at):
        inner, at = _parse(text, at + len("list<"), level + 1)
        return pa.list_(inner), _skip(text, ">", at)
    if text.startswith("struct<", at):
        fields, at = [], at + len("struct<")
        while True:
            name, at = json.JSONDecoder().raw_decode(text, at)
            if not isinstance(name, str):
                raise ValueError("a name is not a string")
            kind, at = _parse(text, _skip(text, ": ", at), level + 1)
            fields.append((name, kind))
            if not text.startswith(", ", at):
                return pa.struct(fields), _skip(text, ">", at)
            at += len(", ")
    found = _FLAT.match(text, at)
    if found is None:
        raise ValueError("there is no type")
    return type_of(found[0]), found.end()


def _skip(text: str, expected: str, at: int) -> int:
    if not text.startswith(expected, at):
        raise ValueError(f"{expected} is missing")
    return at + len(expected)


def _advice(kind: pa.DataType) -> str:
    """Return which supported type can hold the values of an unsupported one."""
    types = pa.types
    if types.is_decimal(kind):
        if kind.precision <= 38:
            return f"use decimal128({kind.precision}, {kind.scale})"
        return "use decimal128, which has up to 38 digits as Spark's decimals do, or a string"
    if types.is_dictionary(kind):
        return f"use its values' type: {kind.value_type if is_flat(kind.value_type) else _SUPPORTED}"
    for matches, advice in (
        (types.is_map, "use a MapState, with one row per entry, or a list of structs"),
        (types.is_large_list, "use list"),
        (types.is_fixed_size_list, "use list"),
        (types.is_list_view, "use list"),
        (types.is_large_list_view, "use list"),
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
