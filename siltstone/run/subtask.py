"""One step of one subtask: read its rows, run the operator, and log the changes or write its part of a checkpoint.

It does not depend on Spark: it reads and yields Arrow record batches. The last batch has the acknowledgement and no
row. A task may run twice; the second run starts from the same version and makes the same changes, under object names of
its own. Output for a sink is staged in the store (`run.outbox`); only output that another operator reads goes to Spark.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa

from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.uploader import uploader_of
from siltstone.errors import SiltstoneError
from siltstone.format.output import OutputWriter, Staged
from siltstone.log import get_logger
from siltstone.restore.restore import digests_of
from siltstone.run.broadcasts import BroadcastRows, digest_tables
from siltstone.run.callbacks import list_prepared
from siltstone.run.dead_letters import LETTERS, SortedOut, file_letters
from siltstone.run.event_times import HeardTimes
from siltstone.run.firing import StepTimers
from siltstone.run.persist import write_part
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.processing import Taken, acknowledgement_batch, open_operator, outputs_of, rows_of_output
from siltstone.run.read_rows import ReadRows
from siltstone.run.spilled import Spilled
from siltstone.run.staging import StagedOutput
from siltstone.run.step_order import process
from siltstone.run.task import DeadLetterOrder, StepTask
from siltstone.run.working_state import working_copy, working_state
from siltstone.state.backend import StateTable, SubtaskState
from siltstone.state.rows_digest import DigestedRows
from siltstone.store.paths import CheckpointPath
from siltstone.stream import DEAD_LETTERS

_LOG = get_logger(__name__)


def run_subtask(
    task: StepTask, subtask: int, attempt: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run one step; yield the operator's output and, last, the acknowledgement (`result_schema`).

    A `SiltstoneError` is sent in the acknowledgement, because a retry would fail again.
    """
    yield from _report_error(task, subtask, _run(task, subtask, attempt, batches, working_state))


