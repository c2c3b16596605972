"""One step of one operator as a Spark job: hash in the JVM, one shuffle, one Arrow task a subtask."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DataType

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError, UsageError
from siltstone.operator import SOURCE, Operator
from siltstone.run.processing import ACKNOWLEDGEMENT, HASH, combine, internal_names, original, step_schema
from siltstone.run.subtask import run_subtask, run_subtask_again
from siltstone.run.task import StepTask
from siltstone.spark.executor import freeze_imports
from siltstone.spark.types import spark_type
from siltstone.stream import Stream

JOB_TAGS = "spark.job.tags"
"""Spark's local property with the tags of the job that a task is of"""
LOST_OUTPUT = "an operator's output was lost and computed again"


@dataclass(frozen=True)
class StepRun:
    """What a step's operators said and returned.

    Attributes:
        received: operator -> what its subtasks said.
        outputs: operator -> its output, of those that another operator reads; and the rows of the step itself.
        cached: what must be let go of once nobody needs the outputs any more.
    """

    received: dict[str, list[Acknowledgement]] = field(default_factory=dict)
    outputs: dict[str, DataFrame] = field(default_factory=dict)
    cached: list[DataFrame] = field(default_factory=list)

    def unpersist(self) -> None:
        """Let go of the outputs."""
        for frame in self.cached:
            frame.unpersist()


def run_operators(stream: Stream, rows: DataFrame, tasks: Mapping[str, StepTask]) -> StepRun:
    """One step of every operator, each after the one it reads.

    Raises:
        SiltstoneError: what a subtask failed with.
    """
    # Adaptive execution would plan an empty micro-batch with no task at all, and coalesce a small one's. The
    # session here is the query's own clone.
    rows.sparkSession.conf.set("spark.sql.adaptive.enabled", "false")
    shared = sum(op.reads == SOURCE for op in stream.operators) > 1
    if shared:
        rows = rows.persist()
    run = StepRun(outputs={SOURCE: rows})
    try:
        for operator in stream.topological():
            task = tasks[operator.name]
            frame = step_frame(run.outputs[operator.reads], task)
            if task.hands_on:
                # Its job must not run twice: once for the acknowledgements, once for whoever reads the output.
                frame = frame.persist()
                run.cached.append(frame)
            received = run.received[operator.name] = acknowledgements(frame, task)
            if task.hands_on:
                run.outputs[operator.name] = output_rows(frame, received)
    finally:
        if shared:
            rows.unpersist()
    return run


def run_empty(spark: SparkSession, tasks: Mapping[str, StepTask]) -> StepRun:
    """One step of every operator without rows; nothing is returned."""
    return StepRun({name: acknowledgements(empty_step_frame(spark, task), task) for name, task in tasks.items()})


def step_frame(rows: DataFrame, task: StepTask) -> DataFrame:
    """The job of one step: its result holds the operator's output and one acknowledgement a subtask.

    Raises:
        UsageError: `rows` lacks a column that the operator reads.
    """
    keyed = keyed_rows(rows, task)
    names = ", ".join(map(_quoted, task.operator.key.names))
    group = f"pmod(xxhash64({names}), {task.max_parallelism}L)"
    subtask = F.expr(f"cast(({group} * {task.parallelism}L) div {task.max_parallelism}L as int)")
    shuffled = keyed.repartitionById(task.parallelism, subtask)
    if task.operator.order_by:
        shuffled = shuffled.sortWithinPartitions(*map(_quoted, task.operator.order_by))
    # Hashing again costs less than sending the hash through the shuffle.
    hashed = shuffled.selectExpr("*", f"xxhash64({names}) as {HASH}")
    return hashed.mapInArrow(_in_partition(task), from_arrow_schema(step_schema(task.operator)))


def empty_step_frame(spark: SparkSession, task: StepTask) -> DataFrame:
    """The job of a step that has no rows: one empty task a subtask."""
    in_partition = _in_partition(task)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass  # a worker whose input is not read to its end is not used again
        yield from in_partition(iter(()))

    subtasks = spark.range(0, task.parallelism, 1, task.parallelism)
    return subtasks.mapInArrow(run, from_arrow_schema(step_schema(task.operator)))


def acknowledgements(frame: DataFrame, task: StepTask) -> list[Acknowledgement]:
    """Run the job and return what its subtasks say.

    Raises:
        SiltstoneError: what a subtask failed with.
        StateError: a subtask did not answer.
    """
    if task.operator.output is not None:
        frame = frame.where(F.col(ACKNOWLEDGEMENT).isNotNull()).select(ACKNOWLEDGEMENT)
    frame.sparkSession.addTag(_tag(task))
    try:
        received = [Acknowledgement.from_bytes(bytes(row[0])) for row in frame.collect()]
    finally:
        frame.sparkSession.removeTag(_tag(task))
    for acknowledgement in received:
        acknowledgement.raise_failure()
    missing = set(range(task.parallelism)) - {a.subtask for a in received}
    if missing:
        raise StateError(f"operator {task.operator.name}: no word from subtasks {sorted(missing)} in step {task.step}")
    return received


