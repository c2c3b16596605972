"""Run a step of operators as Spark jobs: hash in the JVM, one shuffle per operator, one Arrow task per subtask."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import SiltstoneError, StateError, UsageError
from siltstone.operator import SOURCE, Operator
from siltstone.run.callbacks import drains
from siltstone.run.processing import (
    ACKNOWLEDGEMENT,
    HASH,
    READ,
    check_columns,
    internal_names,
    list_columns,
    original_column,
    step_schema,
)
from siltstone.run.read_rows import combine_all, combined_schema
from siltstone.run.roll_forward import is_logged
from siltstone.run.subtask import run_subtask, run_subtask_again
from siltstone.run.task import StepTask
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.executor import freeze_imports, map_in_arrow
from siltstone.spark.jobs import tag_jobs
from siltstone.spark.key_casts import check_key_types, needs_no_cast, select_key
from siltstone.spark.masters import is_local
from siltstone.spark.placement import PLACED, Placement, shuffle
from siltstone.spark.types import is_for_python, quote, spark_type
from siltstone.spark.versions import spark_schema
from siltstone.spark.worker_files import on_this_worker
from siltstone.state.hashing import key_groups
from siltstone.time.event_time import RowTimes

JOB_TAGS = "spark.job.tags"
"""Spark's local property with the tags of a task's job"""
QUERY_SETTINGS = {
    # Adaptive execution would run an empty micro-batch without tasks, and coalesce those of a small one.
    "spark.sql.adaptive.enabled": "false",
    # The steps of several operators are a union. Spark would run steps with equal keys one after the other in one task.
    "spark.sql.unionOutputPartitioning": "false",
}
"""settings for the steps of a query, whose session is a clone of its own"""
CASE = "spark.sql.caseSensitive"
LOST_OUTPUT = "an operator's output was lost and computed again"
_DIFFERS = "the step produced different rows, or a different state, than when it first ran"


@dataclass(frozen=True)
class StepRun:
    """The acknowledgements and outputs of a step's operators.

    Attributes:
        received: operator -> the acknowledgements of its subtasks.
        outputs: operator -> its output, if it has rows and another operator reads it; `SOURCE` -> the micro-batch.
        cached: persisted frames to release when the outputs are no longer needed.
    """

    received: dict[str, list[Acknowledgement]] = field(default_factory=dict)
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
) -> StepRun:
    """Run one step of every operator.

    Operators whose input is at hand run side by side in one Spark job, then those that read their outputs. Operators do
    not wait for one that is known to return no rows.

    Args:
        spark: where `rows` is None, the session of the run's own (`own_session`).
        rows: those of a micro-batch; None for a step without rows.
        tasks: operator -> its task.
        placement: keeps each subtask on the executor that has its state; None leaves it to Spark.

    Raises:
        SiltstoneError: the error of a subtask.
    """
    run, placed = StepRun(), _placement_frame(placement, tasks)
    silent = set[str]()
    """those that return no rows, the source included"""
    if rows is None:
        silent = {task.operator.reads for task in tasks.values()} - tasks.keys()
    else:
        spark = rows.sparkSession
        _set_query_settings(spark)
        readers = [task for task in tasks.values() if task.operator.reads == SOURCE]
        if len(readers) > 1:
            # Each of them would read the source by itself, and see other rows if that makes some at random.
            needed = dict.fromkeys(name for task in readers for name in columns_read(rows, task.operator, task.times))
            rows = rows.selectExpr(*map(quote, needed)).persist()
            run.cached.append(rows)
        run.outputs[SOURCE] = rows
    waiting = dict(tasks)
    try:
        while waiting:
            ready = _take_ready(waiting, run.outputs, silent)
            _run_level(run, spark, ready, silent, placed)
    except BaseException:
        run.unpersist()
        raise
    return run


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


def _set_query_settings(spark: SparkSession) -> None:
    for name, value in QUERY_SETTINGS.items():
        spark.conf.set(name, value)


def _take_ready(
    waiting: dict[str, StepTask], outputs: Mapping[str, DataFrame], silent: set[str]
) -> dict[str, StepTask]:
    """Take the tasks out of `waiting` whose input is at hand, and note which of them return no rows."""
    ready: dict[str, StepTask] = {}
    while found := {n: t for n, t in waiting.items() if t.operator.reads in silent or t.operator.reads in outputs}:
        silent |= {name for name, task in found.items() if task.operator.reads in silent and not _makes_rows(task)}
        ready |= found
        for name in found:
            del waiting[name]
    return ready


def _makes_rows(task: StepTask) -> bool:
    """Whether the operator may return rows in a step that brings it none."""
    return drains(task) or (task.clock is not None and bool(task.operator.clocks) and task.operator.output is not None)


def _run_level(
    run: StepRun, spark: SparkSession, tasks: Mapping[str, StepTask], silent: set[str], placed: DataFrame | None
) -> None:
    """Run the step of operators whose inputs are at hand in one job, and add what they answered and put out."""

    def frame(task: StepTask, *, empty: bool) -> DataFrame:
        """Make the frame of a step. It is persisted if another operator reads it: its tasks must not run twice, for the
        acknowledgements and for that operator."""
        rows = None if empty else run.outputs[task.operator.reads]
        made = empty_step_frame(spark, task, placed) if rows is None else step_frame(rows, task, placed)
        if task.hands_on and task.operator.name not in silent:
            run.cached.append(made.persist())
        return made

    frames = {name: frame(task, empty=task.operator.reads in silent) for name, task in tasks.items()}
    received = collect_acknowledgements(frames, tasks)
    if left_out := [name for name in tasks if not received[name]]:
        # Spark's optimizer saw that there are no rows, and left the tasks out.
        empty = {name: frame(tasks[name], empty=True) for name in left_out}
        frames |= empty
        received |= collect_acknowledgements(empty, tasks)
    for name, task in tasks.items():
        run.received[name] = _check_complete(received[name], task)
        if any(each.rows_out for each in received[name]):
            if task.hands_on:
                run.outputs[name] = output_rows(frames[name], received[name])
        else:
            silent.add(name)


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
    """Make the frame of one step: its rows are the operator's output and one acknowledgement per subtask.

    Args:
        placed: the frame of a placement, which decides on which executors the tasks run; None leaves it to Spark.

    Raises:
        UsageError: `rows` lacks a column that the operator reads.
    """
    keyed = keyed_rows(rows, task)
    key_hash = _hash_of(task.operator)
    group = f"pmod({key_hash}, {task.max_parallelism}L)"
    subtask = f"cast(({group} * {task.parallelism}L) div {task.max_parallelism}L as int)"
    shuffled = shuffle(keyed, task.parallelism, subtask, placed)
    if task.operator.order_by:
        shuffled = shuffled.sortWithinPartitions(*map(quote, task.operator.order_by))
    # Hashing again costs less than sending the hash through the shuffle.
    hashed = shuffled.selectExpr("*", f"{key_hash} as {HASH}")
    return map_in_arrow(hashed, _in_partition(task, rows.sparkSession), spark_schema(step_schema(task.operator)))


def _hash_of(operator: Operator) -> str:
    return f"xxhash64({', '.join(map(quote, operator.key.names))})"


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
    return subtasks.mapInArrow(run, spark_schema(step_schema(task.operator)))


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
    received: dict[str, list[Acknowledgement]] = {name: [] for name in frames}
    if not frames:
        return received
    job = frame_of_job(frames, tasks)
    with tag_jobs(job.sparkSession, [_tag(tasks[name]) for name in frames]):
        rows = job.collect()
    for row in rows:
        acknowledgement = Acknowledgement.from_bytes(bytes(row[0]))
        acknowledgement.raise_failure()
        received[acknowledgement.operator].append(acknowledgement)
    return received


def frame_of_job(frames: Mapping[str, DataFrame], tasks: Mapping[str, StepTask]) -> DataFrame:
    """Make the frame of the acknowledgements of some steps: their partitions follow each other, one per subtask."""
    with_rows = [name for name in frames if tasks[name].operator.output is not None]
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


def output_rows(frame: DataFrame, received: Sequence[Acknowledgement]) -> DataFrame:
    """Select the operator's output after its acknowledgements were `received`.

    If Spark loses a partition and computes it again, a job that reads the output fails unless the result is the one
    that was acknowledged.
    """
    acknowledgement = F.col(ACKNOWLEDGEMENT)
    said = acknowledgement.cast("string")
    accepted = F.get_json_object(said, "$.receipt").isin([a.receipt for a in received])
    reason = F.coalesce(F.get_json_object(said, "$.error[1]"), F.lit(_DIFFERS))
    failed = F.raise_error(F.concat(F.lit(f"{LOST_OUTPUT}: "), reason)).cast("boolean")
    return frame.where(F.when(acknowledgement.isNull(), True).when(accepted, False).otherwise(failed)).drop(
        ACKNOWLEDGEMENT
    )


def _in_partition(
    task: StepTask, spark: SparkSession
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    here = isinstance(spark, SparkSession) and is_local(spark.sparkContext.master)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        # A job has the partitions of one or more operators, one operator after the other.
        subtask = context.partitionId() % task.parallelism
        placed = task if here else on_this_worker(task, subtask)
        if _tag(task) in (context.getLocalProperty(JOB_TAGS) or ""):
            yield from run_subtask(placed, subtask, str(context.taskAttemptId()), check_rows(task, subtask, batches))
        else:  # a later job computes a lost partition again
            yield from run_subtask_again(placed, subtask, check_rows(task, subtask, batches))
        freeze_imports()

    return run


def check_rows(task: StepTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that rows are those of the subtask: Spark numbers its tasks, and knows of no subtasks.

    Raises:
        StateError: they are not.
    """
    own = task.groups(subtask)
    for batch in batches:
        if batch.num_rows:
            groups = key_groups(batch.column(HASH).to_numpy().view(np.uint64), task.max_parallelism)
            if groups.min() < own.start or groups.max() >= own.end:
                raise StateError(
                    f"operator {task.operator.name}: subtask {subtask} got rows of another one in step {task.step}"
                )
        yield batch


