"""Apply an edit of a stream's state as a new checkpoint."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from siltstone.catalog.records.edits import Edit
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.edit import COUNTS, Editable, Route, edit_task
from siltstone.errors import UsageError
from siltstone.result import Result
from siltstone.retention.leases import hold_lease, this_process
from siltstone.run.inputs import TO
from siltstone.run.task import StepTask
from siltstone.settings import Settings
from siltstone.spark.failures import explain
from siltstone.spark.inputs import hash_of
from siltstone.spark.operations.changing import check_changeable, hold_epoch_for_change
from siltstone.spark.operations.edit_rows import REFUSED, Change, EditRows, changes_frame
from siltstone.spark.operations.proving import verify
from siltstone.spark.session import needs_spark, spark_session
from siltstone.spark.state_scan import read_state
from siltstone.spark.step import StepRun, acknowledgements, frame_of_keyed, output_rows, run_step, step_frame
from siltstone.spark.types import quote, spark_type
from siltstone.state.schema import KEY_GROUP
from siltstone.stream import Stream


@dataclass(frozen=True)
class EditResult(Result):
    """What an edit changed, or, if `checkpoint` is None, would change.

    Attributes:
        upserts: rows put, of which `inserts` have a new key; `inserts` is None in a dry run.
        deletes: rows deleted, besides which `absent` rows to delete did not exist; in a dry run, those to delete, and
            `absent` is None.
        proven: whether the new checkpoint restores to the edited state; if not, `failure` says why.
    """

    stream: str
    operator: str
    variable: str
    checkpoint: int | None
    upserts: int
    inserts: int | None
    deletes: int
    absent: int | None
    source: str
    source_checksum: str | None
    digest: str | None
    proven: bool | None
    failure: str | None
    seconds: float


@needs_spark
def edit(
    settings: Settings,
    stream: Stream,
    operator: str,
    variable: str,
    rows: Path | DataFrame | Change,
    *,
    dry_run: bool = False,
) -> EditResult:
    """Check the rows in Spark tasks, and take a step that applies them (`StreamClient.edit`)."""
    start = time.perf_counter()
    edited = Editable.find(stream, operator, variable)
    given = EditRows.open(rows, edited)
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        options = check_changeable(warehouse.catalog, stream, settings.parallelism or 1)
        # At the same parallelism, working state on this machine is reused.
        last = warehouse.catalog.checkpoints.get_latest(stream.name)
        spark = spark_session(settings.master, settings.spark)
        with ExitStack() as stack:

            def plan(checkpoint: int) -> tuple[DataFrame, int, int]:
                """Make the changes, with the state of a checkpoint."""
                state = partial(_read, settings, warehouse, spark, stream.name, edited, checkpoint)
                with _lease(warehouse, given, stream.name, checkpoint), _explain(given.source):
                    made = changes_frame(spark, given, edited, stream.max_parallelism, state)
                stack.callback(made[0].unpersist)
                return made

            frame, puts, deletes = plan(last.id)
            found = EditResult(
                *(stream.name, operator, variable, None, puts, None, deletes, None, given.source, given.checksum),
                *(None, None, None, 0.0),
            )
            if not dry_run:
                chosen = settings.model_copy(
                    update={"parallelism": settings.parallelism or last.statistics["parallelism"]}
                )
                with hold_epoch_for_change(chosen, stream, warehouse, spark, options) as runner:
                    if given.of_state and runner.region.completed != last.id:  # a run has gone on meanwhile
                        frame, puts, deletes = plan(runner.region.completed)
                        found = replace(found, upserts=puts, deletes=deletes)
                    applied = _EditStep(edited, frame.drop(REFUSED), found)
                    completed = runner.change(applied.run, applied.record)
                found = replace(applied.result, checkpoint=completed.id, digest=completed.digest)
    if found.checkpoint is not None:
        proof = verify(settings, stream.name, at=str(found.checkpoint))
        failure = proof.failed[0].reason if proof.failed else None
        found = replace(found, proven=failure is None, failure=failure)
    return replace(found, seconds=round(time.perf_counter() - start, 3))


def _read(
    settings: Settings, warehouse: OpenWarehouse, spark: SparkSession, stream: str, edited: Editable, checkpoint: int
) -> DataFrame:
    """Read a variable at a checkpoint as a table; one that is new since then is empty."""
    operators = warehouse.catalog.definitions.get(stream, checkpoint)["operators"]
    if edited.name in operators.get(edited.operator.name, {}).get("variables", {}):
        of = stream, edited.operator.name, edited.name, str(checkpoint)
        return read_state(spark, settings, *of, as_of=None, columns=None)
    columns = [StructField(f.name, spark_type(f.type)) for f in edited.schema.shown_rows]
    return spark.createDataFrame([], StructType(columns))


@contextmanager
def _explain(source: str) -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        raise UsageError(f"{source} cannot be read: {explain(error)}", advice="correct it, and edit again") from error


def _lease(warehouse: OpenWarehouse, given: EditRows, stream: str, checkpoint: int) -> AbstractContextManager[None]:
    """Keep the checkpoint while its state is read."""
    return hold_lease(warehouse.catalog, stream, [checkpoint], what="edits") if given.of_state else nullcontext()


class _EditStep:
    """Runs the step that applies the rows, and reports what it did in `result`."""

    def __init__(self, edited: Editable, frame: DataFrame, planned: EditResult) -> None:
        self._edited, self._frame = edited, frame
        self.result = planned

    def run(self, spark: SparkSession, tasks: Mapping[str, StepTask]) -> StepRun:
        """Run the step: the edited operator gets the rows, the others get none."""
        name = self._edited.operator.name
        task = edit_task(tasks[name], self._edited)
        frame = self._step_frame(task).persist()
        try:
            received = acknowledgements({name: frame}, {name: task})[name]
            totals = (
                output_rows(frame, received, task.operator)
                .agg(*(F.coalesce(F.sum(c), F.lit(0)).alias(c) for c in COUNTS.names))
                .first()
            )
        finally:
            frame.unpersist()
        assert totals is not None
        self.result = replace(self.result, **totals.asDict())
        others = run_step(spark, None, {other: task for other, task in tasks.items() if other != name})
        return StepRun({**others.received, name: received})

    def _step_frame(self, task: StepTask) -> DataFrame:
        """Make the frame of the step, each row of which goes to the subtasks that it concerns."""
        match self._edited.route:
            case Route.KEY:
                return step_frame(self._frame, task)
            case Route.KEY_GROUP:
                receiver = f"cast(({KEY_GROUP} * {task.parallelism}L) div {task.max_parallelism}L as int)"
            case Route.EVERY:
                receiver = f"explode(sequence(0, {task.parallelism - 1}))"
        keys = map(quote, task.operator.key.names)
        sent = self._frame.selectExpr("*", f"{receiver} as {TO}", hash_of(keys))
        return frame_of_keyed(sent, task, sent=True)

    def record(self, _: StepRun) -> dict[str, Any]:
        """Return the edit to record with the checkpoint."""
        done = self.result
        return {
            "edit": Edit(
                operator=done.operator,
                variable=done.variable,
                upserts=done.upserts,
                deletes=done.deletes,
                source=done.source,
                source_checksum=done.source_checksum,
                who=this_process(),
            )
        }
