"""Windows of `Aggregate` under Spark are those of Spark's own `window` and `session_window`, in append mode."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.aggregates.functions import Average, Count, Max, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Session, Sliding, Tumbling
from siltstone.spark.operations import RunRequest, replay, rescale, run
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime
from tests.examples import usually
from tests.spark_runs import at as settings_at
from tests.spark_runs import check_proven, state
from tests.spark_streams import read_files, source_of, write_files
from tests.windowed_streams import ROWS, Row, table_of

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
FUNCTIONS = (Count("n"), Sum("total", of="v"), Max("hi", of="v"), Average("mean", of="v"))
WINDOWS: dict[str, tuple[Any, Any]] = {
    "tumbling": (Tumbling("10 minutes", on="at"), F.window),
    "offset": (Tumbling("1 hour", on="at", offset="15 minutes"), F.window),
    "sliding": (Sliding("15 minutes", "5 minutes", on="at"), F.window),
    "session": (Session("3 minutes", on="at"), F.session_window),
}


def batches() -> list[pa.Table]:
    """Five files of rows by whole minutes, so that sessions touch; each at most five minutes before the newest."""
    choose, made = random.Random(3), list[list[Row]]()
    for number in range(5):
        minutes = [9 * number + choose.randint(0, 9) for _ in range(25)]
        made.append([(choose.randrange(9), BEGIN + timedelta(minutes=m), choose.choice([None, m])) for m in minutes])
    return [table_of(rows) for rows in made]


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def __call__(self, rows: DataFrame, id: int) -> None:
        self.rows += plain(rows.select("user", "window_start", "window_end", "n", "total", "hi", "mean"))


def plain(rows: DataFrame) -> list[tuple[Any, ...]]:
    """Rows with times in UTC."""
    return [tuple(v.astimezone(UTC) if isinstance(v, datetime) else v for v in row) for row in rows.collect()]


def by_spark(spark: SparkSession, files: Path, name: str) -> list[tuple[Any, ...]]:
    """What a query of Spark makes of the same files in append mode, with a last row that closes all windows."""
    window, make = WINDOWS[name]
    end = table_of([(99, BEGIN + timedelta(days=9), None), (99, BEGIN + timedelta(days=19), None)])
    # A row of a user that is left out in the result alone: within the query, Spark would leave it out before.
    write_files(files, [*batches(), end, end])
    lengths = {option: getattr(window, option, timedelta(0)) for option in ("size", "every", "offset", "gap")}
    text = {option: f"{length.total_seconds():.0f} seconds" for option, length in lengths.items()}
    column = F.col("at")
    if name == "session":
        of = make(column, text["gap"])
    else:
        of = make(column, text["size"], text["every"] if name == "sliding" else text["size"], text["offset"])
    rows = read_files(spark, files, ROWS).withWatermark("at", "10 minutes")
    totals = (F.count("*").alias("n"), F.sum("v").alias("total"), F.max("v").alias("hi"), F.avg("v").alias("mean"))
    query = rows.groupBy("user", of.alias("w")).agg(*totals)
    query = query.select("user", "w.start", "w.end", "n", "total", "hi", "mean")
    table = f"by_spark_{name}"
    begun = query.writeStream.format("memory").queryName(table).outputMode("append").start()
    try:
        begun.processAllAvailable()
    finally:
        begun.stop()
    return sorted(plain(spark.table(table).where("user < 99")), key=str)


@pytest.mark.parametrize("name", usually(WINDOWS, "offset", "sliding", "session"))
def test_windows_are_those_of_spark(spark: SparkSession, tmp_path: Path, name: str) -> None:
    kept, window = Kept(), WINDOWS[name][0]
    combines = name in ("offset", "sliding")
    operator = Aggregate("a", key={"user": pa.int64()}, aggregates=FUNCTIONS, window=window, map_side=combines)
    times = EventTime("at", delay="10 minutes", max_ahead=timedelta(days=36500))
    stream = Stream("s", source_of(batches()), [operator], event_time=times, sinks={"a": kept})
    settings = settings_at(tmp_path / "w", checkpoint_steps=2)
    run(settings, stream, RunRequest(batches=2))
    rescale(settings, stream, 3)
    run(settings.model_copy(update={"parallelism": None}), stream, RunRequest(finish=True))
    assert sorted(kept.rows, key=str) == by_spark(spark, tmp_path / "files", name)
    assert kept.rows and state(settings, "s", "a", "totals", tmp_path / "totals").num_rows == 0
    assert replay(settings, stream).proven
    check_proven(settings, "s")
