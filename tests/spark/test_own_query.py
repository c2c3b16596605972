"""The stream runner in a user's own query: any source, any sink function, and what such a query may not do."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, UsageError
from siltstone.spark.operations import RunRequest, open_region, run, stream_runner
from siltstone.spark.runner import StreamRunner
from siltstone.stream import DIRECTORY, Stream
from tests.spark_runs import at, digests, state
from tests.spark_streams import COUNTS, STEPS, source_of


class Query:
    """A user's own query: any source, the user's own sink function."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark, self.settings = spark, at(path)
        self.calls: list[tuple[int, list[int]]] = []
        operator = Aggregate("fifths", {"fifth": pa.int64()}, [Count("n"), Sum("sum", of="value")])
        self.stream = Stream("own", source=self.never, operators=[operator], sinks={"fifths": self.sink})

    @staticmethod
    def never(*_: object) -> DataFrame:
        raise AssertionError("the query has a source of its own")

    def sink(self, rows: DataFrame, checkpoint: int) -> None:
        self.calls.append((checkpoint, sorted(row.n for row in rows.collect())))

    def runner(self, max_steps: int | None = None) -> StreamRunner:
        self.place = OpenWarehouse.open_writable(self.settings.warehouse)
        return StreamRunner(self.spark, open_region(self.settings, self.stream, self.place, {}, 2), max_steps=max_steps)

    def start(self, runner: StreamRunner, location: str | None = None):
        ticks = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).load()
        writer = ticks.selectExpr("value", "value % 5 as fifth").writeStream.foreachBatch(runner)
        return writer.option("checkpointLocation", location or runner.checkpoint_location).start()


def test_in_the_users_own_query(spark: SparkSession, tmp_path: Path) -> None:
    own = Query(spark, tmp_path / "w")
    for start in (0, 3):
        runner = own.runner(max_steps=3)
        query = own.start(runner)
        assert runner.enough.wait(60)
        runner.stop(query)
        assert not query.isActive and runner.failure is None
        assert own.calls == [(id, [10 * id] * 5) for id in range(1, start + 4)], "once for each checkpoint"
    totals = state(own.settings, "own", "fifths", "totals", tmp_path / "out").sort_by("fifth")
    assert totals.column("n").to_pylist() == [60] * 5
    assert totals.column("sum").to_pylist() == [sum(range(k, 300, 5)) for k in range(5)]


def test_as_the_readme_does_it(spark: SparkSession, tmp_path: Path) -> None:
    given = {"checkpoint_steps": 2, "openmetrics": tmp_path / "{stream}.txt"}
    settings = at(tmp_path / "w").model_copy(update=given)
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})
    with stream_runner(settings, stream, spark) as runner:
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        writer.trigger(availableNow=True).start().awaitTermination()
    run(at(tmp_path / "steady"), COUNTS, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [r.outcome for r in place.catalog.runs.list("counts")] == ["done"]
        digest = place.catalog.checkpoints.get_latest("counts").digest
        stored = len(place.catalog.objects.list("counts"))
    metrics = (tmp_path / "counts.txt").read_text()
    assert f'siltstone_upload_objects_total{{stream="counts"}} {stored}.0\n' in metrics, (
        "a user's own query writes them"
    )
    with OpenWarehouse.open_existing(at(tmp_path / "steady").warehouse) as place:
        assert place.catalog.checkpoints.get_latest("counts").digest == digest
    with pytest.raises(UsageError, match="no source of its own"):
        run(settings, stream, RunRequest())


def test_in_the_users_own_query_what_was_taken_back_comes_again_first(spark: SparkSession, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    operator = Aggregate("keys", {"key": pa.int64()}, [Count("n"), Sum("sum", of="value")])
    sinks = {"keys": lambda rows, id: heard.append((id, rows.count()))}
    stream = Stream("own", source=None, operators=[operator], sinks=sinks)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})

    def query(checkpoint_steps: int, *, follow: bool) -> None:
        settings = at(tmp_path / "w").model_copy(update={"checkpoint_steps": checkpoint_steps})
        with stream_runner(settings, stream, spark) as runner:
            if follow:
                runner.follow_log(rows)
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()

    query(3, follow=True)
    before, recorded = heard.copy(), digests(at(tmp_path / "w"), "own")
    assert [id for id, _ in before] == [1, 2] and len(recorded) == 2, "of three steps and of one"
    with OpenWarehouse.open_existing(at(tmp_path / "w").warehouse) as place:
        place.catalog.rollbacks.roll_back("own", place.catalog.runs.begin("own", "a test"), 0, "a test", "a test")
        with pytest.raises(Exception, match=r"5 logged steps must be run again first: call runner.follow_log\(rows\)"):
            query(1, follow=False)
        assert (heard, place.catalog.checkpoints.last_id("own")) == (before, 0)
    query(1, follow=True)
    assert (heard, digests(at(tmp_path / "w"), "own")) == (before, recorded), "the sink has had its rows"


def test_an_empty_micro_batch_under_adaptive_execution(spark: SparkSession, tmp_path: Path) -> None:
    """A session that Siltstone did not make plans adaptively: an empty batch would get no task at all."""
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")}).filter("key < 0")
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        with stream_runner(at(tmp_path / "w"), stream, spark) as runner:
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
    with OpenWarehouse.open_existing(at(tmp_path / "w").warehouse) as place:
        assert place.catalog.checkpoints.last_id("counts") == len(STEPS)


def test_state_of_sparks_own_before_the_runner_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")}).dropDuplicates(["key"])
    with stream_runner(at(tmp_path / "w"), stream, spark) as runner:
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        with pytest.raises(Exception, match="foreachBatch"):
            writer.trigger(availableNow=True).start().awaitTermination()
        assert isinstance(runner.failure, UsageError) and "dropDuplicates" in str(runner.failure)
    with OpenWarehouse.open_existing(at(tmp_path / "w").warehouse) as place:
        assert (place.catalog.checkpoints.last_id("counts"), place.catalog.runs.list("counts")[-1].outcome) == (
            0,
            "failed",
        )


def test_another_checkpoint_location_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    own = Query(spark, tmp_path / "w")
    for location in ("first", "second"):
        before = own.calls.copy()
        runner = own.runner()
        query = own.start(runner, str(tmp_path / location))
        with pytest.raises(Exception, match="checkpointLocation"):
            query.awaitTermination(60)
        assert isinstance(runner.failure, StateError) and "runner.checkpoint_location" in str(runner.failure)
        assert own.calls == before
        if location == "first":  # the second is refused where the stream has checkpoints, too
            good = own.runner(max_steps=2)
            query = own.start(good)
            assert good.enough.wait(60)
            good.stop(query)
