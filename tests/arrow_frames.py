"""DataFrames from and to Arrow, as Spark 4.0 has them, under older versions too."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def to_arrow(frame: "DataFrame") -> pa.Table:
    """`DataFrame.toArrow`."""
    from siltstone.spark.versions import arrow_schema

    if hasattr(frame, "toArrow"):
        return frame.toArrow()
    older: Any = frame
    batches = older._collect_as_arrow()  # noqa: SLF001  before 4.0 it has no public name
    return pa.Table.from_batches(batches) if batches else arrow_schema(frame.schema).empty_table()


def from_arrow(spark: "SparkSession", table: pa.Table) -> "DataFrame":
    """`SparkSession.createDataFrame` of a table; a timestamp without zone stays one."""
    from siltstone.spark.versions import frame_of, spark_schema

    return frame_of(spark, table, spark_schema(table.schema))