def run_subtask_again(task: StepTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Make the output of an acknowledged step again, because Spark lost it before it was read.

    It yields what `run_subtask` does, but works on a copy of the state and stores nothing. The reader of the output
    compares the receipt of the acknowledgement with that of the accepted one.
    """
    nothing_staged = None if task.dead_letters is None else DeadLetterOrder(rows=task.dead_letters.rows)
    task = replace(task, stores=False, tracked=(), staged={}, sinks=(), dead_letters=nothing_staged)
    yield from _report_error(task, subtask, _run(task, subtask, "", batches, working_copy))


def _report_error(task: StepTask, subtask: int, run: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from run
    except SiltstoneError as error:
        yield report_failure(task, subtask, error)


def report_failure(task: StepTask, subtask: int, error: SiltstoneError) -> pa.RecordBatch:
    """Make the last batch of a subtask that has failed."""
    return _acknowledge(Acknowledgement.failure(task.operator.name, subtask, error), task)


def _run(
    task: StepTask,
    subtask: int,
    attempt: str,
    batches: Iterator[pa.RecordBatch],
    find: Callable[[StepTask, int, PhaseTimer], AbstractContextManager[SubtaskState]],
) -> Iterator[pa.RecordBatch]:
    clock, operator, staged = PhaseTimer(), task.operator, dict[str, Staged]()
    outputs = [name for name in (*operator.outputs, DEAD_LETTERS) if name in task.sinks]
    reading, made = ReadRows(operator, task.read_sources, subtask), dict.fromkeys(outputs, DigestedRows())
    heard, shared = HeardTimes(task), BroadcastRows(task, subtask)
    batches = shared.take(heard.watch(reading.watch(batches, clock), clock))
    with ExitStack() as stack:
        with clock.phase("open"):
            state = stack.enter_context(find(task, subtask, clock))
        state.begin(task.step, tracking=task.tracked)
        timers, sorted_out, staging = StepTimers(task, state, clock), None, dict[str, OutputWriter]()
        for name, table in task.staged.items():
            own = _staged(task, task.interval, name, table, name, subtask, attempt)
            staging[name] = own.write(outputs_of([operator])[name], task.upload.inline_bytes)
        with open_operator(task, subtask, clock):
            if task.sets_aside or operator.broadcasts:
                work = task.warehouse.local.state(task.stream, task.epoch, operator.name, subtask).parent
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="step-", dir=work)))
                held = Spilled(scratch / "rows.arrow", batches)
            if task.sets_aside:
                sorted_out = SortedOut(task, held, shared, clock, scratch)
                output, taken = sorted_out.run(state, timers)
            else:
                taken, batches = Taken(), iter(held) if operator.broadcasts else batches
                output = process(task, state, timers, shared, batches, taken, clock)
            for batch in output:
                name, rows = rows_of_output(operator, batch)
                if name in made:
                    with clock.phase("digest"):
                        made[name] += DigestedRows.of(rows)
                if name in staging:
                    with clock.phase("stage"):
                        staging[name].add(rows)
                if task.hands_on:
                    yield batch
        with clock.phase("stage"):
            staged |= {name: writer.finish() for name, writer in staging.items()}
            if task.dead_letters is not None:
                staged[DEAD_LETTERS] = _stage_letters(task, subtask, attempt, sorted_out)
        prepared = list_prepared(task, state)
        part = write_part(task, subtask, attempt, state, clock)
        with clock.phase("commit"):
            timers.save()
            state.commit()
        report = _report(task, subtask, state, part, taken, staged, clock)
        if task.dead_letters is not None:
            bad, files = sorted_out.count if sorted_out is not None else 0, len(_own_files(task.dead_letters, subtask))
            report = replace(report, rows_in=report.rows_in + bad, dead_letters=bad + files)
        report = replace(report, rows_in=report.rows_in + shared.rows)
        if sorted_out is not None and DEAD_LETTERS in made:
            made[DEAD_LETTERS] = sorted_out.digest()
        report = replace(report, prepared=prepared, row_bytes=reading.row_bytes)
        of_sources = {"read": reading.read, "rows_of": reading.counts, "heard": heard.heard}
        yield _acknowledge(replace(report, made=made, **of_sources), task)


def _report(
    task: StepTask,
    subtask: int,
    state: SubtaskState,
    part: Acknowledgement,
    taken: Taken,
    staged: Mapping[str, Staged],
    clock: PhaseTimer,
) -> Acknowledgement:
    """What a subtask says once its step is committed; logged as well."""
    tracking_s = sum(table.tracking_s for table in state.tables.values())
    acknowledgement = replace(
        part,
        digests=digests_of(state),
        rows_in=taken.rows_in + taken.left_out,
        rows_out=taken.rows_out,
        late=taken.late,
        due=taken.due,
        wants_checkpoint=taken.wants_checkpoint,
        event_time_max=taken.event_time,
        seconds={**clock.seconds, "track": tracking_s} if task.tracked else clock.seconds,
        broadcast=digest_tables(state),
        table_rows={name: _own_rows(task, subtask, table) for name, table in state.tables.items()},
        opaque_bytes={name: sum(map(len, values.values())) for name, values in state.opaque.items() if values},
        restored_bytes=clock.restored_bytes,
        outputs={name: each for name, each in staged.items() if each.rows},
    )
    _LOG.debug(
        "subtask done",
        stream=task.stream,
        epoch=task.epoch,
        checkpoint=task.interval,
        step=task.step,
        operator=acknowledgement.operator,
        subtask=subtask,
        rows_in=acknowledgement.rows_in,
        state_rows=acknowledgement.state_rows,
    )
    return acknowledgement


def _own_rows(task: StepTask, subtask: int, table: StateTable) -> int:
    """Return the live rows of a table; of a broadcast one a share, which sums up to all of them."""
    rows, parts = table.rows, task.parallelism
    return rows * (subtask + 1) // parts - rows * subtask // parts if table.schema.broadcast else rows


def _staged(
    task: StepTask, checkpoint: int, output: str, table: bool, name: str, subtask: int, attempt: str
) -> StagedOutput:
    path = CheckpointPath(task.stream, task.epoch, checkpoint)
    uploader = uploader_of(task.warehouse.store_url, task.upload)
    return StagedOutput(uploader, path, output, table, name, subtask, f"{attempt}-{task.step}")


def _own_files(order: DeadLetterOrder, subtask: int) -> Sequence[LoggedFile]:
    """The files that are dead letters of this subtask."""
    return order.files if subtask == 0 else ()


def _stage_letters(task: StepTask, subtask: int, attempt: str, sorted_out: SortedOut | None) -> Staged:
    order = task.dead_letters
    if order is None or order.checkpoint is None:
        return Staged()
    files, letters = _own_files(order, subtask), list[Iterator[pa.RecordBatch]]()
    if files:
        letters.append(iter([file_letters(files, order.checkpoint, task.step, order.offsets)]))
    if sorted_out is not None and sorted_out.count:
        letters.append(sorted_out.letters(order.checkpoint, order.offsets))
    if not letters:
        return Staged()
    name = f"{task.operator.name}.{DEAD_LETTERS}"
    own = _staged(task, order.checkpoint, DEAD_LETTERS, order.table, name, subtask, attempt)
    writer = own.write(LETTERS, task.upload.inline_bytes)
    for batch in chain.from_iterable(letters):
        writer.add(batch)
    return writer.finish()


def _acknowledge(acknowledgement: Acknowledgement, task: StepTask) -> pa.RecordBatch:
    return acknowledgement_batch(pa.array([acknowledgement.to_bytes()], pa.binary()), task)
