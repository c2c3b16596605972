"""Rows as JSON text, whatever values a source may give: one that Python or JSON has no value for does not fail."""

import base64
import json
import math
from typing import Any

import pyarrow as pa


def json_rows(table: pa.Table) -> list[str]:
    """Each row as a JSON object.

    Text that is no UTF-8 shows its bytes as `\\xNN`; binary is base64, a map a list of pairs, a number that is not
    finite its name. Decimals, dates and times are text; a date or time beyond the years 1 to 9999 is its number of
    units since 1970.
    """
    columns = [[_plain(value) for chunk in column.chunks for value in chunk] for column in table.columns]
    rows = zip(*columns, strict=True) if columns else iter([()] * table.num_rows)
    names = table.column_names
    return [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False) for row in rows]


def _plain(scalar: Any) -> Any:
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        scalar = scalar.value
    if scalar is None or not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.MapScalar):
        return [[_plain(entry[0]), _plain(entry[1])] for entry in scalar.values]
    if isinstance(scalar, pa.ListScalar):  # and those that derive from it
        return [_plain(value) for value in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {kind.field(i).name: _plain(scalar[i]) for i in range(kind.num_fields)}
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
