"""Python values for columns, one at a time, as Arrow gives them back: for code that handles one key at a time.

Arrow takes several Python values for one: a naive time for UTC, 0.1 for the nearest float32, a datetime for a date.
Once cast, equal values compare equal, and a value is what a later step reads.
"""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from numbers import Real
from typing import Any

import pyarrow as pa

from siltstone.errors import BadRow, UsageError, summarize

NAN = "NaN"
"""what every NaN compares as"""


class RowCast:
    """Casts rows of some columns, one at a time: each value as Arrow gives it back (`cast_value`).

    Args:
        what: begins the text of an error.
    """

    def __init__(self, schema: pa.Schema, what: str) -> None:
        self._names, self._what = frozenset(schema.names), what
        self._fields = [(field.name, field, _find_unchanged(field.type)) for field in schema]

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` as a row of the columns, in their order; nothing is shared.

        Raises:
            UsageError: the columns are others.
            BadRow: a value does not fit its column.
        """
        if values.keys() != self._names:
            names = ", ".join(name for name, *_ in self._fields)
            raise UsageError(f"{self._what}: columns {', '.join(map(str, values))} were given: it has {names}")
        row = {}
        for name, field, is_unchanged in self._fields:
            value = values[name]
            row[name] = value if value is None or is_unchanged(value) else _cast_by_arrow(value, field, self._what)
        return row


def cast_value(value: Any, field: pa.Field, what: str) -> Any:
    """Return a value as Arrow gives it back from a column.

    Raises:
        BadRow: it does not fit the column, or only with a part cut off.
    """
    return value if value is None or _find_unchanged(field.type)(value) else _cast_by_arrow(value, field, what)


def _cast_by_arrow(value: Any, field: pa.Field, what: str) -> Any:
    kind = field.type
    try:
        cast = pa.scalar(value, kind).as_py()
        _check_whole(value, cast, kind)
        return cast
    except (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = f"{what}: a value does not fit its column ({field.name} {kind})"
        raise BadRow(f"{reason}: {summarize(error)}", reason=reason) from None


@cache
def _find_unchanged(kind: pa.DataType) -> Callable[[Any], bool]:
    """Return a quick test for values that Arrow surely gives back as they are, from a column of this type."""
    types = pa.types
    if types.is_integer(kind):
        below = 1 << kind.bit_width
        least, most = (-below // 2, below // 2 - 1) if types.is_signed_integer(kind) else (0, below - 1)
        return lambda value: type(value) is int and least <= value <= most
    if types.is_string(kind):
        return lambda value: type(value) is str and value.isascii()
    if types.is_timestamp(kind):
        try:
            zone = pa.scalar(0, kind).as_py().tzinfo
        except (LookupError, ValueError):  # Python does not know the zone, which is an error of the first value
            return lambda _: False
        if zone is None or zone.utcoffset(None) is not None:  # else a clock may skip an hour
            return lambda value: type(value) is datetime and value.tzinfo is zone
    same = {pa.bool_(): bool, pa.float64(): float, pa.binary(): bytes, pa.date32(): date}.get(kind)
    return lambda value: type(value) is same


def _check_whole(value: Any, cast: Any, kind: pa.DataType) -> None:
    """Refuse a value of which Arrow left something out, at any depth.

    Arrow cuts decimals, and numbers in lists, to integers. It makes an infinite float32 of a finite number. It cuts
    parts of a day or of a microsecond. It leaves out fields of a struct that are not declared.
    """
    if cast is None or isinstance(value, pa.Scalar):  # Arrow refuses scalars of other types
        return
    if pa.types.is_struct(kind):
        given = value if isinstance(value, Mapping) else dict(value)
        if unknown := sorted({*map(str, given)} - {field.name for field in kind}):
            raise pa.ArrowInvalid(f"field {unknown[0]} is not declared")
        for field in kind:
            _check_whole(given.get(field.name), cast[field.name], field.type)
    elif pa.types.is_list(kind):
        for each, made in zip(value, cast, strict=True):
            _check_whole(each, made, kind.value_type)
    elif _is_cut(value, cast, kind):
        raise pa.ArrowInvalid(f"{value} would become {cast}")


def _is_cut(value: Any, cast: Any, kind: pa.DataType) -> bool:
    types, is_number = pa.types, isinstance(value, Real | Decimal)
    if types.is_integer(kind):
        return is_number and cast != value
    if types.is_timestamp(kind) or types.is_date32(kind):
        return value % 1 != 0 if is_number else bool(getattr(value, "nanosecond", 0) and types.is_timestamp(kind))
    return types.is_float32(kind) and is_number and math.isinf(cast) and not math.isinf(value)


def to_comparable(value: Any) -> Any:
    """Return a map key's value such that equal map keys compare equal, and others do not.

    Every NaN is the same. Times of one zone would compare by their clock, which shows an hour twice a year.
    """
    if isinstance(value, float) and math.isnan(value):
        return NAN
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value
