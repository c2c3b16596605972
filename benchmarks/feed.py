"""An endless stream as fast as it is read: numbered rows, counted and added up by a key made from the number.

Its source is Spark's `rate-micro-batch`, so each micro-batch has the same number of rows, and the same rows when it
runs again.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Count, Max, Min, Sum
from siltstone.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Make the source: `rows` rows per micro-batch, of `keys` keys."""
    reader = spark.readStream.format("rate-micro-batch").option("numPartitions", 2)
    rows = reader.option("rowsPerBatch", options["rows"]).load()
    return rows.selectExpr(f"pmod(xxhash64(value), {int(options['keys'])}) AS key", "pmod(value, 1000) AS amount")


FEED = Stream(
    "feed",
    source=source,
    operators=[
        Aggregate(
            "totals",
            key={"key": pa.int64()},
            aggregates=[Count("rows"), Sum("total", of="amount"), Min("least", of="amount"), Max("most", of="amount")],
            output=False,
        )
    ],
    options={"rows": "1000000", "keys": "300000"},
)
