"""The order of one step of one subtask: reset, broadcast rows, late rows, `process`, timers, expiry, drain, prepare."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from siltstone.operator import State
from siltstone.run import callbacks
from siltstone.run.broadcasts import BroadcastRows
from siltstone.run.event_times import count_rows, find_bad_times, find_late
from siltstone.run.firing import StepTimers
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.processing import Taken, call, calls, check_output, find_broken_rows, rows_of
from siltstone.run.task import StepTask
from siltstone.run.users_code import users_code
from siltstone.state.backend import SubtaskState


def process(
    task: StepTask,
    state: SubtaskState,
    timers: StepTimers,
    shared: BroadcastRows,
    batches: Iterator[pa.RecordBatch],
    taken: Taken,
    clock: PhaseTimer,
) -> Iterator[pa.RecordBatch]:
    """Run a step, begun in `state`, call by call; yields its output (`step_schema`).

    Raises:
        BadRow: a value is not of its column's type, or an event time is null or too far ahead.
        SiltstoneError, OperatorFailed: see `call`, `rows_of` and `run.callbacks`.
    """

    def output(bound: State) -> Iterator[pa.RecordBatch]:
        for table in calls(batches, at_once=task.operator.takes_all):
            with clock.phase("process"):
                for bad in (*find_broken_rows(task.operator, table), *find_bad_times(task, table)):
                    raise bad
                rows = rows_of(task, _cut_late(task, table, taken))
            if len(rows):
                yield from call(task, bound, rows, taken, clock)

    return whole_step(task, state, timers, shared, output, taken, clock)


def _cut_late(task: StepTask, table: pa.Table, taken: Taken) -> pa.Table:
    """Count late rows, and leave them out unless they are to be processed."""
    found = find_late(task, table)
    if not found:
        return table
    late = np.logical_or.reduce([rows for rows, _ in found])
    taken.late += count_rows(task, table, late)
    if task.late == "process":
        return table
    taken.left_out += int(late.sum())
    return table.filter(pa.array(~late))


def whole_step(
    task: StepTask,
    state: SubtaskState,
    timers: StepTimers,
    shared: BroadcastRows,
    output: Callable[[State], Iterator[pa.RecordBatch]],
    taken: Taken,
    clock: PhaseTimer,
) -> Iterator[pa.RecordBatch]:
    """Run a step, begun in `state`, with what the operator does before and after its calls; yields its output.

    After a rollback of the state it may be run again: it opens the time indexes.

    Args:
        shared: the rows of broadcast inputs, which come first.
        output: makes the calls, and their output (`step_schema`).
    """
    bound = State(task.operator, timers.open(), task.clock)
    with clock.phase("process"):
        callbacks.begin(task, state, bound)
        shared.apply(bound)
    timers.begin_renewals()
    yield from output(bound)
    yield from timers.fire(bound, taken)
    with clock.phase("process"):
        drained = check_output(task.operator, callbacks.drain(task, state, bound))
    taken.rows_out += sum(batch.num_rows for batch in drained)
    taken.wants_checkpoint = bound.checkpoint_requested
    yield from drained
    with clock.phase("process"), users_code(task.operator):
        bound.flush()
        taken.due = timers.next_due()