def _tag(task: StepTask) -> str:
    """Make the job tag by which a task knows that its job runs the step, and does not only read its output."""
    return f"[{task.warehouse.identity}/{task.stream}/{task.epoch}/{task.operator.name}/{task.step}]"


def columns_read(rows: DataFrame, operator: Operator, times: RowTimes | None = None) -> list[str]:
    """List the columns of `rows` that a step of the operator takes: those of the key and its inputs, or, if it does not
    say which, all that Python has a type for; those that it is ordered by; and those with the event time.

    Raises:
        UsageError: a column is missing, has a name that Siltstone uses itself or that Spark does not tell from another,
            is of a type that Python does not have, or is of the key and of another type (`check_key_types`).
    """
    given, combined = rows.schema, operator.combined
    every = [field.name for field in given if is_for_python(field.dataType)]
    wanted = list_columns(operator, every, times)
    used = {name.casefold() for name in (*internal_names(operator), *PLACED)}  # Spark's names know no case
    named = wanted if combined is None else dict.fromkeys([*wanted, *combined.names])
    check_columns(operator, [name for name in named if name.casefold() in used], wanted, given.names)
    alike = Counter(map(str.lower, given.names))
    for name in wanted:
        twins = [other for other in given.names if other.lower() == name.lower()] if alike[name.lower()] > 1 else []
        if twins and (twins.count(name) > 1 or rows.sparkSession.conf.get(CASE) != "true"):
            raise UsageError(
                f"operator {operator.name} reads {name}, and {operator.reads} has the columns {' and '.join(twins)}, "
                f"which Spark does not tell apart ({CASE}): rename one, or leave it out"
            )
    check_key_types(given, operator)
    known = set(every)
    if unread := [name for name in wanted if name not in known]:
        raise UsageError(
            f"operator {operator.name} reads {unread[0]}, whose type Python does not have "
            f"({given[unread[0]].dataType.simpleString()}): convert it in the source"
        )
    return wanted


