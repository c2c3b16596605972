"""Run a step of operators as Spark jobs: hash in the JVM, one shuffle per operator, one Arrow task per subtask."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import SiltstoneError, StateError
from siltstone.operator import Operator
from siltstone.run.callbacks import drains
from siltstone.run.fusing import fuse, run_fused
from siltstone.run.inputs import HASH, TO
from siltstone.run.processing import ACKNOWLEDGEMENT, join_batches, outputs_of, result_schema
from siltstone.run.roll_forward import is_logged
from siltstone.run.subtask import report_failure, run_subtask, run_subtask_again
from siltstone.run.task import StepTask
from siltstone.spark.executor import freeze_imports, map_in_arrow
from siltstone.spark.inputs import columns_read, keyed_inputs, keyed_rows, rows_of_source, schemas_of
from siltstone.spark.jobs import tag_jobs
from siltstone.spark.masters import is_local
from siltstone.spark.placement import Placement, shuffle
from siltstone.spark.types import quote
from siltstone.spark.versions import spark_schema
from siltstone.spark.worker_files import on_this_worker
from siltstone.state.columns import fixed_values, null_mask

JOB_TAGS = "spark.job.tags"
"""Spark's local property with the tags of a task's job"""
LARGE_TYPES = "spark.sql.execution.arrow.useLargeVarTypes"
QUERY_SETTINGS = {
    # Adaptive execution would run an empty micro-batch without tasks, and coalesce those of a small one.
    "spark.sql.adaptive.enabled": "false",
    # The steps of several operators are a union. Spark would run steps with equal keys one after the other in one task.
    "spark.sql.unionOutputPartitioning": "false",
}
"""settings for the steps of a query, whose session is a clone of its own"""
# Both are parts of SQL text, and have no quotes.
LOST_OUTPUT = "the output of an operator was lost and computed again"
_DIFFERS = "the step produced different rows, or a different state, than when it first ran"


@dataclass(frozen=True)
class StepRun:
    """The acknowledgements and outputs of a step's operators.

    Attributes:
        received: operator -> the acknowledgements of its subtasks.
        batch: the micro-batch; None in a step without one.
        schemas: input -> its columns, of those that are known.
        outputs: output -> its rows, of an operator that has made some and that another one reads.
        cached: persisted frames to release when the outputs are no longer needed.
    """

    received: dict[str, list[Acknowledgement]] = field(default_factory=dict)
    batch: DataFrame | None = None
    schemas: dict[str, T.StructType] = field(default_factory=dict)
    outputs: dict[str, DataFrame] = field(default_factory=dict)
    cached: list[DataFrame] = field(default_factory=list)

    def unpersist(self) -> None:
        """Release the outputs."""
        for frame in reversed(self.cached):  # one that another was made from last: Spark would plan that one anew
            frame.unpersist()


def run_step(
    spark: SparkSession,
    rows: DataFrame | None,
    tasks: Mapping[str, StepTask],
    placement: Placement | None = None,
    schema: T.StructType | None = None,
) -> StepRun:
    """Run one step of every operator.

    Operators whose input is at hand run side by side in one Spark job, those that are fused to them in the same tasks
    (`run.fusing`), then those that read their outputs. Operators do not wait for one that is known to return no rows.

    Args:
        spark: where `rows` is None, the session of the run's own (`own_session`).
        rows: those of a micro-batch; None for a step without rows.
        tasks: operator -> its task.
        placement: keeps each subtask on the executor that has its state; None leaves it to Spark.
        schema: that of micro-batches, if it is known, for a step without rows.

    Raises:
        SiltstoneError: the error of a subtask.
    """
    placed = _placement_frame(placement, tasks)
    silent = set[str]()
    """the inputs that give no rows"""
    if rows is None:
        made = {name for task in tasks.values() for name in task.operator.outputs}
        silent = {name for task in tasks.values() for name in task.operator.input_names} - made
        run = StepRun()
    else:
        spark, schema = rows.sparkSession, rows.schema
        _set_query_settings(spark)
        run = StepRun(batch=rows)
        if sum(bool(task.read_sources) for task in tasks.values()) > 1:
            # Each of them would read the sources by itself, and see other rows if one makes some at random.
            kept = _needed(rows, tasks).persist()
            run = StepRun(batch=kept, cached=[kept])
    _note_schemas(run, schema, tasks)
    waiting = fuse(tasks)
    if len(waiting) < len(tasks) and _carries_large_types(spark):
        waiting = dict(tasks)
    try:
        while waiting:
            ready = _take_ready(waiting, run, silent)
            _run_level(run, spark, ready, silent, placed)
    except BaseException:
        run.unpersist()
        raise
    return run


def _needed(rows: DataFrame, tasks: Mapping[str, StepTask]) -> DataFrame:
    """Select the columns of a micro-batch that operators read; one of several sources has no others."""
    readers = [task for task in tasks.values() if task.read_sources]
    if len(readers[0].sources) > 1:
        return rows
    (name,) = readers[0].sources
    read = (columns_read(rows, task.operator, task.times.get(name), name) for task in readers)
    return rows.selectExpr(*map(quote, dict.fromkeys(column for columns in read for column in columns)))


def _note_schemas(run: StepRun, schema: T.StructType | None, tasks: Mapping[str, StepTask]) -> None:
    """Note the columns of what operators with several inputs read."""
    for task in tasks.values():
        if task.operator.reads_several:
            if schema is not None and not run.schemas.keys() & set(task.sources):
                run.schemas.update(schemas_of(schema, task.sources))
            made = outputs_of(each.operator for each in tasks.values())
            read = [name for name in task.operator.input_names if name in made]
            run.schemas.update({name: spark_schema(made[name]) for name in read})


def own_session(spark: SparkSession) -> SparkSession:
    """Make a session for the steps without rows of a run: with the settings of now, as its query has one.

    If settings change later, micro-batches and other steps go on to cast alike. Over Spark Connect it is the session
    given.
    """
    if not isinstance(spark, SparkSession):
        return spark
    classic: Any = spark
    own = SparkSession(spark.sparkContext, classic._jsparkSession.cloneSession())
    _set_query_settings(own)
    return own


def _carries_large_types(spark: SparkSession) -> bool:
    """Whether Spark gives text that comes from Arrow another type (from 4.0 on)."""
    return str(spark.conf.get(LARGE_TYPES, "false")) == "true"


def _set_query_settings(spark: SparkSession) -> None:
    for name, value in QUERY_SETTINGS.items():
        spark.conf.set(name, value)


def _take_ready(waiting: dict[str, StepTask], run: StepRun, silent: set[str]) -> dict[str, StepTask]:
    """Take the tasks out of `waiting` whose inputs are at hand, and note which of them return no rows."""
    ready: dict[str, StepTask] = {}
    while found := {name: task for name, task in waiting.items() if _has_inputs(task, run, silent)}:
        for each in (each for task in found.values() for each in task.together):
            if silent.issuperset(each.operator.input_names) and not _makes_rows(each):
                silent.add(each.operator.name)
        ready |= found
        for name in found:
            del waiting[name]
    return ready


def _has_inputs(task: StepTask, run: StepRun, silent: set[str]) -> bool:
    """Whether all inputs of an operator are at hand, or known to give no rows."""
    return all(n in silent or n in run.outputs or n in task.sources for n in task.operator.input_names)


def _makes_rows(task: StepTask) -> bool:
    """Whether the operator may return rows in a step that brings it none."""
    return drains(task) or (task.clock is not None and bool(task.operator.clocks) and bool(task.operator.outputs))


def _run_level(
    run: StepRun, spark: SparkSession, tasks: Mapping[str, StepTask], silent: set[str], placed: DataFrame | None
) -> None:
    """Run the step of operators whose inputs are at hand in one job, and add what they answered and put out."""

    def frame(task: StepTask, *, empty: bool) -> DataFrame:
        """Make the frame of a step. It is persisted if another operator reads it: its tasks must not run twice, for the
        acknowledgements and for that operator."""
        rows = None if empty else _input_rows(run, spark, task)
        made = empty_step_frame(spark, task, placed) if rows is None else step_frame(rows, task, placed)
        if task.last.hands_on and not silent.issuperset(task.last.operator.outputs):
            run.cached.append(made.persist())
        return made

    frames = {name: frame(task, empty=silent.issuperset(task.operator.input_names)) for name, task in tasks.items()}
    received = collect_acknowledgements(frames, tasks)
    if left_out := [name for name in tasks if not received[name]]:
        # Spark's optimizer saw that there are no rows, and left the tasks out.
        empty = {name: frame(tasks[name], empty=True) for name in left_out}
        frames |= empty
        received |= collect_acknowledgements(empty, tasks)
    for name, task in tasks.items():
        told = {each.operator.name: _check_complete(received[each.operator.name], each) for each in task.together}
        run.received.update(told)
        last = task.last.operator
        if any(each.rows_out for each in told[last.name]):
            if task.last.hands_on:
                every = [each for some in told.values() for each in some]
                run.outputs.update({out: output_rows(frames[name], every, last, out) for out in last.outputs})
        else:
            silent.update(last.outputs)


def _input_rows(run: StepRun, spark: SparkSession, task: StepTask) -> DataFrame:
    """Return what an operator reads: of several inputs, together."""
    if task.operator.reads_several:
        return keyed_inputs(run.batch, run.outputs, run.schemas, task)
    (name,) = task.operator.input_names
    if name not in task.sources:
        return run.outputs[name]
    assert run.batch is not None, "a source gives rows"
    return rows_of_source(run.batch, name, task.sources)


def _placement_frame(placement: Placement | None, tasks: Mapping[str, StepTask]) -> DataFrame | None:
    """Return the placement's frame for one step. A subtask may move if the newest checkpoint and the log hold all its
    state."""
    if placement is None or not tasks:
        return None
    (parallelism,) = {task.parallelism for task in tasks.values()}
    return placement.frame(parallelism, movable=all(map(_may_move, tasks.values())))


def _may_move(task: StepTask) -> bool:
    return task.base_step == task.begins_after and is_logged(task, task.restore.step)


def step_frame(rows: DataFrame, task: StepTask, placed: DataFrame | None = None) -> DataFrame:
    """Make the frame of one step: its rows are one acknowledgement per subtask, and the output if others read it.

    Args:
        rows: those of its only input, or the result of `keyed_inputs`.
        placed: the frame of a placement, which decides on which executors the tasks run; None leaves it to Spark.

    Raises:
        UsageError: `rows` lacks a column that the operator reads.
    """
    keyed = rows if task.operator.reads_several else keyed_rows(rows, task)
    return frame_of_keyed(keyed, task, placed, sent=bool(task.operator.broadcasts))


def frame_of_keyed(
    keyed: DataFrame, task: StepTask, placed: DataFrame | None = None, *, sent: bool = False
) -> DataFrame:
    """Make the frame of one step of rows that have the key's columns, of the declared types, and its hash.

    Args:
        sent: whether the column `TO` says to which subtasks rows go, unless it is null.
    """
    group = f"pmod({HASH}, {task.max_parallelism}L)"
    subtask = f"cast(({group} * {task.parallelism}L) div {task.max_parallelism}L as int)"
    subtask = f"coalesce({TO}, {subtask})" if sent else subtask
    shuffled = shuffle(keyed, task.parallelism, subtask, placed)
    if task.operator.order_by and (order := _order_of(task.operator, shuffled.columns)):
        shuffled = shuffled.sortWithinPartitions(*order)
    return map_in_arrow(shuffled, _in_partition(task, keyed.sparkSession), spark_schema(result_schema(task)))


def _order_of(operator: Operator, columns: Sequence[str]) -> list[str]:
    """Quote the columns by which rows are sorted: one of several inputs is `INPUT.COLUMN`. An input without rows may
    have none."""
    parts = [
        name.split(".", 1) if operator.reads_several and name not in operator.key.names else [name]
        for name in operator.order_by
    ]
    return [".".join(map(quote, each)) for each in parts if not operator.reads_several or each[0] in columns]


def empty_step_frame(spark: SparkSession, task: StepTask, placed: DataFrame | None = None) -> DataFrame:
    """Make the frame of a step without rows: one empty task per subtask; `placed` as in `step_frame`.

    It is of the session given, also where it is placed: frames that are made of it have that session's settings.
    """
    in_partition = _in_partition(task, spark)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass  # Spark does not reuse a worker that stops before the end of its input
        yield from in_partition(iter(()))

    subtasks = spark.range(0, task.parallelism, 1, task.parallelism)
    if placed is not None:
        subtasks = shuffle(subtasks, task.parallelism, "cast(id as int)", placed)
    return subtasks.mapInArrow(run, spark_schema(result_schema(task)))


def acknowledgements(
    frames: Mapping[str, DataFrame], tasks: Mapping[str, StepTask]
) -> dict[str, list[Acknowledgement]]:
    """Run the steps of some operators as one job; return, by operator, the acknowledgements of its subtasks.

    Args:
        frames: operator -> the frame of its step.

    Raises:
        SiltstoneError: the error of a subtask.
        StateError: a subtask did not answer.
    """
    return {
        name: _check_complete(received, tasks[name])
        for name, received in collect_acknowledgements(frames, tasks).items()
    }


def collect_acknowledgements(
    frames: Mapping[str, DataFrame], tasks: Mapping[str, StepTask]
) -> dict[str, list[Acknowledgement]]:
    """Run the steps of some operators as one job; return the acknowledgements that came, which may not be all."""
    together = [each for name in frames for each in tasks[name].together]
    received: dict[str, list[Acknowledgement]] = {each.operator.name: [] for each in together}
    if not frames:
        return received
    job = frame_of_job(frames, tasks)
    with tag_jobs(job.sparkSession, [_tag(each) for each in together]):
        rows = job.collect()
    for row in rows:
        acknowledgement = Acknowledgement.from_bytes(bytes(row[0]))
        acknowledgement.raise_failure()
        received[acknowledgement.operator].append(acknowledgement)
    return received


def frame_of_job(frames: Mapping[str, DataFrame], tasks: Mapping[str, StepTask]) -> DataFrame:
    """Make the frame of the acknowledgements of some steps: their partitions follow each other, one per subtask."""
    with_rows = [name for name in frames if tasks[name].last.hands_on]
    parts = [frame.select(ACKNOWLEDGEMENT) if name in with_rows else frame for name, frame in frames.items()]
    together = reduce(lambda one, other: one.union(other), parts)
    return together.where(f"{ACKNOWLEDGEMENT} IS NOT NULL") if with_rows else together


def _check_complete(received: list[Acknowledgement], task: StepTask) -> list[Acknowledgement]:
    answers = Counter(a.subtask for a in received)
    if missing := sorted(set(range(task.parallelism)) - answers.keys()):
        raise StateError(f"operator {task.operator.name}: no answer of subtasks {missing} in step {task.step}")
    if repeated := sorted(subtask for subtask, count in answers.items() if count > 1):
        raise StateError(
            f"operator {task.operator.name}: Spark ran subtasks {repeated} of step {task.step} in several tasks",
            advice="report it with the query's plan (rows.explain())",
        )
    return received


def output_rows(
    frame: DataFrame, received: Sequence[Acknowledgement], operator: Operator, output: str | None = None
) -> DataFrame:
    """Select an output of an operator, by default its own, after its acknowledgements were `received`.

    If Spark loses a partition and computes it again, a job that reads the output fails unless the result is the one
    that was acknowledged.
    """
    said = f"cast({ACKNOWLEDGEMENT} as string)"
    receipts = ", ".join(f"'{a.receipt}'" for a in received)
    reason = f"coalesce(get_json_object({said}, '$.error[1]'), '{_DIFFERS}')"
    failed = f"cast(raise_error(concat('{LOST_OUTPUT}: ', {reason})) as boolean)"
    sides = [name for name in operator.outputs if name != operator.name]
    told = f"{quote(output)} is not null" if output in sides else " and ".join(f"{quote(n)} is null" for n in sides)
    # In one condition: by one on a column alone, Spark would pass over a cached batch, with the error that it holds.
    rows = frame.where(
        f"case when {ACKNOWLEDGEMENT} is null then {told or 'true'} "
        f"when get_json_object({said}, '$.receipt') in ({receipts}) then false else {failed} end"
    )
    return rows.selectExpr(f"{quote(output)}.*") if output in sides else rows.drop(ACKNOWLEDGEMENT, *sides)


def _in_partition(
    task: StepTask, spark: SparkSession
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    here = isinstance(spark, SparkSession) and is_local(spark.sparkContext.master)
    zone = "" if task.fused is None else str(spark.conf.get("spark.sql.session.timeZone"))
    task, *behind = (replace(each, fused=None) for each in task.together)
    # Pickled by themselves, as tasks of several jobs are, operators share no object that one of them might change.
    pickled = [cloudpickle.dumps(each) for each in behind]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        # A job has the partitions of one or more operators, one operator after the other.
        subtask = context.partitionId() % task.parallelism
        tasks = [task, *map(cloudpickle.loads, pickled)]
        try:
            placed = tasks if here else [on_this_worker(each, subtask) for each in tasks]
        except SiltstoneError as error:
            yield report_failure(tasks[-1], subtask, error)
            return
        rows = check_rows(task, subtask, join_batches(batches))
        attempt = str(context.taskAttemptId())

        def run_one(own: StepTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            if _tag(own) in (context.getLocalProperty(JOB_TAGS) or ""):
                return run_subtask(own, subtask, attempt, batches)
            return run_subtask_again(own, subtask, batches)  # a later job computes a lost partition again

        yield from run_fused(placed, subtask, rows, zone, run_one)
        freeze_imports()

    return run


def check_rows(task: StepTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that rows are those of the subtask: Spark numbers its tasks, and knows of no subtasks.

    Raises:
        StateError: they are not.
    """
    for batch in batches:
        if batch.num_rows:
            is_own = task.owns(subtask, batch.column(HASH).to_numpy().view(np.uint64))
            if TO in batch.schema.names:
                to = batch.column(TO)
                is_own = np.where(null_mask(to), is_own, fixed_values(to) == subtask)
            if not is_own.all():
                raise StateError(
                    f"operator {task.operator.name}: subtask {subtask} got rows of another one in step {task.step}"
                )
        yield batch


def _tag(task: StepTask) -> str:
    """Make the job tag by which a task knows that its job runs the step, and does not only read its output."""
    return f"[{task.warehouse.identity}/{task.stream}/{task.epoch}/{task.operator.name}/{task.step}]"
