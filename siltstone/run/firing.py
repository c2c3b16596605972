"""What falls due in one step of one subtask: its time indexes, the calls of `Operator.on_timer`, and expiry."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.operator import Due, State
from siltstone.run.expiry import expire
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.processing import Taken, check_output
from siltstone.run.task import StepTask
from siltstone.run.users_code import users_code
from siltstone.state.access import DUE
from siltstone.state.backend import TIME_INDEXES, KeyedState, StateTable, SubtaskState
from siltstone.state.columns import read_times
from siltstone.state.ordering import stable_order
from siltstone.state.time_index import DueRows, TimedTable
from siltstone.state.ttl import UNSTAMPED_DUE, StampedTable
from siltstone.state.variables import DueColumn, Purpose

KEYS_A_CALL = 1 << 18
"""most keys per call of `Operator.on_timer`"""
ROUNDS_MAX = 1000
"""most rounds of one step: more are timers that set each other for ever"""


@dataclass(frozen=True)
class _TimedState:
    """Implements `KeyedState`: a subtask's state, with tables over those whose rows fall due or are stamped."""

    state: SubtaskState
    over: Mapping[str, TimedTable | StampedTable]

    @property
    def groups(self) -> KeyGroupRange:
        return self.state.groups

    @property
    def max_parallelism(self) -> int:
        return self.state.max_parallelism

    @property
    def tables(self) -> Mapping[str, StateTable]:
        tables: dict[str, Any] = {**self.state.tables, **self.over}
        return tables

    @property
    def opaque(self) -> Mapping[str, Mapping[int, bytes]]:
        return self.state.opaque

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        self.state.set_opaque(variable, values)


