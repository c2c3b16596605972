"""Streams that read Kafka. Processes find two of them by name, and the broker by the variable `KAFKA_ADDRESS`."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.secret import Secret
from siltstone.sinks.kafka import KafkaSink
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


class Passed(Operator):
    """Hands each row on, with the sum of its key up to the step."""

    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    output = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("sum", pa.int64())])
    totals = ValueState(value={"sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        values = rows.table.column("value").to_numpy()
        sums = state.totals.get(rows.keys)["sum"].fill_null(0).to_numpy()
        sums = sums + np.bincount(rows.key_index, weights=values, minlength=len(rows.keys)).astype(np.int64)
        state.totals.put(rows.keys, {"sum": sums})
        return rows.table.select(["key", "value"]).append_column("sum", pa.array(sums[rows.key_index]))


def passed(topic: str, **options: str) -> Stream:
    """A stream that writes what it reads to a topic of the same broker."""
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "40", **options}
    sink = KafkaSink(topic, Secret(ADDRESS), key="key", options={"transaction.timeout.ms": 4000})
    return Stream("passed", read_numbers, [Passed(name="passed")], options=given, sinks={"passed": sink})


PASSED = passed("passed", subscribe="passing", maxOffsetsPerTrigger="400")
TALLIES = tallied(subscribe="trickle", maxOffsetsPerTrigger="400")
