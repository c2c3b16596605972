"""Convert rows to JSON text. No value fails, even one that Python or JSON cannot represent."""

import base64
import json
import math
from typing import Any

import pyarrow as pa


def json_rows(table: pa.Table) -> list[str]:
    """Convert each row to a JSON object.

    In text that is not UTF-8, invalid bytes become `\\xNN`. Binary values become base64, maps lists of pairs, and
    numbers that are not finite their names. Decimals, dates and times become text; a date or time outside the years 1
    to 9999 becomes its number of units since 1970.
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