def output_rows(frame: DataFrame, received: Sequence[Acknowledgement]) -> DataFrame:
    """The operator's output alone, once its acknowledgements were `received`.

    A job that reads it fails where a partition was lost and computed again since, and that failed or came to something
    else than was acknowledged.
    """
    acknowledgement = F.col(ACKNOWLEDGEMENT)
    said = acknowledgement.cast("string")
    accepted = F.get_json_object(said, "$.receipt").isin([a.receipt for a in received])
    reason = F.coalesce(F.get_json_object(said, "$.error[1]"), F.lit("it came to other rows or another state"))
    failed = F.raise_error(F.concat(F.lit(f"{LOST_OUTPUT}: "), reason)).cast("boolean")
    return frame.where(F.when(acknowledgement.isNull(), True).when(accepted, False).otherwise(failed)).drop(
        ACKNOWLEDGEMENT
    )


def _in_partition(task: StepTask) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if _tag(task) in (context.getLocalProperty(JOB_TAGS) or ""):
            yield from run_subtask(task, context.partitionId(), str(context.taskAttemptId()), batches)
        else:  # a later job reads what was lost since its step was acknowledged
            yield from run_subtask_again(task, context.partitionId(), batches)
        freeze_imports()

    return run


def _tag(task: StepTask) -> str:
    """What tells a task that its job is the one that runs the step; Spark puts it among other tags of the job."""
    return f"[{task.stream}/{task.epoch}/{task.operator.name}/{task.step}]"


def columns_read(rows: DataFrame, operator: Operator) -> list[str]:
    """The columns of `rows` that the operator reads.

    Raises:
        UsageError: one of them is missing.
    """
    wanted = list(dict.fromkeys([*operator.key.names, *(operator.inputs or rows.columns)]))
    # Rows that are combined before the shuffle are ordered by columns of what comes of that.
    ordered, combined = (operator.order_by, []) if operator.combined is None else ((), operator.combined.names)
    if taken := [name for name in internal_names(operator) if name in (*wanted, *combined)]:
        raise UsageError(
            f"operator {operator.name} reads {', '.join(taken)}, a name that Siltstone uses itself: rename the column"
        )
    missing = [name for name in dict.fromkeys([*wanted, *ordered]) if name not in rows.columns]
    if missing:
        raise UsageError(
            f"operator {operator.name} reads {', '.join(missing)}, which {operator.reads} does not have "
            f"(it has {', '.join(rows.columns)})"
        )
    return wanted


def keyed_rows(rows: DataFrame, task: StepTask) -> DataFrame:
    """Only the columns that the operator reads, and the event time; keys cast to the declared types.

    Where bad rows are left out, a key that cannot be cast is null, and what it was goes with it.
    """
    operator, event_time = task.operator, task.event_time
    wanted = columns_read(rows, operator)
    keys = {f.name: spark_type(f.type) for f in operator.key}
    if operator.combined is not None:
        return _combined(rows.select(*_cast(wanted, keys)), operator).select(*_cast(operator.combined.names, keys))
    timed = (event_time,) if event_time else ()
    wanted: list[str] = list(dict.fromkeys((*wanted, *operator.order_by, *timed)))
    if task.dead_letters is None:
        return rows.select(*_cast(wanted, keys))
    # Without ANSI a cast never fails, and reads more than try_cast: what is a key must not depend on `on_bad_row`.
    cast = Column.try_cast if rows.sparkSession.conf.get("spark.sql.ansi.enabled") == "true" else Column.cast
    columns = [cast(F.col(_quoted(c)), keys[c]).alias(c) if c in keys else F.col(_quoted(c)) for c in wanted]
    other = [name for name, declared in keys.items() if rows.schema[name].dataType != declared]
    return rows.select(*columns, *(F.col(_quoted(name)).alias(original(name)) for name in other))


def _quoted(name: str) -> str:
    """A column's name as Spark's SQL takes it, whatever dots or spaces are in it."""
    return "`" + name.replace("`", "``") + "`"


def _cast(names: Sequence[str], keys: Mapping[str, DataType]) -> list[Column]:
    """Columns by name, those of the key cast to its types."""
    return [F.col(_quoted(c)).cast(keys[c]).alias(c) if c in keys else F.col(_quoted(c)) for c in names]


def _combined(rows: DataFrame, operator: Operator) -> DataFrame:
    """What the operator's `combine` makes of rows before the shuffle."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from combine(operator, pa.Table.from_batches([batch])).to_batches()

    return rows.mapInArrow(run, from_arrow_schema(operator.combined))
