"""The rows of one call, brought together by key: sums, ends and running sums of all keys at once."""

import numpy as np
import pyarrow as pa

from siltstone.operator import Rows


class Grouped:
    """A call's rows sorted by key, rows of one key in the order in which they came.

    Attributes:
        table: the rows (n); `group` (int64[n]) is the ordinal of each row's key in `Rows.keys` (m keys).
        key_groups: uint16[n].
        starts: int64[m], the first row of each key; every key has one.
    """

    def __init__(self, rows: Rows) -> None:
        order = np.argsort(rows.key_index, kind="stable")
        self.table = rows.table.take(pa.array(order))
        self.group = rows.key_index[order]
        self.key_groups = rows.key_groups[order]
        self.starts = np.flatnonzero(np.diff(self.group, prepend=-1))

    def values(self, column: str, null: int = 0) -> np.ndarray:
        """The numbers, times or booleans of a column; `null` stands for missing numbers."""
        array = self.table.column(column)
        return (array.fill_null(null) if array.null_count else array).to_numpy()

    def present(self, column: str) -> np.ndarray:
        """bool[n]: where a column is not null."""
        return self.table.column(column).is_valid().to_numpy()

    def sums(self, values: np.ndarray) -> np.ndarray:
        """int64[m]: the sum of each key's values."""
        return np.add.reduceat(values.astype(np.int64), self.starts)

    def first(self, values: np.ndarray) -> np.ndarray:
        """The first of each key's values."""
        return values[self.starts]

    def last(self, values: np.ndarray) -> np.ndarray:
        """The last of each key's values."""
        return values[np.append(self.starts[1:], len(values)) - 1]

    def running(self, values: np.ndarray, restart: np.ndarray, carried: np.ndarray) -> np.ndarray:
        """int64[n]: each key's sum of values up to and including each row, since its last restart.

        A row where `restart` is true sets the sum to 0, whatever it holds. Keys start at `carried`, int64[m].
        """
        total = np.cumsum(values, dtype=np.int64)
        base = total.copy()
        opening = self.starts[~restart[self.starts]]
        base[opening] -= values[opening] + carried[self.group[opening]]
        anchor = restart.copy()
        anchor[opening] = True
        return total - base[np.maximum.accumulate(np.where(anchor, np.arange(len(total)), 0))]

    def entries(self, rows: np.ndarray, *columns: str) -> tuple[np.ndarray, np.ndarray]:
        """The distinct (key, columns) among some rows.

        Args:
            rows: int64[k], ascending ordinals of rows.
            columns: names of columns without nulls.

        Returns:
            int64[e], a row of each entry, the first; int64[k], the entry of each of `rows`.
        """
        code = self.group[rows]
        for name in columns:
            encoded = self.table.column(name).take(pa.array(rows)).combine_chunks().dictionary_encode()
            code = code * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy()
        _, first, entry = np.unique(code, return_index=True, return_inverse=True)
        return rows[first], entry