class StepTimers:
    """The timers of one subtask in one step. Call `open` after `state.begin`, and again after a rollback."""

    def __init__(self, task: StepTask, state: SubtaskState, clock: PhaseTimer) -> None:
        self._task, self._state, self._clock = task, state, clock
        self._columns = {} if task.clock is None else task.operator.due_columns()
        self._timed: dict[str, TimedTable] = {}
        self._ttls = task.operator.ttls()
        self._stamped: dict[str, StampedTable] = {}
        self._keyed: KeyedState = state

    def open(self) -> KeyedState:
        """Open the time indexes; return the state to be used in the step, which keeps them.

        The index of a table is made by a scan if there is none for the table as it is: after a restore, or an edit.
        """
        if self._columns:
            with self._clock.phase("index"):
                self._timed = {name: self._open_index(name, by) for name, by in self._columns.items()}
        now = self._task.clock
        for name, ttl in self._ttls.items():
            table: Any = self._timed.get(name) or self._state.tables[name]
            self._stamped[name] = StampedTable(table, ttl, None if now is None else ttl.stamp_of(now.upto(ttl.clock)))
        over = {**self._timed, **self._stamped}
        self._keyed = _TimedState(self._state, over) if over else self._state
        return self._keyed

    def _open_index(self, name: str, by: DueColumn) -> TimedTable:
        home, null_due = self._state.directory / TIME_INDEXES / name, None
        if by.purpose is Purpose.EXPIRY:
            null_due = UNSTAMPED_DUE
        return TimedTable.open(home, self._state.tables[name], by.column, by.plus_us, null_due)

    def begin_renewals(self) -> None:
        """Let reads renew rows from now on: those of `reset` do not, since it may not change state."""
        for table in self._stamped.values():
            table.renewing = True

    def fire(self, bound: State, taken: Taken) -> Iterator[pa.RecordBatch]:
        """Fire all that is due by the step's clock; yield what the operator returns (`step_schema`).

        Timers that are set again and again come at most `ROUNDS_MAX` times; those that are still due then fire in the
        next step, such as a timer of each minute after an outage of days.

        Raises:
            SiltstoneError, OperatorFailed: the operator's own.
            UsageError: the operator sets timers that never come to an end.
        """
        yield from self._fire_timers(bound, taken)
        for name, upto in self._upto(Purpose.ROWS).items():
            timed = self._timed[name]
            timed.begin_round()
            made = self._task.operator.on_due(name, partial(timed.take, upto), bound)
            yield from self._returned(made, taken)
        with self._clock.phase("expire"):
            for name, upto in self._upto(Purpose.EXPIRY).items():
                expire(name, self._timed[name], self._ttls[name], upto, self._keyed)

    def _returned(self, made: Iterator[pa.Table], taken: Taken) -> Iterator[pa.RecordBatch]:
        """Yield what an operator yields, checked."""
        while True:
            with self._clock.phase("process"), users_code(self._task.operator):
                part = next(made, None)
                if part is None:
                    return
                output = check_output(self._task.operator, part)
            taken.rows_out += sum(batch.num_rows for batch in output)
            yield from output

    def _upto(self, purpose: Purpose) -> dict[str, int]:
        """Return, of the tables whose rows fall due for a purpose, the time up to which they are due now."""
        clock, named = self._task.clock, {n: by.clock for n, by in self._columns.items() if by.purpose is purpose}
        return {name: upto for name, by in named.items() if clock and (upto := clock.upto(by)) is not None}

    def _fire_timers(self, bound: State, taken: Taken) -> Iterator[pa.RecordBatch]:
        in_order = bool(self._task.operator.opaque_variables())
        halfway = 0
        for number in count():
            if number in (ROUNDS_MAX // 2, ROUNDS_MAX):
                least = self._least_due()
                if number == ROUNDS_MAX and least is not None and least <= halfway:
                    raise UsageError(
                        f"operator {self._task.operator.name}: on_timer keeps setting timers that are due already, "
                        f"and no later for {ROUNDS_MAX:,} rounds of step {self._task.step}: set them to a time after "
                        "`due.at`"
                    )
                if least is None or number == ROUNDS_MAX:
                    return  # what is left is later, and due in the next step
                halfway = least
            fired = False
            for names in self._batches():
                fired = True
                for due in _calls(names, in_order=in_order):
                    yield from self._call(due, bound, taken)
            if not fired:
                return

    def _least_due(self) -> int | None:
        """Return when the first timer is due that is due by the step's clock; None if none is."""
        upto = self._upto(Purpose.TIMER)
        due = {name: self._timed[name].next_due() for name in upto}
        return min((at for name, at in due.items() if at is not None and at <= upto[name]), default=None)

    def _batches(self) -> Iterator[dict[str, DueRows]]:
        """Yield the timers of a round that are due, by variable, in bounded batches in the order of (time, hash)."""
        waiting, left = dict[str, DueRows](), self._upto(Purpose.TIMER)
        for name in left:
            self._timed[name].begin_round()
        while True:
            for name in [name for name in left if name not in waiting]:
                taken = self._timed[name].take(left[name], KEYS_A_CALL)
                if not len(taken.at):
                    del left[name]
                else:
                    waiting[name] = taken
            if not waiting:
                return
            # Of a variable that may have more, nothing is known beyond the last one taken.
            ends = [(int(waiting[name].at[-1]), int(waiting[name].keys.hashes[-1])) for name in left]
            batch, waiting = _split(waiting, min(ends)) if ends else (waiting, {})
            yield batch

    def _call(self, due: Due, bound: State, taken: Taken) -> Iterator[pa.RecordBatch]:
        operator, table = self._task.operator, self._timed[due.timer]
        with self._clock.phase("process"), users_code(operator):
            if len(self._upto(Purpose.TIMER)) > 1:  # a timer of another variable may have moved it, or cleared it
                there = table.get(due.keys)
                still = there.found & (read_times(there.values.column(DUE)) == read_times(due.at))
                if not still.all():
                    kept = np.flatnonzero(still)
                    due = Due(due.timer, due.keys.take(kept), due.at.take(pa.array(kept)))
            if not len(due):
                return
            table.delete(due.keys)
            output = check_output(operator, operator.on_timer(due, bound))
        taken.rows_out += sum(batch.num_rows for batch in output)
        yield from output

    def next_due(self) -> dict[str, int] | None:
        """Return clock -> when the next row is due by it, in microseconds since 1970; None if nothing falls due."""
        if not self._timed:
            return None
        found: dict[str, int] = {}
        for name, timed in self._timed.items():
            at, by = timed.next_due(), self._columns[name].clock
            if at is not None:
                found[by] = min(at, found.get(by, at))
        return found

    def save(self) -> None:
        """Keep the indexes for the next step; call it right before the state is committed."""
        for timed in self._timed.values():
            timed.save(self._task.step, self._task.restore.step)


def _split(waiting: Mapping[str, DueRows], last: tuple[int, int]) -> tuple[dict[str, DueRows], dict[str, DueRows]]:
    """Split what is due after the (time, hash) `last`."""
    first, rest = dict[str, DueRows](), dict[str, DueRows]()
    for name, rows in waiting.items():
        at, hashes = rows.at, rows.keys.hashes
        end = int(np.count_nonzero((at < last[0]) | ((at == last[0]) & (hashes <= np.uint64(last[1])))))
        if end:
            first[name] = rows if end == len(at) else rows.take(np.arange(end))
        if end < len(at):
            rest[name] = rows.take(np.arange(end, len(at)))
    return first, rest


def _calls(batch: Mapping[str, DueRows], *, in_order: bool) -> Iterator[Due]:
    """Split a batch into calls of one variable and distinct keys, in which the timers of each key keep their order.

    Args:
        in_order: whether those of different keys do, too, since the keys of a key group share a variable; what a batch
            has depends on the other keys of the subtask.
    """
    names = sorted(batch)
    if len(names) == 1:
        yield _make_due(names[0], batch[names[0]])
        return
    at = np.concatenate([batch[name].at for name in names])
    hashes = np.concatenate([batch[name].keys.hashes for name in names])
    variable = np.repeat(np.arange(len(names)), [len(batch[name].at) for name in names])
    within = np.concatenate([np.arange(len(batch[name].at)) for name in names])
    if in_order:
        order = stable_order(at, hashes, variable)
        for run in np.split(order, np.flatnonzero(np.diff(variable[order])) + 1):
            name = names[variable[run[0]]]
            yield _make_due(name, batch[name].take(within[run]))
        return
    order = stable_order(hashes, at, variable)
    starts = np.flatnonzero(np.r_[True, hashes[order][1:] != hashes[order][:-1]])
    rank = np.empty(len(at), np.int64)
    rank[order] = np.arange(len(at)) - np.repeat(starts, np.diff(np.r_[starts, len(at)]))
    for place in range(int(rank.max()) + 1):
        for number, name in enumerate(names):
            chosen = within[(rank == place) & (variable == number)]
            if len(chosen):
                yield _make_due(name, batch[name].take(chosen))


def _make_due(name: str, rows: DueRows) -> Due:
    return Due(name, rows.keys, pa.array(rows.at, pa.timestamp("us", "UTC")))
