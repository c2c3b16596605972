"""Call an operator with the rows of a step, in large but bounded pieces, and check what it returns."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import BadRow, UsageError
from siltstone.operator import Operator, OperatorContext, Returned, Rows, State
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
"""rows per call of `Operator.process`; the last call has the rest"""
_JOINED_ROWS = 1 << 17
_JOINED_BYTES = 64 << 20


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
    """Return the columns of an operator's own output; all are nullable."""
    return _nullable(operator.output or ())


def outputs_of(operators: Iterable[Operator]) -> dict[str, pa.Schema]:
    """Return output -> its columns, all nullable, of all outputs of operators."""
    return {name: _nullable(columns) for operator in operators for name, columns in operator.outputs.items()}


def _nullable(columns: Iterable[pa.Field]) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in columns])


def result_schema(task: StepTask) -> pa.Schema:
    """Return the schema of what a task of a step returns: `step_schema`, or the acknowledgement alone where only sinks
    read the output, for which it is staged. Of fused tasks it is that of the last one."""
    schema = step_schema(task.last.operator)
    return schema if task.last.hands_on else pa.schema([schema.field(ACKNOWLEDGEMENT)])


def acknowledgement_batch(said: pa.Array, task: StepTask) -> pa.RecordBatch:
    """Return the row of an encoded acknowledgement among what a task returns (`result_schema`)."""
    schema = result_schema(task)
    return pa.record_batch([said, *(pa.nulls(1, field.type) for field in list(schema)[1:])], schema=schema)


def step_schema(operator: Operator) -> pa.Schema:
    """Return the schema of an operator's rows in a step, and of its acknowledgement.

    It is the acknowledgement (binary, null on rows), then the columns of the operator's own output, then a column per
    side output: a struct of its columns, which is null in the rows of others.
    """
    sides = [name for name in operator.outputs if name != operator.name]
    structs = [pa.field(name, pa.struct(list(outputs_of([operator])[name]))) for name in sides]
    return pa.schema([pa.field(ACKNOWLEDGEMENT, pa.binary()), *output_schema(operator), *structs])


def rows_of_output(operator: Operator, batch: pa.RecordBatch) -> tuple[str, pa.RecordBatch]:
    """Return which output the rows of a batch of `check_output` are of, and them."""
    for name in operator.outputs:
        if name != operator.name and batch.column(name).null_count < batch.num_rows:
            struct = batch.column(name)
            return name, pa.RecordBatch.from_arrays(struct.flatten(), schema=outputs_of([operator])[name])
    return operator.name, batch.select(output_schema(operator).names)


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


def join_batches(batches: Iterator[pa.RecordBatch], most_rows: int = _JOINED_ROWS) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches to batches of at most `most_rows` and 64 MiB; one that is larger stays as it is."""
    waiting, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > most_rows or size + batch.nbytes > _JOINED_BYTES):
            joined, waiting, rows, size = _joined(waiting), [], 0, 0
            yield from joined
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    yield from _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return batches if len(batches) < 2 else pa.Table.from_batches(batches).combine_chunks().to_batches()


def calls(batches: Iterator[pa.RecordBatch], *, at_once: bool = False) -> Iterator[pa.Table]:
    """Split the rows of a step into calls, or make one `at_once`; the same rows give the same calls, however they are
    cut into batches."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        left = batch
        while not at_once and count + left.num_rows > ROWS_A_CALL:
            fits = ROWS_A_CALL - count
            yield pa.Table.from_batches([*waiting, left.slice(0, fits)] if fits else waiting)
            waiting, count, left = [], 0, left.slice(fits)
        if left.num_rows:
            waiting.append(left)
            count += left.num_rows
    if waiting:
        yield pa.Table.from_batches(waiting)


def rows_of(task: StepTask, table: pa.Table) -> Rows:
    """Make the `Rows` of one call.

    Raises:
        BadRow: a key column that is not nullable has nulls.
    """
    hashes = table.column(HASH).combine_chunks().to_numpy(zero_copy_only=False).view(np.uint64)
    internal = [*internal_names(task.operator), *task.operator.broadcast_inputs]
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
    if column not in table.column_names or not table.num_rows:  # of an input without rows no type may be known
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


def check_output(operator: Operator, returned: Returned) -> list[pa.RecordBatch]:
    """Check what an operator has returned, and return it as batches (`step_schema`), each of one output.

    Raises:
        UsageError: it does not fit the declared outputs.
    """
    if not isinstance(returned, Mapping):
        return _check_rows(operator, operator.name, returned)
    names = {operator.name: operator.name} | {each: operator.side_name(each) for each in operator.side_outputs}
    if unknown := sorted(returned.keys() - names.keys()):
        raise UsageError(
            f"operator {operator.name} returns rows of an output {unknown[0]!r}, and declares {', '.join(names)}: "
            "declare it in side_outputs"
        )
    return [batch for each in names if each in returned for batch in _check_rows(operator, names[each], returned[each])]


def _check_rows(operator: Operator, name: str, output: pa.Table | None) -> list[pa.RecordBatch]:
    schema, declared = step_schema(operator), outputs_of([operator])
    if output is None or not output.num_rows:
        return []
    if name not in declared:
        raise UsageError(f"operator {operator.name} returns rows but declares no output: set its field output")
    rows, what = output.num_rows, "operator" if name == operator.name else f"its side output {name}: operator"
    returned = conform(output, declared[name], rows, f"the output of {what} {operator.name}")
    columns = {field.name: pa.nulls(rows, field.type) for field in schema}
    if name == operator.name:
        columns |= dict(zip(returned.column_names, returned.columns, strict=True))
    else:
        columns[name] = returned.to_struct_array()
    made = pa.table(list(columns.values()), schema=schema)
    return [batch for batch in made.to_batches() if batch.num_rows]  # of an empty chunk, Arrow makes a batch
