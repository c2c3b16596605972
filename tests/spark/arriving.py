"""Streams that read sources which begin at "latest"."""

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.stream import DIRECTORY, Stream
from tests.spark.latest_source import LatestSource


def latest(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """Messages from the latest on, with a key of two values."""
    spark.dataSource.register(LatestSource)
    rows = spark.readStream.format("begins_latest").option("directory", options[DIRECTORY]).load()
    return rows.selectExpr("value % 2 as key", "value")


def rate(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """A row a millisecond since the source began."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", 10).option("numPartitions", 1).load()
    return rows.selectExpr("value % 2 as key", "value")


def totals() -> Aggregate:
    """Rows per key, their sum, and what tells them apart."""
    return Aggregate("totals", {"key": pa.int64()}, [Count("n"), Sum("sum", of="value")], output=False)


MESSAGES = Stream("messages", latest, [totals()], max_parallelism=4)
RATE = Stream("rate", rate, [totals()], max_parallelism=4)
