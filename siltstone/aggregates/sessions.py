"""Totals of sessions: one row of state per key and open session, in slots 0, 1, ... in the order of their starts.

Slot 0 has the number of the key's sessions, so that all are found by their primary keys. A session is due right after
its end, and not at it: a row at its end, which is not late then, still belongs to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from siltstone.aggregates.totals import Totals
from siltstone.aggregates.windowed import (
    ROWS_A_BATCH,
    TIME,
    WINDOW_END,
    WINDOW_START,
    Take,
    TotalsAccess,
    Windowed,
    WindowTotals,
    distinct_pairs,
    explode,
)
from siltstone.aggregates.windows import Session, merge_sessions
from siltstone.errors import UsageError
from siltstone.operator import Keys, Rows, State
from siltstone.state.access import DUE
from siltstone.state.columns import fixed_values, one_array, read_times
from siltstone.state.edits import Edited
from siltstone.state.ordering import stable_order
from siltstone.state.protocol import split_changes
from siltstone.state.variables import check_not_null

SLOT, START, OPEN = "slot", "start", "open"


@dataclass(frozen=True)
class _Open:
    """Sessions of some keys, sorted by (owner, start): `owner` is the ordinal of each one's key; times in us."""

    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray
    columns: list[pa.Array]

    def choose(self, which: np.ndarray) -> "_Open":
        columns = [column.take(pa.array(which)) for column in self.columns]
        return _Open(self.owner[which], self.start[which], self.end[which], columns)


