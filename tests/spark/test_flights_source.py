"""Spark takes the flights a week at a time, in event-time order."""

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.errors import UsageError
from streams.flights import UNKNOWN, source
from streams.flights_data import prepare
from tests.oracle_flights import all_flights


def test_micro_batches_are_weeks_in_order(spark: SparkSession, tmp_path: Path) -> None:
    weeks = 6  # of 53; the end-to-end test takes the whole year
    prepare(tmp_path / "flights" / "week", "week")
    for path in sorted((tmp_path / "flights" / "week").iterdir())[weeks:]:
        path.unlink()
    seen: list[tuple[int, ...]] = []

    def note(rows: DataFrame, batch: int) -> None:
        seen.append(
            tuple(
                rows.agg(
                    F.min("sequence"),
                    F.max("sequence"),
                    F.count("tailnum"),
                    F.count_if(F.col("tailnum") == UNKNOWN),
                    F.count_if("cancelled"),
                ).collect()[0]
            )
        )

    frame = source(spark, {"period": "week", "directory": str(tmp_path / "flights")})
    writer = frame.writeStream.foreachBatch(note).option("checkpointLocation", str(tmp_path / "spark"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    assert len(seen) == weeks
    position = 0
    for first, last, flights, _, _ in seen:
        assert (first, last) == (position, position + flights - 1)
        position += flights
    theirs = all_flights().head(position)
    assert sum(row[3] for row in seen) == theirs.tailnum.isna().sum() > 0
    assert sum(row[4] for row in seen) == theirs.dep_time.isna().sum() > 0


def test_an_unknown_period_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"period is 'year': use day or week"):
        source(spark, {"period": "year", "directory": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
