"""A step's jobs: one for all operators whose input is at hand, in which each subtask still gets its own rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError, UsageError
from siltstone.operator import SOURCE, Rows, State
from siltstone.run.inputs import HASH
from siltstone.run.region import ConsistentRegion
from siltstone.run.subtask import run_subtask
from siltstone.run.task import StepTask
from siltstone.spark import step
from siltstone.spark.operations import open_region
from siltstone.spark.placement import Placement
from siltstone.spark.step import frame_of_job, run_step, step_frame
from siltstone.spark.versions import repartition_by_id
from siltstone.stream import Stream
from tests.region_run import shuffled
from tests.spark_runs import at
from tests.spark_streams import STEPS, Counts, keyed

SUBTASKS = 3


class Passing(Counts):
    """Counts, and hands its rows on."""

    output = pa.schema([("key", pa.int64()), ("value", pa.int64())])

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Count, and return the rows."""
        super().process(rows, state)
        return rows.table.select(["key", "value"])


class Refusing(Counts):
    """Refuses its rows, all or those of one key."""

    refused: int | None = None

    def process(self, rows: Rows, state: State) -> None:
        """Refuse."""
        if self.refused is None or self.refused in rows.table.column("key").to_pylist():
            raise UsageError("not today")


def of(kind: type[Counts], name: str, reads: str = SOURCE) -> Counts:
    """An operator of this kind by another name."""
    return type(kind.__name__, (kind,), {"name": name, "reads": reads})()


