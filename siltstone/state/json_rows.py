"""Rows as JSON objects, whatever their types and values: for dead letters, errors and Kafka."""

import base64
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_SPECIAL = r'["\\\x00-\x1f]'
"""characters that JSON escapes"""
SHOWN_CHARACTERS = 100
"""of a value in an error"""


def json_rows(table: pa.Table) -> list[str]:
    """Convert each row to a JSON object.

    In text that is not UTF-8, invalid bytes become `\\xNN`. Binary values become base64, maps lists of pairs, and
    numbers that are not finite their names. Decimals, dates and times become text; a date or time outside the years 1
    to 9999 becomes its number of units since 1970.
    """
    if not table.num_columns:
        return ["{}"] * table.num_rows
    parts: list[Any] = []
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        parts += [f"{', ' if number else '{'}{json.dumps(name, ensure_ascii=False)}: ", json_texts(column)]
    return pc.binary_join_element_wise(*map(_as_text, parts), _as_text("}"), _as_text("")).to_pylist()


def json_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert each value to JSON (large_string[n], no nulls), as `json_rows` does."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return pc.fill_null(column.cast(pa.large_string()), "null")
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return _texts(map(_float_text, column.to_pylist()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        with suppress(pa.ArrowInvalid):  # its text is not UTF-8
            column.validate(full=True)
            return _quote(column)
    repeats = pa.types.is_temporal(kind) or pa.types.is_decimal128(kind) or pa.types.is_decimal256(kind)
    if repeats:  # often; Arrow cannot tell which of the smaller decimals are equal
        different = column.unique()
        texts = _texts(_dump(_to_plain(value)) for value in different)
        return texts.take(pc.index_in(column, value_set=different))
    return _texts(_dump(_to_plain(value)) for chunk in column.chunks for value in chunk)


def _quote(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert text that is UTF-8."""
    texts = column.cast(pa.large_string())
    quoted = pc.binary_join_element_wise(*map(_as_text, ('"', texts, '"', "")))
    special = pc.fill_null(pc.match_substring_regex(texts, _SPECIAL), False)
    if pc.any(special).as_py():
        escaped = _texts(map(_dump, texts.filter(special).to_pylist()))
        quoted = pc.replace_with_mask(quoted.combine_chunks(), special.combine_chunks(), escaped.combine_chunks())
    return pc.fill_null(quoted, "null")


def _float_text(value: float | None) -> str:
    return _dump(_finite(value)) if value is None or not math.isfinite(value) else float.__repr__(value)


def _finite(value: float | None) -> float | str | None:
    """Return a number as it is, or the name of one that is not finite."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _texts(values: Iterable[str]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, pa.large_string())])


def _as_text(part: Any) -> Any:
    return pa.scalar(part, pa.large_string()) if isinstance(part, str) else part


def describe_broken(column: pa.Array | pa.ChunkedArray, which: np.ndarray) -> str:
    """Describe values that are not of their own type (bool[n], not all false), for an error that names the column:
    `has text that is not UTF-8: "K\\xf6ln", and 2 more`."""
    chosen = np.flatnonzero(which)
    shown = json.dumps(_to_plain(column[int(chosen[0])]), ensure_ascii=False)[:SHOWN_CHARACTERS]
    return f"{broken_reason(column.type)}: {shown}{f', and {len(chosen) - 1} more' if len(chosen) > 1 else ''}"


def broken_reason(kind: pa.DataType) -> str:
    """Say what is wrong with a column some of whose values are not of its type."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "has text that is not UTF-8"
    if pa.types.is_decimal(kind):
        return f"has numbers with too many digits for {kind}"
    return "has values with text that is not UTF-8, or numbers with too many digits"


def _to_plain(scalar: Any) -> Any:
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        scalar = scalar.value
    if scalar is None or not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.MapScalar):
        return [[_to_plain(entry[0]), _to_plain(entry[1])] for entry in scalar.values]
    if isinstance(scalar, pa.ListScalar):  # and those that derive from it
        return [_to_plain(value) for value in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {kind.field(i).name: _to_plain(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return scalar.as_buffer().to_pybytes().decode(errors="backslashreplace")
    try:
        value = scalar.as_py()
    except (ArithmeticError, ValueError, LookupError):
        # Python's years end at 9999, and its database of time zones is not Spark's.
        return f"{scalar.value} {kind.unit if hasattr(kind, 'unit') else 'days'} since 1970-01-01"
    if isinstance(value, float):
        return _finite(value)
    if pa.types.is_time64(kind) and scalar.value % 1000 and kind.unit == "ns":  # Python's have no nanoseconds
        return f"{value.isoformat(timespec='microseconds')}{scalar.value % 1000:03}"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
