"""Call an operator with the rows of a step, in large but bounded pieces, and check what it returns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import BadRow, UsageError
from siltstone.operator import Operator, OperatorContext, Rows, State
from siltstone.run.inputs import HASH, internal_names
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.run.users_code import users_code
from siltstone.state.access import conform
from siltstone.state.columns import find_broken, null_mask, one_array
from siltstone.state.json_rows import broken_reason, describe_broken

ACKNOWLEDGEMENT = "__acknowledgement"
_TIMES = pa.timestamp("us", tz="UTC")
_FIRST, _LAST = (pa.scalar(datetime(*day, tzinfo=UTC), _TIMES) for day in ((1, 1, 2), (9999, 12, 31)))
"""within which each time has a date in every time zone"""
ROWS_A_CALL = 1 << 18
"""most rows per call of `Operator.process`, unless one record batch has more"""


@dataclass
class Taken:
    """Counts of what an operator has processed of a step so far.

    Attributes:
        rows_in: rows it got.
        rows_out: rows it returned.
        event_time: the highest event time of the sources' rows it got; None if there were none.
        late: late rows, whatever happened to them.
        left_out: rows that it did not get, since they were late.
        due: clock -> when the next of its timers is due (`Acknowledgement.due`).
        wants_checkpoint: whether it asked for a checkpoint.
    """

    rows_in: int = 0
    rows_out: int = 0
    late: int = 0
    left_out: int = 0
    due: Mapping[str, int] | None = None
    event_time: datetime | None = None
    wants_checkpoint: bool = False


def output_schema(operator: Operator) -> pa.Schema:
    """Return the columns of an operator's output; all are nullable."""
    return pa.schema([f.with_nullable(True) for f in operator.output or ()])


def step_schema(operator: Operator) -> pa.Schema:
    """Return the schema of a step's result: the acknowledgement (binary, null on rows), then the output's columns."""
    return pa.schema([pa.field(ACKNOWLEDGEMENT, pa.binary()), *output_schema(operator)])


def find_broken_rows(operator: Operator, table: pa.Table) -> Iterator[BadRow]:
    """Find the rows with a value that is not of its column's type: an error for each such column."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if (found := find_broken(column)).any():
            what = f"operator {operator.name}: column {name}"
            reason = f"{what} {broken_reason(column.type)}"
            yield BadRow(f"{what} {describe_broken(column, found)}", rows=found, reason=reason)


def combine(operator: Operator, table: pa.Table) -> pa.Table:
    """Call an operator's `combine` with some rows; the result has the columns `combined`.

    Raises:
        SiltstoneError: the operator raised one, or its result does not fit.
        BadRow: a value is not of its column's type.
        OperatorFailed: it raised anything else.
    """
    for broken in find_broken_rows(operator, table):
        raise broken
    with users_code(operator):
        made = operator.combine(table)
        return conform(made, operator.combined, made.num_rows, f"combined rows of operator {operator.name}")


@contextmanager
def open_operator(task: StepTask, subtask: int, clock: PhaseTimer) -> Iterator[None]:
    """Call an operator's `open` before the block and `close` after it.

    `close` is called whenever `open` returned. If the block fails, its error is raised, not that of `close`.

    Raises:
        SiltstoneError, OperatorFailed: as `call`.
    """
    operator = task.operator
    context = OperatorContext(
        operator=operator.name,
        subtask=subtask,
        parallelism=task.parallelism,
        key_groups=task.groups(subtask),
        step=task.step,
        checkpoint=None if task.checkpoint is None else task.interval,
    )
    with clock.phase("process"), users_code(operator):
        operator.open(context)
    try:
        yield
    except BaseException:
        with suppress(Exception):
            operator.close()
        raise
    with clock.phase("process"), users_code(operator):
        operator.close()


def calls(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Split the rows of a step into calls; the same batches give the same calls."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if waiting and count + batch.num_rows > ROWS_A_CALL:
            yield pa.Table.from_batches(waiting)
            waiting, count = [], 0
        if batch.num_rows:
            waiting.append(batch)
            count += batch.num_rows
    if waiting:
        yield pa.Table.from_batches(waiting)


def rows_of(task: StepTask, table: pa.Table) -> Rows:
    """Make the `Rows` of one call.

    Raises:
        BadRow: a key column that is not nullable has nulls.
    """
    hashes = table.column(HASH).combine_chunks().to_numpy(zero_copy_only=False).view(np.uint64)
    internal = internal_names(task.operator)
    table = table.drop_columns([name for name in internal if name in table.column_names])
    for place, name in enumerate(table.column_names):
        if (
            task.sorts_out and task.operator.reads_several and name in task.operator.input_names
        ):  # it may have keys as they were before the cast
            own, columns = one_array(table.column(name)), [f.name for f in table.schema.field(name).type]
            kept = {each: own.field(each) for each in columns if each not in internal}
            struct = pa.StructArray.from_arrays(list(kept.values()), list(kept), mask=pa.array(null_mask(own)))
            table = table.set_column(place, name, struct)
    return Rows.make(task.operator, table, hashes, task.max_parallelism)


def call(task: StepTask, state: State, rows: Rows, taken: Taken, clock: PhaseTimer) -> list[pa.RecordBatch]:
    """Call `Operator.process` once; count its rows and return its output (`step_schema`).

    Raises:
        SiltstoneError: the operator raised one, or its output does not fit.
        OperatorFailed: it raised anything else.
    """
    with clock.phase("process"), users_code(task.operator):
        output = check_output(task.operator, task.operator.process(rows, state))
    taken.rows_in += len(rows)
    taken.rows_out += sum(batch.num_rows for batch in output)
    for name in task.times.keys() & set(task.sources):
        own = rows.of(name).table if task.operator.reads_several else rows.table
        taken.event_time = _later_time(taken.event_time, own, task.times[name].column)
    return output


def _later_time(so_far: datetime | None, table: pa.Table, column: str) -> datetime | None:
    """The higher event time. Times that Python, or a time zone, has no date for are left out."""
    if column not in table.column_names:
        return so_far
    times = table.column(column)
    # Microseconds have no room for each day, so the bounds are cast.
    first, last = _FIRST.cast(times.type), _LAST.cast(times.type)
    newest = pc.max(times)  # pyright: ignore[reportAttributeAccessIssue]
    if newest.is_valid and not first.value <= newest.value <= last.value:
        within = pc.and_(pc.greater_equal(times, first), pc.less_equal(times, last))  # pyright: ignore[reportAttributeAccessIssue]
        newest = pc.max(times.filter(within))  # pyright: ignore[reportAttributeAccessIssue]
    newest = newest.cast(_TIMES).as_py()
    return max((time for time in (so_far, newest) if time is not None), default=None)


def check_output(operator: Operator, output: pa.Table | None) -> list[pa.RecordBatch]:
    """Check what an operator has returned, and return it as batches (`step_schema`).

    Raises:
        UsageError: it does not fit the declared output.
    """
    schema = step_schema(operator)
    if output is None or not output.num_rows:
        return []
    if operator.output is None:
        raise UsageError(f"operator {operator.name} returns rows but declares no output: set its field output")
    returned = conform(output, pa.schema(list(schema)[1:]), output.num_rows, f"the output of operator {operator.name}")
    return pa.table([pa.nulls(output.num_rows, pa.binary()), *returned.columns], schema=schema).to_batches()