TREE = Stream(
    "tree",
    None,
    [
        of(Counts, "first"),
        of(Passing, "passing"),
        of(Counts, "last"),
        of(Counts, "after", "passing"),
        of(Passing, "passing_on", "passing"),
        of(Counts, "at_the_end", "passing_on"),
    ],
    max_parallelism=8,
)
"""three operators read the source, two another's output, and one the output of one of these"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def opened(stream: Stream, place: OpenWarehouse) -> ConsistentRegion:
    return open_region(at(place.warehouse.local.root, parallelism=SUBTASKS), stream, place, {}, SUBTASKS)


def rows_of(spark: SparkSession, table: pa.Table = STEPS[0]) -> DataFrame:
    return spark.createDataFrame(table.to_pandas(), from_arrow_schema(table.schema))


@contextmanager
def counted_jobs(spark: SparkSession) -> Iterator[list[int]]:
    """The ids of the jobs that the block starts."""
    context, jobs = spark.sparkContext, list[int]()
    context.setJobGroup("counted", "jobs of a test")
    before = {*context.statusTracker().getJobIdsForGroup("counted")}
    try:
        yield jobs
        jobs += {*context.statusTracker().getJobIdsForGroup("counted")} - before
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # pyright: ignore[reportArgumentType]


def rows_in(received: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """By operator and subtask, how many rows it got."""
    return {name: {a.subtask: a.rows_in for a in each} for name, each in received.items()}


def expected(task: StepTask, table: pa.Table) -> dict[int, int]:
    return {subtask: len(rows) for subtask, rows in shuffled(task, table).items()}


def exchanges(plan: Any) -> int:
    """How many exchanges a job runs; what is persisted is a leaf of its plan."""
    children = [plan.children().apply(n) for n in range(plan.children().size())]
    return plan.nodeName().endswith("Exchange") + sum(map(exchanges, children))


def plan_of(frame: DataFrame) -> Any:
    java: Any = vars(frame)["_jdf"]
    return java.queryExecution().executedPlan()


@pytest.mark.parametrize("placed", [False, True])
def test_a_step_has_one_job_per_level_and_each_subtask_gets_its_rows(
    spark: SparkSession, place: OpenWarehouse, placed: bool
) -> None:
    placement = Placement(spark) if placed else None
    if placement is not None:
        placement.frame(SUBTASKS, movable=True).count()
    repartition_by_id(spark.range(1), SUBTASKS, "cast(id as int)", joined=False)  # before 4.1, it asks Spark once
    table = keyed(range(100), range(100))
    tasks = opened(TREE, place).begin_step()
    rows = rows_of(spark, table)
    with counted_jobs(spark) as jobs:
        done = run_step(spark, rows, tasks, placement)
    done.unpersist()
    assert len(jobs) == 3
    assert rows_in(done.received) == {name: expected(task, table) for name, task in tasks.items()}
    assert sum(expected(tasks["first"], table).values()) == 100


def test_a_job_has_one_exchange_and_a_task_per_subtask_of_each_operator(
    spark: SparkSession, place: OpenWarehouse
) -> None:
    """Also where all have the same keys, with or without rows."""
    tasks = opened(TREE, place).begin_step()
    names = ("first", "passing", "last")
    for table in (STEPS[0], STEPS[0].slice(0, 0)):
        rows = rows_of(spark, table)
        for name, value in step.QUERY_SETTINGS.items():
            rows.sparkSession.conf.set(name, value)
        frames = {name: step_frame(rows, tasks[name]) for name in names}
        job = frame_of_job(frames, tasks)
        assert exchanges(plan_of(job)) == 3
        assert job.rdd.getNumPartitions() == 3 * SUBTASKS


def test_operators_that_spark_leaves_out_shift_no_subtask_of_the_others(
    spark: SparkSession, place: OpenWarehouse
) -> None:
    """A frame without tasks is before others in the job."""
    tasks = opened(TREE, place).begin_step()
    rows = rows_of(spark, keyed(range(50), range(50)))
    frames = {
        "first": step_frame(rows.where("false"), tasks["first"]),
        "passing": step_frame(rows, tasks["passing"]),
        "last": step_frame(rows, tasks["last"]),
    }
    received = step.collect_acknowledgements(frames, tasks)
    assert received["first"] == []
    for name in ("passing", "last"):
        assert rows_in(received)[name] == expected(tasks[name], keyed(range(50), range(50)))


def test_a_step_without_rows_is_one_job(spark: SparkSession, place: OpenWarehouse) -> None:
    region = opened(TREE, place)
    with counted_jobs(spark) as jobs:
        done = run_step(spark, None, region.begin_step(ends=True))
    assert len(jobs) == 1
    assert rows_in(done.received) == {op.name: dict.fromkeys(range(SUBTASKS), 0) for op in TREE.operators}


@pytest.mark.parametrize("refusing", ["first", "last", "after"])
def test_the_error_of_one_operator_is_raised_and_nothing_stays_persisted(
    spark: SparkSession, place: OpenWarehouse, refusing: str
) -> None:
    reads = next(op.reads for op in TREE.operators if op.name == refusing)
    operators = [of(Refusing, op.name, reads) if op.name == refusing else op for op in TREE.operators]
    stream = replace(TREE, operators=operators)
    tasks = opened(stream, place).begin_step()
    before = len(persisted(spark))
    with pytest.raises(UsageError, match="not today"):
        run_step(spark, rows_of(spark), tasks)
    assert len(persisted(spark)) == before


def persisted(spark: SparkSession) -> list[int]:
    java: Any = vars(spark.sparkContext)["_jsc"]
    return list(java.getPersistentRDDs())


def test_rows_of_another_subtask_are_refused(place: OpenWarehouse) -> None:
    """Spark's number of a task says which subtask it is: if that were wrong, state would go to foreign key groups."""
    task = opened(TREE, place).begin_step()["first"]
    parts = shuffled(task, keyed(range(50), range(50)))
    foreign = parts[1].to_batches()
    with pytest.raises(StateError, match="subtask 0 got rows of another one"):
        list(step.check_rows(task, 0, iter(foreign)))
    batches = list(run_subtask(task, 0, "test", step.check_rows(task, 0, iter(foreign))))
    last = Acknowledgement.from_bytes(batches[-1].column(0)[0].as_py())
    assert last.error is not None and "rows of another one" in last.error[1]
    assert sum(batch.num_rows for batch in step.check_rows(task, 1, iter(foreign))) == len(parts[1])
    assert HASH in parts[1].column_names
