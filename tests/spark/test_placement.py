"""The plan of a placed step, and sessions in which subtasks cannot be placed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError
from siltstone.run.region import ConsistentRegion
from siltstone.spark import placement
from siltstone.spark.jobs import TaggedJobs
from siltstone.spark.operations import RunRequest, open_region, run
from siltstone.spark.placement import Placement, placement_of
from siltstone.spark.step import _check_complete, own_session, run_step, step_frame
from siltstone.spark.step import _tag as job_tag
from siltstone.spark.versions import spark_schema
from siltstone.stream import Stream
from tests.fault.reference import small
from tests.fault.small_stream import PURCHASE, SCHEMA, SMALL, purchases
from tests.spark_runs import at, digests
from tests.spark_streams import COUNTS, LITTLE, STEPS

SUBTASKS = 3
KINDS = {"plain": COUNTS, "accounts": SMALL, "daily": SMALL, "places": SMALL}
"""kind of operator -> the stream that has it: of `SMALL`, one is ordered, one combines rows before the shuffle, and one
reads another operator"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


@pytest.fixture(scope="module")
def placed(spark: SparkSession) -> DataFrame:
    return Placement(spark).frame(SUBTASKS, movable=True)


def opened(stream: Stream, place: OpenWarehouse) -> ConsistentRegion:
    return open_region(at(place.warehouse.local.root, parallelism=SUBTASKS), stream, place, {}, SUBTASKS)


def rows_of(spark: SparkSession, kind: str, some: bool) -> DataFrame:
    """Rows that an operator of this kind reads."""
    if kind == "plain":
        table, schema = STEPS[0], STEPS[0].schema
    else:
        table, schema = purchases()[0], SCHEMA if kind != "places" else PURCHASE
        table = table.append_column("spent", table["amount"]).select(schema.names).cast(schema)
    rows = [tuple(row.values()) for row in table.to_pylist()] if some else []
    return spark.createDataFrame(rows, spark_schema(schema))


def exchanges(plan: Any) -> int:
    """How many exchanges a step runs; what is persisted is a leaf of its plan."""
    children = [plan.children().apply(n) for n in range(plan.children().size())]
    return plan.nodeName().endswith("Exchange") + sum(map(exchanges, children))


@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_placed_step_has_one_exchange_and_a_task_per_subtask(
    spark: SparkSession, place: OpenWarehouse, placed: DataFrame, kind: str, some: bool, ansi: str
) -> None:
    """Also where the query's session differs from the placement's in its ANSI mode, which expressions hold."""
    name = "counts" if kind == "plain" else kind
    task = opened(KINDS[kind], place).begin_step()[name]
    session = own_session(spark)
    session.conf.set("spark.sql.ansi.enabled", ansi)
    rows = rows_of(session, kind, some)
    for frame in (step_frame(rows, task, placed), step_frame(rows, task)):
        assert exchanges(frame._jdf.queryExecution().executedPlan()) == 1
        assert frame.rdd.getNumPartitions() == SUBTASKS


@pytest.mark.parametrize(
    ("answers", "said"), [([0, 2], r"no answer of subtasks \[1\]"), ([0, 1, 2, 1], r"\[1\] .* several")]
)
def test_a_step_takes_just_one_answer_of_each_subtask(place: OpenWarehouse, answers: list[int], said: str) -> None:
    """Spark may have planned more tasks than there are subtasks; the last answer would count, often of no rows."""
    task = opened(COUNTS, place).begin_step()["counts"]
    with pytest.raises(StateError, match=said):
        _check_complete([cast(Acknowledgement, SimpleNamespace(subtask=subtask)) for subtask in answers], task)


@pytest.mark.parametrize("chosen", [True, None])
def test_each_subtask_answers_if_spark_sees_that_there_are_no_rows(
    spark: SparkSession, place: OpenWarehouse, chosen: bool | None
) -> None:
    """Spark's optimizer then drops the shuffle, and with it the tasks. Seen: "no answer of subtasks [0, 1, 2]"."""
    region = opened(SMALL, place)
    rows = rows_of(spark, "accounts", some=True).where("false")
    done = run_step(spark, rows, region.begin_step(), placement_of(spark, place.warehouse, SMALL.name, chosen))
    answered = {name: sorted(each.subtask for each in received) for name, received in done.received.items()}
    assert answered == {name: [*range(SUBTASKS)] for name in (op.name for op in SMALL.operators)}
    assert not done.outputs, "nobody reads what has no rows"
    done.unpersist()


def test_placed_steps_come_to_the_same_state(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w", placement=True, checkpoint_steps=2)
    run(settings, LITTLE, RunRequest(batches=3))
    assert list(digests(settings, "little").values()) == [small().digests[1], small().digests[2]]


def test_a_session_whose_settings_are_fixed_is_warned_of_once(
    spark: SparkSession, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "REDUCE_LOCALITY", "spark.shuffle.setting.that.this.session.lacks")
    with caplog.at_level(logging.WARNING, "siltstone"):
        assert [placement_of(spark, place.warehouse, "fixed", chosen=True) for _ in range(2)] == [None, None]
    assert len(caplog.messages) == 1 and "start Spark with spark.shuffle.setting" in caplog.messages[0]


def test_subtasks_are_not_placed_on_one_machine_unless_it_is_asked(spark: SparkSession, place: OpenWarehouse) -> None:
    assert placement_of(spark, place.warehouse, "local") is None
    assert placement_of(spark, place.warehouse, "local", chosen=True) is not None


def test_equally_named_streams_of_two_warehouses_share_neither_jobs_nor_placement(
    spark: SparkSession, place: OpenWarehouse, tmp_path: Path
) -> None:
    """Both were known by their names: a reset of one cancelled the jobs of the other, and took its placement."""
    with OpenWarehouse.open_writable(str(tmp_path / "other")) as other:
        placements, tags, steps = [], [], []
        for each in (place, other):
            placements.append(placement_of(spark, each.warehouse, SMALL.name, chosen=True))
            region = opened(SMALL, each)
            with TaggedJobs(spark, each.warehouse, SMALL.name, region.epoch).tag():
                tags.append(spark.sparkContext.getJobTags())
            steps.append(job_tag(region.begin_step()["accounts"]))
    assert len(set(placements)) == len(set(steps)) == 2
    assert all(tags) and tags[0].isdisjoint(tags[1])
    assert placement_of(spark, place.warehouse, SMALL.name, chosen=True) is placements[0]
