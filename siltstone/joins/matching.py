"""Which rows of two sides belong together, as pure functions over many rows at once.

`owner` (int64[n]) is the ordinal of each row's key, the same for both sides; times are int64 microseconds since 1970.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from siltstone.state.columns import null_mask
from siltstone.state.nested import encode_nested
from siltstone.state.ordering import stable_order
from siltstone.state.reduction import order_codes
from siltstone.state.types import is_nested

_INT64 = np.iinfo(np.int64)


def shift(at: np.ndarray, by_us: int) -> tuple[np.ndarray, np.ndarray]:
    """Return times `by_us` later, which end at the bounds of int64, and bool[n]: which are beyond the bounds."""
    low, high = max(_INT64.min, _INT64.min - by_us), min(_INT64.max, _INT64.max - by_us)
    return at.clip(low, high) + by_us, (at < low) | (at > high)


class TimeOrder:
    """Rows by (owner, time), to be searched for ranges of time of one owner.

    Attributes:
        order: int64[n], the rows in this order; equal ones as they were given.
    """

    def __init__(self, owner: np.ndarray, at: np.ndarray) -> None:
        self._times = np.sort(at)
        codes = self._code(owner, np.searchsorted(self._times, at))
        self.order: np.ndarray = stable_order(codes)
        self._codes = codes[self.order]

    def find(self, owner: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places in `order` of the rows from `low` to `high`, both inclusive: first, and how many (0 if
        `low` is later)."""
        first = np.searchsorted(self._codes, self._code(owner, np.searchsorted(self._times, low)))
        end = np.searchsorted(self._codes, self._code(owner, np.searchsorted(self._times, high, side="right")))
        return first, np.maximum(end - first, 0)

    def _code(self, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Combine an owner and the number of rows before a time: one number in the order of both."""
        return owner * np.int64(len(self._times) + 1) + rank


def split_pairs(first: np.ndarray, counts: np.ndarray, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs (row, place) of each row with `counts` places from `first` on: at most `limit` at once, or those of
    one row."""
    rows = np.flatnonzero(counts)
    upto = np.cumsum(counts[rows])
    start = 0
    while start < len(rows):
        before = int(upto[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(upto, before + limit, side="right")))
        chosen = rows[start:end]
        size = counts[chosen]
        within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        yield np.repeat(chosen, size), np.repeat(first[chosen], size) + within
        start = end


def sort_rows(owner: np.ndarray, columns: Sequence[pa.Array]) -> np.ndarray:
    """Return the rows (int64[n]) by owner, then by each column, null first as Spark sorts them.

    Nested values are in the order of their bytes, which is always the same and means nothing.
    """
    keys: list[np.ndarray] = []
    for array in columns:
        codes = order_codes(encode_nested(array) if is_nested(array.type) else array)
        if array.null_count:
            there = ~null_mask(array)
            keys += [there, np.where(there, codes, 0)]
        else:
            keys.append(codes)
    return stable_order(owner, *keys)
