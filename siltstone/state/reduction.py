"""Reductions by group over Arrow columns, in NumPy: sums, running sums, and the first rows in some order.

`group` (int64[n]) is the ordinal of each row's group, below `size`. Nulls are skipped as in SQL, and a group with
only nulls gets null. Only `ends_by` and `running_by` depend on the order of the rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import UsageError
from siltstone.state.columns import canonical_bits, fixed_values, is_micros, null_mask
from siltstone.state.exact import fits_int64, running_int64, running_words, sum_int64, sum_words, to_decimal
from siltstone.state.ordering import stable_order

_LAST = np.int64(2**63 - 1)
_LONG_GROUP = 256
"""from this size on, running sums of floats take one call per group instead of one per position in the groups"""


def sum_type(kind: pa.DataType, what: str) -> pa.DataType:
    """Return the type of a sum of values: int64, float64 or decimal128(38, scale).

    Raises:
        UsageError: values of this type cannot be added; the message begins with `what`.
    """
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal128(kind):
        return pa.decimal128(38, kind.scale)
    raise UsageError(f"{what} cannot add up values of type {kind}: use an integer, float or decimal")


def sum_by(array: pa.Array, group: np.ndarray, size: int) -> tuple[pa.Array, np.ndarray | None]:
    """Sum each group of an int64, float64 or decimal128 array, and report sums that do not fit the type.

    Floats are added in ascending order, so that rounding does not depend on the order of the rows; they always fit.

    Returns:
        (sums, overflow: bool[size], or None if all fit). An integer sum that does not fit is modulo 2**64; a decimal
        one is meaningless.
    """
    values, group = _drop_nulls(fixed_values(array), array, group)
    absent = _find_absent(group, size)
    if pa.types.is_decimal(array.type):
        words, overflow = sum_words(values, group, size)
        return to_decimal(words, array.type, absent), overflow if overflow.any() else None
    if not pa.types.is_floating(array.type):
        sums, words = sum_int64(values, group, size)
        overflow = None if words is None else ~fits_int64(words)
        return pa.array(sums, mask=absent), overflow if overflow is not None and overflow.any() else None
    order = np.argsort(values)
    sums = np.zeros(size, values.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and infinity - infinity
        np.add.at(sums, group[order], values[order])
    return pa.array(sums, array.type, mask=absent), None


def count_by(array: pa.Array, group: np.ndarray, size: int) -> pa.Array:
    """Sum each group of an int64 array of counts; 0 for a group without values."""
    values, group = _drop_nulls(fixed_values(array), array, group)
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group, values)
    return pa.array(sums)


def extreme_by(array: pa.Array, group: np.ndarray, size: int, *, largest: bool = False) -> pa.Array:
    """Return the smallest (or largest) value of each group. NaN is larger than every other number, as in Spark."""
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date32(kind) or is_micros(kind)):
        return take_or_null(array, *choose_by([array], group, size, largest=largest))
    # Such values can be compared directly, without choosing rows.
    values, group = _drop_nulls(fixed_values(array), array, group)
    limits = np.iinfo(values.dtype)
    found = np.full(size, limits.min if largest else limits.max, values.dtype)
    (np.maximum if largest else np.minimum).at(found, group, values)
    return pa.array(found, mask=_find_absent(group, size)).cast(kind)


def choose_by(
    orders: Sequence[pa.Array], group: np.ndarray, size: int, *, largest: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each group that is smallest (or largest) by the first of `orders`, then the next, and so on.

    Rows that are null in any of them are skipped. NaN is larger than every other number, as in Spark.

    Returns:
        (rows: int64[size], absent: bool[size]): if absent, the row is 0 and meaningless.
    """
    rows = np.arange(len(group))
    for array in orders:
        if array.null_count:
            rows = rows[~null_mask(array)[rows]]
    of = group if len(rows) == len(group) else group[rows]
    for array in orders:
        codes = order_codes(array)
        codes = codes if len(rows) == len(codes) else codes[rows]
        codes = ~codes if largest else codes
        best = np.full(size, _LAST)
        np.minimum.at(best, of, codes)
        first = codes == best[of]
        rows, of = rows[first], of[first]
    return _last_assigned(rows, of, size)


def sort_by(orders: Sequence[pa.Array], group: np.ndarray, *, largest: bool = False) -> np.ndarray:
    """Return the rows (int64[n]) by group, then ascending by each of `orders`, null last, floats as in `choose_by`.

    Args:
        orders: at least one; of the later ones, only rows that are equal by those before are compared.
        largest: whether the first of `orders` descends, null last all the same.
    """
    first, *rest = orders
    codes = order_codes(first)
    keys = [group, ~codes if largest else codes]
    if first.null_count:
        absent = null_mask(first)
        keys = [group, absent, np.where(absent, 0, keys[1])]
    rows = stable_order(*keys)
    same = np.zeros(len(rows), np.bool_)  # as the row before
    same[1:] = np.logical_and.reduce([key[rows[1:]] == key[rows[:-1]] for key in keys])
    if rest and same.any():
        tied = np.flatnonzero(same | np.r_[same[1:], False])
        some, run = rows[tied], np.cumsum(~same)[tied]
        rows[tied] = some[sort_by([each.take(pa.array(some)) for each in rest], run)]
    return rows


