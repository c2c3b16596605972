"""One step of one subtask: read its rows, run the operator, log the changes, and checkpoint if the step ends in one.

It runs where Spark puts it and knows nothing of Spark: Arrow record batches in, Arrow record batches out. The last
batch carries an acknowledgement and no row. A task may run twice; the second run starts from the same version and
yields the same changes, under object names of its own. Output for a sink is staged in the store (`lifecycle.outbox`);
only what another operator reads goes to Spark.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.output import OutputWriter, Staged
from siltstone.errors import SiltstoneError, UsageError
from siltstone.lifecycle.clock import Clock
from siltstone.lifecycle.outbox import task_output
from siltstone.lifecycle.persist import Part, write_part
from siltstone.lifecycle.restore import digests_of
from siltstone.lifecycle.task import StepTask
from siltstone.lifecycle.working_state import working_copy, working_state
from siltstone.operator import Operator, Rows, State
from siltstone.state.backend import SubtaskState
from siltstone.store.paths import CheckpointPath

ACKNOWLEDGEMENT = "__acknowledgement"
HASH = "__hash"
ROWS_A_CALL = 1 << 18
"""how many rows `Operator.process` is given at most, unless one record batch holds more"""


class OperatorFailed(Exception):
    """The user's code raised. Not one of our own errors: it may be worth another attempt, which Spark decides."""


@contextmanager
def _users_code(operator: Operator) -> Iterator[None]:
    """Say which operator failed, with what, and where in the user's file."""
    try:
        yield
    except SiltstoneError:
        raise
    except Exception as error:
        file = inspect.getsourcefile(type(operator))
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([f for f in frames if f.filename == file] or frames)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        said = (str(error).strip() or "no message").splitlines()[0]
        raise OperatorFailed(f"operator {operator.name}: {type(error).__name__}: {said} ({where})") from error


def run_subtask(
    task: StepTask, subtask: int, attempt: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run one step; yields the operator's output and, last, the acknowledgement (see `output_schema`).

    An error of Siltstone's own tree travels in the acknowledgement: trying again would not mend it.
    """
    yield from _answered(task, subtask, _run(task, subtask, attempt, batches, working_state))


def run_subtask_again(task: StepTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Make the output of a step once more that was acknowledged already, since it was lost before it was read.

    It yields what `run_subtask` does, but works on a copy of the state and stores nothing: what was acknowledged
    stands. Whoever reads the output compares the receipt of the acknowledgement with that of the accepted one.
    """
    yield from _answered(
        task, subtask, _run(replace(task, checkpoint=None, staged_with=None), subtask, "", batches, working_copy)
    )


def _answered(task: StepTask, subtask: int, run: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from run
    except SiltstoneError as error:
        yield _acknowledge(Acknowledgement.failure(task.operator.name, subtask, error), output_schema(task))


def output_schema(task: StepTask) -> pa.Schema:
    """The acknowledgement column (binary, null on rows), then the operator's output columns, if any."""
    columns = list(task.operator.output or [])
    return pa.schema([pa.field(ACKNOWLEDGEMENT, pa.binary()), *(f.with_nullable(True) for f in columns)])


def _run(
    task: StepTask,
    subtask: int,
    attempt: str,
    batches: Iterator[pa.RecordBatch],
    find: Callable[[StepTask, int, Clock], AbstractContextManager[SubtaskState]],
) -> Iterator[pa.RecordBatch]:
    clock, schema = Clock(), output_schema(task)
    with clock.phase("open"):
        opened = find(task, subtask, clock)
        state = opened.__enter__()
    try:
        state.begin(task.step, tracking=task.tracking)
        bound = State(task.operator, state)
        rows_in, rows_out, event_time = 0, 0, None
        staging = _staging(task, subtask, attempt)
        for table in _calls(batches):
            with clock.phase("process"), _users_code(task.operator):
                rows = _rows(task, table)
                output = _output(task.operator, task.operator.process(rows, bound), schema)
            rows_in += table.num_rows
            rows_out += sum(batch.num_rows for batch in output)
            event_time = _later(event_time, rows.table, task.event_time)
            if staging is not None:
                with clock.phase("stage"):
                    for batch in output:
                        staging.add(batch.drop_columns([ACKNOWLEDGEMENT]))
            if task.hands_on:
                yield from output
        with clock.phase("process"), _users_code(task.operator):
            bound.flush()
        part = Part()
        if task.checkpoint is not None:
            part = write_part(task, task.checkpoint, subtask, attempt, state, clock)
        staged = Staged()
        if staging is not None:
            with clock.phase("stage"):
                staged = staging.finish()
        with clock.phase("commit"):
            state.commit()
        acknowledgement = Acknowledgement(
            operator=task.operator.name,
            subtask=subtask,
            key_groups=state.groups,
            handles=part.handles,
            objects=part.objects,
            inline=part.inline,
            uploads={} if part.uploads is None else part.uploads.to_json(),
            digests=digests_of(state),
            rows_in=rows_in,
            rows_out=rows_out,
            event_time_max=event_time,
            seconds=clock.seconds,
            state_rows=sum(table.rows for table in state.tables.values()),
            tracked_bytes=part.tracked_bytes,
            restored_bytes=clock.restored_bytes,
            outputs={task.operator.name: staged} if staged.rows else {},
        )
        yield _acknowledge(acknowledgement, schema)
    finally:
        opened.__exit__(None, None, None)


def _staging(task: StepTask, subtask: int, attempt: str) -> OutputWriter | None:
    if task.staged_with is None:
        return None
    path = CheckpointPath(task.stream, task.epoch, task.staged_with)
    inline_bytes = task.upload.inline_bytes
    return task_output(task.warehouse.store, path, task.operator, subtask, f"{attempt}-{task.step}", inline_bytes)


def _calls(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in pieces that are worth a call and yet bounded."""
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


def _rows(task: StepTask, table: pa.Table) -> Rows:
    hashes = table.column(HASH).combine_chunks().to_numpy(zero_copy_only=False).view(np.uint64)
    return Rows.of(task.operator, table.drop_columns([HASH]), hashes, task.max_parallelism)


def _later(so_far: datetime | None, table: pa.Table, column: str | None) -> datetime | None:
    """The higher event time."""
    if column is None or column not in table.column_names:
        return so_far
    newest = pc.max(table.column(column).cast(pa.timestamp("us", tz="UTC"))).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    return max((time for time in (so_far, newest) if time is not None), default=None)


def _output(operator: Operator, output: pa.Table | None, schema: pa.Schema) -> list[pa.RecordBatch]:
    if output is None or not output.num_rows:
        return []
    if operator.output is None:
        raise UsageError(f"operator {operator.name} returns rows but declares no output: set its field output")
    columns = [pa.nulls(output.num_rows, pa.binary()), *(output.column(f.name).cast(f.type) for f in list(schema)[1:])]
    return pa.table(columns, schema=schema).to_batches()


def _acknowledge(acknowledgement: Acknowledgement, schema: pa.Schema) -> pa.RecordBatch:
    nulls = [pa.nulls(1, f.type) for f in list(schema)[1:]]
    return pa.record_batch([pa.array([acknowledgement.to_bytes()], pa.binary()), *nulls], schema=schema)
