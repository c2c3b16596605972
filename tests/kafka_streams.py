"""Streams that read Kafka. Processes find `TALLIES` by name, and the broker by the variable `KAFKA_ADDRESS`."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.stream import DIRECTORY, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ADDRESS = "KAFKA_ADDRESS"
COLUMNS = (
    "cast(cast(key as string) as bigint) as key",
    "cast(cast(value as string) as bigint) as value",
    "topic",
    "partition",
    "offset",
    "timestamp",
)
"""what a source makes of Kafka's columns"""


def read_records(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Read Kafka with these options of Spark's source, and its columns; the broker is the one of `ADDRESS`."""
    given = {name: value for name, value in options.items() if name != DIRECTORY}
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", os.environ[ADDRESS])
    return reader.options(**given).load()


def read_numbers(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Read records whose keys and values are numbers."""
    return read_records(spark, options).selectExpr(*COLUMNS)


def read_texts(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Read records whose keys may be any text."""
    return read_records(spark, options).selectExpr("cast(key as string) as key", *COLUMNS[1:])


def tallies() -> Aggregate:
    """Rows per key, and the sum of their values."""
    return Aggregate("tallies", {"key": pa.int64()}, [Count("n"), Sum("sum", of="value")], output=False)


def tallied(name: str = "tallied", **options: str) -> Stream:
    """A stream that counts and adds what these options of Kafka's source read, from the earliest record on."""
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "40", **options}
    return Stream(name, read_numbers, [tallies()], options=given, max_parallelism=4)


TALLIES = tallied(subscribe="trickle", maxOffsetsPerTrigger="400")
