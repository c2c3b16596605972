"""Totals of aligned windows: one row of state per key and pane, which its windows share.

A row's `due` is the end of its next window: the least that the watermark had not reached when the row was made, or last
put. So the watermark W closes a window that ends at E <= W exactly once. Each of its panes was made with a `due` of at
most E, since E was not reached then, and no step since has moved it past E. A pane that is made later has a greater
`due`. So at the end of the step all panes of the window, and they alone, have `due` <= E.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Overflow
from siltstone.aggregates.totals import Totals
from siltstone.aggregates.windowed import (
    ROWS_A_BATCH,
    TIME,
    WINDOW_END,
    WINDOW_START,
    WINDOW_TIME,
    Take,
    TotalsAccess,
    Windowed,
    WindowTotals,
    distinct_pairs,
    explode,
    split_whole,
)
from siltstone.aggregates.windows import AlignedWindow, Panes
from siltstone.errors import UsageError
from siltstone.operator import Keys, Rows, State
from siltstone.state.access import DUE
from siltstone.state.columns import null_mask, read_times, row_bytes, take_from
from siltstone.state.ordering import stable_order
from siltstone.state.time_index import DueRows

PANE = "pane"
_ROW_BYTES = (1 << 30) // ROWS_A_BATCH
"""a row with more counts as several, since Arrow cannot copy 2 GiB of lists or sketches at once"""


class PaneTotals(Windowed):
    """The totals of `Tumbling`, `Sliding` and `Cumulative` windows."""

    TIMES: ClassVar = (WINDOW_START, WINDOW_END, WINDOW_TIME)
    output_time = WINDOW_TIME

    def __init__(self, window: AlignedWindow, key: pa.Schema, totals: Totals) -> None:
        super().__init__(window, key, totals)
        self._panes: Panes = window.panes
        self.layout = self._panes.layout
        self.variable = WindowTotals({PANE: TIME}, pa.schema([(DUE, TIME), *totals.schema]), totals=self)

    def check_edit(self, puts: pa.Table) -> None:
        """Check that an edit keeps to panes, each due at the end of a window that contains it.

        Raises:
            UsageError: it does not.
        """
        panes, pane, due = self._panes, read_times(puts.column(PANE)), read_times(puts.column(DUE))
        k = panes.index(pane)
        end = panes.ends_until(k, due)
        wrong = null_mask(puts.column(DUE)) | (panes.boundary(end) != due) | (end < panes.first_end(k))
        wrong |= panes.boundary(k) != pane
        if wrong.any():
            first, count = puts.slice(int(wrong.argmax()), 1).to_pylist()[0], int(wrong.sum())
            raise UsageError(
                f"no window with the {PANE} {first[PANE]} ends at its {DUE} {first[DUE]}, and so in {count} rows",
                advice="leave both as they are in the state",
            )
        self._totals.check(puts)

    def find_pieces(self, key: np.ndarray, times: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        null = null_mask(times)
        pane = np.where(null, 0, self._panes.index(read_times(times)))
        return distinct_pairs(2 * key + null, pane)

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        return self._panes.find_late(at, before_us)

    def process(self, rows: Rows, state: State, access: TotalsAccess, *, updates: bool) -> pa.Table | None:
        panes, keys = self._panes, rows.keys
        index = panes.index(read_times(rows.table.column(self.on)))
        one, group = distinct_pairs(rows.key_index, index)
        owner, k = rows.key_index[one], index[one]
        entries = access.address(keys, owner, panes.boundary(k))
        old = access.read(entries)
        there = np.flatnonzero(old.found)
        kept = self._totals.take(self._totals.of_state(old.values), there)
        reduced = self._merge(rows, kept, there, group, len(one))
        due = np.array(panes.new_due(k, state.clock.before_us))
        due[there] = read_times(old.values.column(DUE).take(pa.array(there)))
        access.write(entries, [pa.array(due, TIME), *reduced])
        if not updates:
            return None
        if panes.is_single:
            own = entries.columns.select(self._key.names)
            return self._make_rows(own, panes.boundary(k), panes.boundary(k + 1), reduced, closes=False)
        return self._update(rows, group, owner, k, due, access)

    def _update(
        self, rows: Rows, group: np.ndarray, owner: np.ndarray, k: np.ndarray, due: np.ndarray, access: TotalsAccess
    ) -> pa.Table:
        """Compute the windows of changed panes that have not ended from all their panes.

        Args:
            group: of each row, which of the panes it changed.

        Raises:
            BadRow: a sum does not fit; the rows that changed the window are bad.
        """
        panes, keys, made = self._panes, rows.keys, list[pa.Table]()
        row, end = self._explode(panes.ends_after(k, due - 1), panes.last_end(k))
        one, _ = distinct_pairs(owner[row], end)
        whose, end = owner[row][one], end[one]
        for part in split_whole(whose, end - panes.start(end), self._limit(ROWS_A_BATCH)):
            own, ends = whose[part], end[part]
            window, pane = explode(panes.start(ends), ends - 1)
            # An empty pane, where clocks skip time, begins when the next one does: that one's rows count once.
            real = panes.boundary(pane) < panes.boundary(pane + 1)
            window, pane = window[real], pane[real]
            of, entry = distinct_pairs(own[window], pane)
            found = access.read(access.address(keys, own[window][of], panes.boundary(pane[of])))
            dues = read_times(found.values.column(DUE))
            # A pane of which this window had ended belongs to others; what is not there has no due time.
            after = panes.index(np.where(found.found, dues, 0) - 1)
            counts = np.flatnonzero(found.found[entry] & (ends[window] > after[entry]))
            columns = self._totals.take(self._totals.of_state(found.values), entry[counts])
            try:
                reduced = self._totals.reduce(columns, window[counts], len(ends))
            except Overflow as overflow:
                # Of such a window, all panes that this call changed are to blame.
                over = counts[np.asarray(overflow.groups, bool)[window[counts]]]
                _, pair = distinct_pairs(np.r_[own[window[over]], owner], np.r_[pane[over], k])
                blamed = Overflow(overflow.function, np.isin(pair[len(over) :], pair[: len(over)]))
                raise self._totals.overflow_error(blamed, keys, rows.key_index, group) from None
            shown = keys.columns.take(pa.array(own))
            times = panes.boundary(panes.start(ends)), panes.boundary(ends)
            made.append(self._make_rows(shown, *times, reduced, closes=False))
        return pa.concat_tables(made)

    def close(self, take: Take, state: State, access: TotalsAccess, *, closes: bool) -> Iterator[pa.Table]:
        if self._panes.is_single:
            while len((due := take(self._limit(ROWS_A_BATCH))).at):
                access.remove(due.keys)
                if closes:
                    yield self._make_single(due)
            return
        # The panes of a window may be in different batches, so all are taken first.
        batches = list[DueRows]()
        while len((due := take(self._limit(ROWS_A_BATCH))).at):
            batches.append(due)
        watermark = state.clock.watermark_us
        if not batches or watermark is None:
            return
        for batch in batches:
            self._move(batch, watermark, access)
        if closes:
            yield from self._make_windows(batches, watermark, access)

    def _make_single(self, due: DueRows) -> pa.Table:
        k = self._panes.index(read_times(due.keys.columns.column(PANE)))
        columns = self._totals.of_state(due.values)
        times = self._panes.boundary(k), self._panes.boundary(k + 1)
        return self._make_rows(due.keys.columns.select(self._key.names), *times, columns, closes=True)

    def _move(self, batch: DueRows, watermark: int, access: TotalsAccess) -> None:
        """Let panes wait for their next window, or remove them."""
        panes = self._panes
        k = panes.index(read_times(batch.keys.columns.column(PANE)))
        then = panes.ends_until(k, watermark) + panes.end_step
        over = then > panes.last_end(k)
        if over.all():
            access.remove(batch.keys)
            return
        access.remove(batch.keys.take(np.flatnonzero(over)))
        kept = np.flatnonzero(~over)
        columns = self._totals.take(self._totals.of_state(batch.values), kept)
        access.write(batch.keys.take(kept), [pa.array(panes.boundary(then[kept]), TIME), *columns])

    def _make_windows(self, batches: list[DueRows], watermark: int, access: TotalsAccess) -> Iterator[pa.Table]:
        """Yield the windows of due panes that end by the watermark, some keys at a time."""
        panes = self._panes
        columns = pa.concat_tables([batch.keys.columns for batch in batches])
        values = [batch.values for batch in batches]
        groups = np.concatenate([batch.keys.key_groups for batch in batches])
        owners, owner = access.owners(columns, groups)
        k = panes.index(read_times(columns.column(PANE)))
        low = panes.ends_after(k, np.concatenate([batch.at for batch in batches]) - 1)
        high = panes.ends_until(k, watermark)
        order = stable_order(owner)
        counts = (high - low) // panes.end_step + 1
        sizes = counts * np.maximum(1, np.concatenate([row_bytes(table) for table in values]) // _ROW_BYTES)
        for part in split_whole(owner[order], sizes[order], ROWS_A_BATCH):
            chosen = order[part]
            row, end = self._explode(low[chosen], high[chosen])
            own = owner[chosen][row]
            one, group = distinct_pairs(own, end)
            state = self._totals.of_state(take_from(values, chosen))
            spread = self._totals.take(state, row)
            reduced = self._reduce(spread, group, len(one), owners, own[one])
            shown = owners.columns.take(pa.array(own[one]))
            times = panes.boundary(panes.start(end[one])), panes.boundary(end[one])
            yield self._make_rows(shown, *times, reduced, closes=True)

    def _explode(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, end): the windows that end from low to high, of each row."""
        row, end = explode(low, high, self._panes.end_step)
        if not self._panes.is_cumulative:
            return row, end
        # Where clocks skip time, windows of one start end at the same moment: they are one.
        grows = self._panes.boundary(end - 1) < self._panes.boundary(end)
        return row[grows], end[grows]

    def _reduce(
        self, columns: list[pa.Array], group: np.ndarray, size: int, keys: Keys, owner: np.ndarray
    ) -> list[pa.Array]:
        """Reduce panes to windows, whose keys are `owner`.

        Raises:
            BadRow: a sum does not fit.
        """
        try:
            return self._totals.reduce(columns, group, size)
        except Overflow as overflow:
            raise self._totals.closing_error(overflow, keys, owner) from None
