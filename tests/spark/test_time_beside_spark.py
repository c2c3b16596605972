"""Beside Spark itself, over the same files: deduplication within a time, timers and TTL of `transformWithState`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession

from siltstone.deduplicate import Deduplicate
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.spark.operations import RunRequest, run
from siltstone.state.ttl import TTL
from siltstone.stream import DIRECTORY
from tests.spark.test_timers import BATCHES, Got, plain
from tests.spark_runs import at as settings_at
from tests.spark_streams import read_files, source_of, write_files
from tests.timed_streams import CLICKS, Sessions, clicks, timed

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
    columns = "user bigint, clicks bigint, ended timestamp"
    with on_rocksdb(spark):
        theirs = by_spark(
            spark,
            tmp_path / "files",
            lambda rows: rows.groupBy("user").transformWithState(SparkSessions(), columns, "append", "eventTime"),
        )
    assert plain(got.all) == theirs and theirs


class Counted(Operator):
    """Counts the clicks of each user, until there was none for a while."""

    name = "counted"
    key = {"user": pa.int64()}  # noqa: RUF012
    output = {"user": pa.int64(), "clicks": pa.int64()}  # noqa: RUF012

    def __init__(self, after: timedelta) -> None:
        self.counts = ValueState({"clicks": pa.int64()}, ttl=TTL(after, clock="processing"))
        super().__init__()

    def process(self, rows: Rows, state: State) -> pa.Table:
        clicked = rows.count(initial=state.counts.get(rows.keys)["clicks"])
        state.counts.put(rows.keys, {"clicks": clicked})
        return rows.keys.with_columns({"clicks": clicked})


class SparkCounted(StatefulProcessor):
    """The same, as Spark's processor."""

    def __init__(self, after: timedelta) -> None:
        self.after_ms = after // timedelta(milliseconds=1)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.counts = handle.getValueState("counts", "clicks bigint", self.after_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        clicked = sum(1 for _ in rows) + (self.counts.get()[0] if self.counts.exists() else 0)
        self.counts.update((clicked,))
        yield Row(user=key[0], clicks=clicked)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("after", "goes_on"), [(timedelta(seconds=3), False), (timedelta(hours=1), True)])
def test_ttl_of_transform_with_state(spark: SparkSession, tmp_path: Path, after: timedelta, goes_on: bool) -> None:
    if not hasattr(GroupedData, "transformWithState"):
        pytest.skip("before 4.1, Spark has transformWithState in Python only by data frames")
    files, got, theirs = tmp_path / "files", Got(), list[tuple[Any, ...]]()

    def keep(rows: DataFrame, _: int) -> None:
        theirs.extend(tuple(row) for row in rows.collect())

    def source(session: SparkSession, options: Any) -> DataFrame:
        return read_files(session, files, CLICKS)

    stream = timed("t", source, operators=[Counted(after)], sinks={"counted": got})
    ended = 0.0
    batches = [clicks((1, 0), (2, 1), (1, 2)), clicks((1, 3), (3, 4))]
    for number in range(len(batches)):
        write_files(files, batches[: number + 1])
        # What was written before has expired once both have waited for that long.
        time.sleep(max(0.0, ended + after.total_seconds() + 1 - time.time()) if not goes_on else 0)
        run(settings_at(tmp_path / "w"), stream, RunRequest())
        with on_rocksdb(spark):
            counted = read_files(spark, files, CLICKS).groupBy("user")
            counted = counted.transformWithState(
                SparkCounted(after), "user bigint, clicks bigint", "update", "processingTime"
            )
            # By the time of day, Spark goes on with steps without rows, so `availableNow` would not end.
            writer = counted.writeStream.outputMode("update").trigger(once=True).foreachBatch(keep)
            running = writer.option("checkpointLocation", str(tmp_path / "spark")).start()
            assert running.awaitTermination(120) and running.exception() is None
        ended = time.time()
    assert got.all == sorted(theirs)
    assert got.all == sorted([(1, 2), (2, 1), (1, 3 if goes_on else 1), (3, 1)])


@contextmanager
def on_rocksdb(spark: SparkSession) -> Iterator[None]:
    """Spark's state store is RocksDB, which `transformWithState` needs."""
    provider = "spark.sql.streaming.stateStore.providerClass"
    before = str(spark.conf.get(provider))
    spark.conf.set(provider, ROCKSDB)
    try:
        yield
    finally:
        spark.conf.set(provider, before)
