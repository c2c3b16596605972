"""Totals of windows: the state variable that holds them, and what aligned windows and sessions have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Overflow
from siltstone.aggregates.totals import Totals
from siltstone.aggregates.windows import Window
from siltstone.operator import Keys, MapState, Rows, State
from siltstone.state.access import DUE, MapAccess, find_owners
from siltstone.state.backend import KeyedState, Lookup
from siltstone.state.edits import Edited, edit_table
from siltstone.state.hashing import xxhash64
from siltstone.state.nested import is_variable, stored_columns
from siltstone.state.ordering import stable_order
from siltstone.state.time_index import DueRows
from siltstone.state.types import is_nested
from siltstone.state.variables import CLOCKS, DueColumn, Purpose, schema_of

TIME = pa.timestamp("us", "UTC")
WINDOW_START, WINDOW_END, WINDOW_TIME = "window_start", "window_end", "window_time"
ROWS_A_BATCH = 1 << 18
"""rows that are taken, or windows that are made, at once"""
_LONG = 16
"""how many rows one counts for that may be long, such as a sketch of 64 KiB"""
Take = Callable[[int], DueRows]


class TotalsAccess(MapAccess):
    """The totals of one operator's windows, by (operator key, one column)."""

    def edit(self, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        """Delete entries, and put others."""
        return edit_table(self._state, self._name, changes, key_groups)

    def address(self, keys: Keys, at: np.ndarray, subkey: np.ndarray) -> Keys:
        """Return the primary keys (operator key `at[i]`, `subkey[i]`), which must be distinct."""
        [field] = self._table.schema.subkey
        column = pa.array(subkey).cast(field.type)
        owners = keys.columns.take(pa.array(at))
        table = pa.table([*owners.columns, column], schema=pa.schema([*owners.schema, field]))
        return Keys(table, xxhash64([column], keys.hashes[at]), keys.key_groups[at])

    def owners(self, entries: pa.Table, key_groups: np.ndarray) -> tuple[Keys, np.ndarray]:
        """Return the distinct operator keys of primary keys, and of each primary key the ordinal of its owner."""
        return find_owners(self._table.schema.key, entries, key_groups)

    def read(self, entries: Keys) -> Lookup:
        """Return the rows of entries, as the table stores them."""
        return self._table.get(entries)

    def write(self, entries: Keys, columns: Sequence[pa.Array]) -> None:
        """Insert or replace entries."""
        schema = self._table.schema
        fitted = [column.cast(field.type) for column, field in zip(columns, schema.shown_value, strict=True)]
        self._table.put(entries, stored_columns(pa.table(fitted, schema=schema.shown_value), schema.nested))

    def remove(self, entries: Keys) -> None:
        """Delete entries."""
        self._table.delete(entries)


@dataclass(frozen=True)
class WindowTotals(MapState):
    """Columns of state per key and pane or session, due `due_plus_us` after the time in the column `due`.

    Attributes:
        totals: who keeps them.
    """

    totals: "Windowed" = field(kw_only=True, compare=False, repr=False)
    due_plus_us: int = 0

    @property
    def edits_keys(self) -> bool:
        return self.totals.edits_keys

    @property
    def optional(self) -> tuple[str, ...]:
        return self.totals.optional

    def check_edit(self, puts: pa.Table) -> None:
        self.totals.check_edit(puts)

    def edit(self, name: str, state: KeyedState, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        return self.totals.edit(self.bind(name, state), changes, key_groups)

    def due_columns(self, name: str) -> dict[str, DueColumn]:
        return {name: DueColumn(CLOCKS[0], DUE, self.due_plus_us, Purpose.ROWS)}

    def bind(self, name: str, state: KeyedState) -> TotalsAccess:
        return TotalsAccess(name, state)


class Windowed(ABC):
    """How an `Aggregate` keeps the totals of windows.

    Attributes:
        variable: its state.
        output_time: the column of the output with the event time of its rows.
    """

    TIMES: ClassVar[tuple[str, ...]]
    """the columns of a row of output that tell its window"""
    output_time: str
    variable: WindowTotals

    layout: str
    """what the state depends on besides its schema"""
    optional: ClassVar[tuple[str, ...]] = ()
    """the columns of state that rows of an edit may lack"""
    edits_keys: ClassVar[bool] = False
    """whether an edit depends on all rows that it has of a key"""

    def __init__(self, window: Window, key: pa.Schema, totals: Totals) -> None:
        self.on: str = window.on
        self._key, self._totals = key, totals
        self._has_long_rows = any(is_nested(kind) or is_variable(kind) for kind in totals.schema.types)

    def _limit(self, rows: int) -> int:
        """Return how many rows to work on at once: fewer if they may be long, since Arrow cannot copy 2 GiB at once."""
        return max(1, rows // _LONG) if self._has_long_rows else rows

    @property
    def reserved(self) -> tuple[str, ...]:
        """The names of columns that neither keys nor aggregates can have."""
        own = [*schema_of(self.variable.key, "").names, *schema_of(self.variable.value, "").names]
        return (*(name for name in own if name not in self._totals.schema.names), *self.TIMES)

    def output(self, *, closes: bool) -> pa.Schema:
        """Return the schema of the output; `window_time` is of no use in updates."""
        times = [(name, TIME) for name in self._shown(closes=closes)]
        return pa.schema([*self._key, *times, *self._totals.result_schema])

    @abstractmethod
    def check_edit(self, puts: pa.Table) -> None:
        """See `Variable.check_edit`."""

    def edit(self, access: TotalsAccess, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        """See `Variable.edit`."""
        return access.edit(changes, key_groups)

    @abstractmethod
    def process(self, rows: Rows, state: State, access: TotalsAccess, *, updates: bool) -> pa.Table | None:
        """Add rows to their windows; return those that changed, if `updates`.

        Raises:
            BadRow: a sum does not fit, or values do not.
        """

    @abstractmethod
    def close(self, take: Take, state: State, access: TotalsAccess, *, closes: bool) -> Iterator[pa.Table]:
        """Remove what has ended; yield the windows, if `closes`.

        Raises:
            BadRow: a sum does not fit.
        """

    def find_pieces(self, key: np.ndarray, times: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Find the rows of a key that are in the same windows; those without a time are a piece of their own.

        Args:
            key: int64[n], the key of each row.
            times: their event times.

        Returns:
            A row of each piece, and the piece of each row.
        """
        raise NotImplementedError(f"rows of {type(self).__name__} are not combined")

    @abstractmethod
    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        """See `Operator.find_late`."""

    def _shown(self, *, closes: bool) -> tuple[str, ...]:
        return self.TIMES if closes else tuple(name for name in self.TIMES if name != WINDOW_TIME)

    def _make_rows(
        self, keys: pa.Table, start: np.ndarray, end: np.ndarray, reduced: list[pa.Array], *, closes: bool
    ) -> pa.Table:
        """Make rows of output, one per window; `keys` are the operator's."""
        times = {WINDOW_START: start, WINDOW_END: end, WINDOW_TIME: end - 1}
        shown = [pa.array(times[name], TIME) for name in self._shown(closes=closes)]
        return pa.table([*keys.columns, *shown, *self._totals.results(reduced)], schema=self.output(closes=closes))

    def _merge(
        self, rows: Rows, old: list[pa.Array], old_group: np.ndarray, group: np.ndarray, size: int
    ) -> list[pa.Array]:
        """Reduce rows of a call together with columns of state.

        Raises:
            BadRow: a sum does not fit, or values do not.
        """
        lifted = self._totals.read(rows.table)
        columns = self._totals.join(old, lifted)
        try:
            return self._totals.reduce(columns, np.concatenate([old_group, group]), size)
        except Overflow as overflow:
            raise self._totals.overflow_error(overflow, rows.keys, rows.key_index, group) from None


def distinct_pairs(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, group): a row with each distinct pair, in their order, and the group of each row (int64)."""
    if not len(first):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = stable_order(first, second)
    one, two = first[order], second[order]
    new = np.r_[True, (one[1:] != one[:-1]) | (two[1:] != two[:-1])]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(new) - 1
    return order[new], group


def explode(low: np.ndarray, high: np.ndarray, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, number): for each row low, low + step, ... up to high; nothing if low is more."""
    counts = np.maximum((high - low) // step + 1, 0)
    row = np.repeat(np.arange(len(low)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, low[row] + place * step


def split_whole(of: np.ndarray, sizes: np.ndarray, limit: int) -> Iterator[slice]:
    """Split rows, sorted by `of`, into slices of whole groups with at most `limit` in size, or one group."""
    ends = np.flatnonzero(np.r_[of[1:] != of[:-1], True]) + 1 if len(of) else np.empty(0, np.int64)
    upto = np.cumsum(sizes)[ends - 1] if len(of) else ends
    start = place = 0
    while place < len(ends):
        before = int(upto[place - 1]) if place else 0
        place = max(place + 1, int(np.searchsorted(upto, before + limit, side="right")))
        yield slice(start, int(ends[place - 1]))
        start = int(ends[place - 1])