def first_in_order(rows: np.ndarray, group: np.ndarray, limit: int) -> np.ndarray:
    """Return the first `limit` rows of each group, of rows that are sorted by group."""
    of = group[rows]
    starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]]) if len(of) else np.empty(0, np.int64)
    place = np.arange(len(of)) - np.repeat(starts, np.diff(starts, append=len(of)))
    return rows[place < limit]


def distinct_in_order(rows: np.ndarray, array: pa.Array, group: np.ndarray) -> np.ndarray:
    """Return the first row with each distinct value of each group, of rows in some order, in that order."""
    codes, of = order_codes(array)[rows], group[rows]
    order = stable_order(of, codes)
    codes, of = codes[order], of[order]
    new = np.r_[True, (codes[1:] != codes[:-1]) | (of[1:] != of[:-1])] if len(of) else np.empty(0, np.bool_)
    return rows[np.sort(order[new])]


def ends_by(array: pa.Array, group: np.ndarray, size: int, *, last: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the first (or last) row of each group in which the array is not null, in the order of the rows.

    Returns:
        (rows: int64[size], absent: bool[size]): if absent, the row is 0 and meaningless.
    """
    rows = np.flatnonzero(~null_mask(array)) if array.null_count else np.arange(len(group))
    rows = rows if last else rows[::-1]
    return _last_assigned(rows, group[rows], size)


def running_by(array: pa.Array, first: np.ndarray) -> tuple[pa.Array, np.ndarray | None]:
    """Return for each row the sum of its group up to and including it, for an int64, float64 or decimal128 array.

    Nulls add nothing; the sum is null until the first value. Floats are added in the order of the rows.

    Args:
        first: int64[n], the first row of each row's group; the rows of a group are consecutive.

    Returns:
        (sums, overflow: bool[n]), see `sum_by`.
    """
    there = ~null_mask(array)
    values, absent = fixed_values(array), None
    if not there.all():
        values = np.where(there if values.ndim == 1 else there[:, None], values, values.dtype.type(0))
        count = np.cumsum(there)
        absent = count == (count - there)[first]
    if pa.types.is_decimal(array.type):
        words, overflow = running_words(values, first)
        return to_decimal(words, array.type, absent), overflow if overflow.any() else None
    if not pa.types.is_floating(array.type):
        sums, words = running_int64(values, first)
        overflow = None if words is None else ~fits_int64(words)
        return pa.array(sums, mask=absent), overflow if overflow is not None and overflow.any() else None
    return pa.array(_running_floats(values, first), array.type, mask=absent), None


def _running_floats(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Sum in the order of the rows: short groups together, position by position; long ones group by group."""
    sums = np.array(values)
    starts = np.flatnonzero(first == np.arange(len(first)))
    sizes = np.diff(starts, append=len(first))
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and infinity - infinity
        for start, size in zip(starts[sizes >= _LONG_GROUP], sizes[sizes >= _LONG_GROUP], strict=True):
            sums[start : start + size] = np.cumsum(values[start : start + size])
        starts, sizes = starts[sizes < _LONG_GROUP], sizes[sizes < _LONG_GROUP]
        for place in range(1, int(sizes.max(initial=0))):
            rows = starts[sizes > place] + place
            sums[rows] += sums[rows - 1]
    return sums


def _last_assigned(rows: np.ndarray, group: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last given row of each group, and bool[size]: the groups without any, whose row is 0."""
    chosen = np.full(size, -1)
    chosen[group] = rows  # the last assignment to an index wins
    absent = chosen < 0
    chosen[absent] = 0
    return chosen, absent


def take_or_null(array: pa.Array, rows: np.ndarray, absent: np.ndarray) -> pa.Array:
    """Return the values of some rows, null where absent."""
    return array.take(pa.array(rows, mask=absent if absent.any() else None))


def order_codes(array: pa.Array) -> np.ndarray:
    """Return int64[n]: numbers in the order of the values (equal if the values are), arbitrary where null."""
    kind = array.type
    if pa.types.is_floating(kind):
        bits = canonical_bits(fixed_values(array).astype(np.float64), fold_zeros=True).view(np.int64)
        # Negative floats have descending bits; the canonical NaN is above infinity.
        return bits ^ ((bits >> np.int64(63)) & _LAST)
    if pa.types.is_uint64(kind):
        return (fixed_values(array) ^ np.uint64(1 << 63)).view(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        return fixed_values(array).astype(np.int64, copy=False)
    ranks = pc.rank(array, tiebreaker="dense")  # pyright: ignore[reportAttributeAccessIssue]
    return ranks.to_numpy().view(np.int64)


def _drop_nulls(values: np.ndarray, array: pa.Array, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not array.null_count:
        return values, group
    there = ~null_mask(array)
    return values[there], group[there]


def _find_absent(group: np.ndarray, size: int) -> np.ndarray | None:
    absent = np.ones(size, np.bool_)
    absent[group] = False
    return absent if absent.any() else None
