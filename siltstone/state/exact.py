"""Exact sums and running sums of integers and decimals by group, in NumPy, with two words per 128-bit number.

`words` (uint64[n, 2]) are numbers in two's complement, low word first, as Arrow's decimal128 is in memory. `group`
(int64[n]) is the ordinal of each number's group, below `size`. For running sums, the numbers of a group are
consecutive, and `first` (int64[n]) is the position of the first number of each number's group. A call takes fewer than
2**31 numbers.
"""

import numpy as np
import pyarrow as pa

_HALF = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_LIMIT = 10**38
"""decimal128(38) can represent whole numbers whose magnitude is below this"""
_EXACT_FLOAT = np.uint64(1 << 53)


def to_words(values: np.ndarray) -> np.ndarray:
    """Convert int64[n] to words."""
    return np.stack([values.view(np.uint64), (values >> np.int64(63)).view(np.uint64)], axis=1)


def fits_int64(words: np.ndarray) -> np.ndarray:
    """Return bool[n]: whether each number is an int64, which is then its low word."""
    return words[:, 1].view(np.int64) == words[:, 0].view(np.int64) >> np.int64(63)


def fits_decimal(words: np.ndarray) -> np.ndarray:
    """Return bool[n]: whether each number has at most 38 digits."""
    low, high = words[:, 0], words[:, 1].view(np.int64)
    least, most = divmod(1 - _LIMIT, 1 << 64), divmod(_LIMIT - 1, 1 << 64)
    above = (high > least[0]) | ((high == least[0]) & (low >= np.uint64(least[1])))
    return above & ((high < most[0]) | ((high == most[0]) & (low <= np.uint64(most[1]))))


def sum_int64(values: np.ndarray, group: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sum of each group of int64[n], modulo 2**64 as int64[size], and the exact sums as words.

    Words are None if the values are so small that no sum can leave int64.
    """
    most = max(int(values.max()), -int(values.min())) if len(values) else 0
    if most * len(values) < 1 << 63 or most * int(np.bincount(group).max()) < 1 << 63:
        sums = np.zeros(size, np.int64)
        np.add.at(sums, group, values)
        return sums, None
    words = _add(_limbs_of_int64(values), group, size)[0]
    return words[:, 0].view(np.int64), words


def sum_words(words: np.ndarray, group: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of each group as words, modulo 2**128, and bool[size]: whether it has more than 38 digits."""
    if fits_int64(words).all():
        sums, exact = sum_int64(np.ascontiguousarray(words[:, 0]).view(np.int64), group, size)
        return (to_words(sums) if exact is None else exact), np.zeros(size, np.bool_)
    sums, beyond = _add(_limbs(words), group, size)
    return sums, beyond | ~fits_decimal(sums)


def running_int64(values: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return for each of int64[n] the sum of its group up to and including it: modulo 2**64, and exact as words.

    Words are None if the values are so small that no sum can leave int64.
    """
    most = max(int(values.max()), -int(values.min())) if len(values) else 0
    longest = int((np.arange(len(first)) - first).max(initial=0)) + 1
    if most * longest < 1 << 63:
        return _prefix_sums(values, first), None
    words = _carry([_prefix_sums(limb.view(np.int64), first) for limb in _limbs_of_int64(values)])[0]
    return words[:, 0].view(np.int64), words


def running_words(words: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each number the sum of its group up to and including it as words, modulo 2**128, and bool[n]: whether
    it has more than 38 digits."""
    sums, beyond = _carry([_prefix_sums(limb.view(np.int64), first) for limb in _limbs(words)])
    return sums, beyond | ~fits_decimal(sums)


def _prefix_sums(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return running sums of int64[n], modulo 2**64: a difference of two sums is right even if these have wrapped."""
    total = np.cumsum(values)
    return total - (total - values)[first]


def _limbs_of_int64(values: np.ndarray) -> list[np.ndarray]:
    """Split int64[n] into limbs of 32 bits as uint64, the lowest first and the last one signed."""
    return [values.view(np.uint64) & _HALF, (values >> np.int64(32)).view(np.uint64)]


def _limbs(words: np.ndarray) -> list[np.ndarray]:
    """Split words into limbs of 32 bits as uint64, the lowest first and the last one signed."""
    low, high = words[:, 0], words[:, 1]
    return [low & _HALF, low >> _SHIFT, high & _HALF, (high.view(np.int64) >> np.int64(32)).view(np.uint64)]


def _add(limbs: list[np.ndarray], group: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum numbers in limbs by group; return what `_carry` returns."""
    sums = [np.zeros(size, np.int64) for _ in limbs]
    for total, limb in zip(sums, limbs, strict=True):
        np.add.at(total, group, limb.view(np.int64))
    return _carry(sums)


def _carry(sums: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return words from sums of limbs (2 or 4 of int64[n]), and bool[n]: whether they exceed 128 bits."""
    sums = [*sums, *(np.zeros_like(sums[0]) for _ in range(4 - len(sums)))]
    for k in range(3):
        sums[k + 1] += sums[k] >> np.int64(32)
    top = sums[3]
    beyond = top != top.astype(np.int32)
    low, second, third, fourth = (total.view(np.uint64) & _HALF for total in sums)
    return np.stack([low | second << _SHIFT, third | fourth << _SHIFT], axis=1), beyond


def to_decimal(words: np.ndarray, kind: pa.DataType, absent: np.ndarray | None = None) -> pa.Array:
    """Make a decimal128 array from words, null where `absent` (bool[n])."""
    valid = None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))
    return pa.Array.from_buffers(kind, len(words), [valid, pa.py_buffer(np.ascontiguousarray(words))])


def means(words: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return float64[n]: whole numbers divided by int64 counts, if the quotient fits int64; 0 if the count is 0.

    The result is rounded once for counts below 2**27; for greater ones the last bit may differ.
    """
    there = count > 0
    result = np.zeros(len(count))
    result[there] = _quotients(words[there], count[there])
    return result


def _quotients(words: np.ndarray, count: np.ndarray) -> np.ndarray:
    low, high = words[:, 0].copy(), words[:, 1].copy()
    negative = high.view(np.int64) < 0
    low[negative] = ~low[negative] + np.uint64(1)
    high[negative] = ~high[negative] + (low[negative] == 0)
    quotient = low.astype(np.float64) / count
    large = np.flatnonzero((high != 0) | (low >= _EXACT_FLOAT))
    if len(large):
        divisor = count[large].view(np.uint64)
        few = divisor < np.uint64(1 << 31)
        quotient[large[few]] = _long_division(low[large[few]], high[large[few]], divisor[few])
        for k in large[~few].tolist():
            quotient[k] = ((int(high[k]) << 64) + int(low[k])) / int(count[k])
    return np.where(negative, -quotient, quotient)


def _long_division(low: np.ndarray, high: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Return quotients as floats, for divisors below 2**31."""
    rest, whole = np.zeros(len(low), np.uint64), np.zeros(len(low), np.uint64)
    for limb in (high >> _SHIFT, high & _HALF, low >> _SHIFT, low & _HALF):
        part = rest << _SHIFT | limb
        whole = whole << _SHIFT | part // divisor
        rest = part % divisor
    near = whole.astype(np.float64)
    return near + ((whole - near.astype(np.uint64)).view(np.int64) + rest / divisor)
