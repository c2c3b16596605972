"""Beside Spark itself, over the same files: deduplication within a time, and timers of `transformWithState`."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession

from siltstone.deduplicate import Deduplicate
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import DIRECTORY
from tests.spark.test_timers import BATCHES, Got, plain
from tests.spark_runs import at as settings_at
from tests.spark_streams import source_of
from tests.timed_streams import Sessions, clicks, timed

try:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
except ModuleNotFoundError:
    StatefulProcessor = StatefulProcessorHandle = object

SOURCE = source_of([clicks(*batch) for batch in BATCHES])
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def by_spark(spark: SparkSession, directory: Path, query: Any) -> list[tuple[Any, ...]]:
    """The rows that a query of Spark's puts out over the same files, with a watermark of five minutes."""
    rows: DataFrame = query(SOURCE(spark, {DIRECTORY: str(directory)}).withWatermark("at", "5 minutes"))
    writer = rows.writeStream.format("memory").queryName("beside").outputMode("append").trigger(availableNow=True)
    running = writer.option("checkpointLocation", str(directory.with_name("spark"))).start()
    running.awaitTermination(120)
    assert running.exception() is None
    return plain([tuple(row) for row in spark.table("beside").collect()])


def test_deduplication_within_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    got = Got()
    once = Deduplicate("once", {"user": pa.int64()}, within="5 minutes", on="at")
    run(settings_at(tmp_path / "w"), timed("d", SOURCE, operators=[once], sinks={"once": got}), RunRequest())
    theirs = by_spark(
        spark, tmp_path / "files", lambda rows: rows.dropDuplicatesWithinWatermark(["user"]).select("user", "at")
    )
    # Spark keeps a key until the watermark has passed it, and so leaves out rows that come five minutes later.
    ours = plain(got.all)
    assert set(theirs) <= set(ours) and {user for user, _ in theirs} == {user for user, _ in ours}
    known: dict[int, list[datetime]] = {}
    for user, moment in ours:
        known.setdefault(user, []).append(moment)
    for moments in known.values():
        assert all(later - earlier >= timedelta(minutes=5) for earlier, later in pairwise(moments))


class SparkSessions(StatefulProcessor):
    """The sessions of `timed_streams.Sessions`, as Spark's processor."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.counts = handle.getValueState("counts", "clicks bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = [int(row["at"].timestamp() * 1000) for row in rows]
        old = self.counts.get() if self.counts.exists() else (0,)
        self.counts.update((old[0] + len(times),))
        known = list(self.handle.listTimers())
        for timer in known:
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(max([*known, max(times) + 600_000]))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        clicked = self.counts.get()[0]
        self.counts.clear()
        ended = datetime.fromtimestamp(expiredTimerInfo.getExpiryTimeInMs() / 1000, UTC)
        yield Row(user=key[0], clicks=clicked, ended=ended)

    def close(self) -> None:
        pass


def test_event_time_timers_of_transform_with_state(spark: SparkSession, tmp_path: Path) -> None:
    if not hasattr(GroupedData, "transformWithState"):
        pytest.skip("before 4.1, Spark has transformWithState in Python only by data frames")
    got = Got()
    run(settings_at(tmp_path / "w"), timed("s", SOURCE, operators=[Sessions()], sinks={"sessions": got}), RunRequest())
    provider = "spark.sql.streaming.stateStore.providerClass"
    before = spark.conf.get(provider)
    spark.conf.set(provider, ROCKSDB)
    try:
        columns = "user bigint, clicks bigint, ended timestamp"
        theirs = by_spark(
            spark,
            tmp_path / "files",
            lambda rows: rows.groupBy("user").transformWithState(SparkSessions(), columns, "append", "eventTime"),
        )
    finally:
        spark.conf.set(provider, before)
    assert plain(got.all) == theirs and theirs