def keyed_rows(rows: DataFrame, task: StepTask) -> DataFrame:
    """Select the columns that the operator reads and the event time, with keys cast to the declared types.

    With dead letters, a key that cannot be cast is null, and its original value is kept in a column of its own.
    """
    operator, fails = task.operator, not task.sorts_out
    columns = _select(rows, columns_read(rows, operator, task.times), operator, fails=fails)
    if operator.combined is not None:
        carried = [READ] if operator.reads == SOURCE else []
        hashed = [f"{_hash_of(operator)} as {HASH}"] if carried else []
        combined = _combine(rows.selectExpr(*columns).selectExpr("*", *hashed), operator)
        return combined.selectExpr(*_select(combined, operator.combined.names, operator, fails=fails), *carried)
    if fails:
        return rows.selectExpr(*columns)
    given = rows.schema
    cast = [f.name for f in operator.key if not needs_no_cast(given[f.name].dataType, spark_type(f.type))]
    return rows.selectExpr(*columns, *(f"{quote(name)} as {quote(original_column(name))}" for name in cast))


def _select(rows: DataFrame, names: Sequence[str], operator: Operator, *, fails: bool) -> list[str]:
    """Select columns by name, with those of the key as their declared types (`select_key`).

    This is SQL because making a `Column` takes a dozen calls of the JVM.
    """
    given, keys = rows.schema, operator.key.names
    return [
        select_key(name, given[name].dataType, operator, fails=fails) if name in keys else quote(name) for name in names
    ]


def _combine(rows: DataFrame, operator: Operator) -> DataFrame:
    """Apply the operator's `combine` to rows before the shuffle."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from combine_all(operator, batches)
        except SiltstoneError as error:
            raise OperatorFailed(error.full_text) from error  # the driver sees only its text, and whose it is

    return map_in_arrow(rows, run, spark_schema(combined_schema(operator)))
