"""Rows as JSON objects, whatever their types and values: for dead letters and errors."""

import base64
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa

SHOWN_CHARACTERS = 100
"""of a value in an error"""


def json_rows(table: pa.Table) -> list[str]:
    """Convert each row to a JSON object.

    In text that is not UTF-8, invalid bytes become `\\xNN`. Binary values become base64, maps lists of pairs, and
    numbers that are not finite their names. Decimals, dates and times become text; a date or time outside the years 1
    to 9999 becomes its number of units since 1970.
    """
    columns = [[_to_plain(value) for chunk in column.chunks for value in chunk] for column in table.columns]
    rows = zip(*columns, strict=True) if columns else iter([()] * table.num_rows)
    names = table.column_names
    return [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False) for row in rows]


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
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