class SessionTotals(Windowed):
    """The totals of `Session` windows."""

    TIMES: ClassVar = (WINDOW_START, WINDOW_END)
    output_time = WINDOW_END
    layout = "sessions"
    optional: ClassVar = (OPEN,)
    edits_keys: ClassVar = True

    def __init__(self, window: Session, key: pa.Schema, totals: Totals) -> None:
        super().__init__(window, key, totals)
        self._session = window
        value = pa.schema([(DUE, TIME), (START, TIME), (OPEN, pa.int64()), *totals.schema])
        self.variable = WindowTotals({SLOT: pa.int64()}, value, due_plus_us=1, totals=self)

    def check_edit(self, puts: pa.Table) -> None:
        for column in (START, DUE):
            check_not_null(puts, column, "and a session has both times")
        wrong = read_times(puts.column(START)) >= read_times(puts.column(DUE))
        if wrong.any():
            raise UsageError(f"{START} is not before {DUE} in {int(wrong.sum())} rows", advice="correct them")
        self._totals.check(puts)

    def edit(self, access: TotalsAccess, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        """Put and delete sessions by their slots, and number those of each key anew.

        Raises:
            UsageError: sessions of a key would overlap.
        """
        keys, owner = access.owners(changes, key_groups)
        known, count, heads = self._read(keys, access)
        gone, put = split_changes(changes)
        slot = fixed_values(one_array(changes.column(SLOT)))
        held = explode(np.zeros(len(keys), np.int64), count - 1)[1]
        _, pair = distinct_pairs(np.append(known.owner, owner), np.append(held, slot))
        before, named = pair[: len(held)], pair[len(held) :]
        absent, kept = ~np.isin(named, before), known.choose(np.flatnonzero(~np.isin(before, named)))
        values = changes.take(pa.array(put))
        start, end = read_times(values.column(START)), read_times(values.column(DUE))
        columns = zip(kept.columns, self._totals.of_state(values), strict=True)
        together = [pa.concat_arrays([one, other]) for one, other in columns]
        times = np.append(kept.start, start), np.append(kept.end, end)
        every = _Open(np.append(kept.owner, owner[put]), *times, together)
        every = every.choose(stable_order(every.owner, every.start))
        overlap = (every.owner[1:] == every.owner[:-1]) & (every.start[1:] <= every.end[:-1])
        if overlap.any():
            found = np.isin(np.arange(len(keys)), every.owner[1:][overlap])
            raise UsageError(
                f"sessions of {keys.describe(found)} would overlap", advice="put one session in place of those"
            )
        self._write(keys, heads, every, count, access)
        return Edited(len(put), int(absent[put].sum()), int((~absent[gone]).sum()), int(absent[gone].sum()))

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        return self._session.find_late(at, before_us)

    def process(self, rows: Rows, state: State, access: TotalsAccess, *, updates: bool) -> pa.Table | None:
        assert not updates, "the operator refuses it"
        keys = rows.keys
        known, count, heads = self._read(keys, access)
        begin = self._session.begins(read_times(rows.table.column(self.on)))
        owner = np.concatenate([known.owner, rows.key_index])
        start = np.concatenate([known.start, begin])
        end = np.concatenate([known.end, begin + self._session.gap_us])
        session = merge_sessions(owner, start, end)
        size = int(session.max()) + 1
        old = len(known.owner)
        reduced = self._merge(rows, known.columns, session[:old], session[old:], size)
        least, most = np.full(size, np.iinfo(np.int64).max), np.full(size, np.iinfo(np.int64).min)
        np.minimum.at(least, session, start)
        np.maximum.at(most, session, end)
        owners = np.empty(size, np.int64)
        owners[session] = owner
        self._write(keys, heads, _Open(owners, least, most, reduced), count, access)
        return None

    def close(self, take: Take, state: State, access: TotalsAccess, *, closes: bool) -> Iterator[pa.Table]:
        while len((due := take(self._limit(ROWS_A_BATCH))).at):
            # All sessions of these keys that are over are closed at once, so none is taken twice.
            keys, owner = access.owners(due.keys.columns, due.keys.key_groups)
            known, count, heads = self._read(keys, access)
            watermark = state.clock.watermark_us
            over = known.end < (0 if watermark is None else watermark)
            access.remove(due.keys)
            further = np.flatnonzero(count > np.bincount(owner, minlength=len(keys)))
            if len(further):
                kept = known.choose(np.flatnonzero(~over & np.isin(known.owner, further)))
                kept = _Open(np.searchsorted(further, kept.owner), kept.start, kept.end, kept.columns)
                self._write(keys.take(further), heads.take(further), kept, count[further], access)
            done = known.choose(np.flatnonzero(over))
            own = keys.columns.take(pa.array(done.owner))
            yield self._make_rows(own, done.start, done.end, done.columns, closes=True)

    def _read(self, keys: Keys, access: TotalsAccess) -> tuple[_Open, np.ndarray, Keys]:
        """Return the open sessions of keys, how many each key has (int64[n]), and the primary keys of slot 0."""
        every = np.arange(len(keys))
        heads = access.address(keys, every, np.zeros(len(keys), np.int64))
        first = access.read(heads)
        count = np.where(first.found, fixed_values(one_array(first.values.column(OPEN))), 0)
        there = np.flatnonzero(first.found)
        owner, values = every[there], first.values.take(pa.array(there))
        if (count > 1).any():
            row, slot = explode(np.ones(len(keys), np.int64), count - 1)
            further = access.read(access.address(keys, row, slot)).values
            owner = np.concatenate([owner, row])
            order = stable_order(owner)
            owner, values = owner[order], pa.concat_tables([values, further]).take(pa.array(order))
        times = read_times(values.column(START)), read_times(values.column(DUE))
        return _Open(owner, *times, self._totals.of_state(values)), count, heads

    def _write(self, keys: Keys, heads: Keys, sessions: _Open, before: np.ndarray, access: TotalsAccess) -> None:
        """Write the sessions of keys that had `before` each. `heads` are the primary keys of slot 0."""
        now = np.bincount(sessions.owner, minlength=len(keys))
        owner, slot = explode(np.zeros(len(keys), np.int64), now - 1)
        number = pa.array(np.where(slot == 0, now[owner], 0))
        columns = [pa.array(sessions.end, TIME), pa.array(sessions.start, TIME), number, *sessions.columns]
        first, rest = np.flatnonzero(slot == 0), np.flatnonzero(slot > 0)
        for entries, which in (
            (_choose(heads, owner[first]), first),
            (access.address(keys, owner[rest], slot[rest]), rest),
        ):
            if len(which):
                access.write(entries, [column.take(pa.array(which)) for column in columns])
        access.remove(_choose(heads, np.flatnonzero((now == 0) & (before > 0))))
        access.remove(access.address(keys, *explode(np.maximum(now, 1), before - 1)))


def _choose(keys: Keys, which: np.ndarray) -> Keys:
    """Return some of the keys, in order; if all, as they are, so that what is known of them is not read again."""
    return keys if len(which) == len(keys) else keys.take(which)
