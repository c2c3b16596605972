"""Calls that differ between the versions of Spark, 4.0 to 4.3.

Each difference is found by asking for the method or class, because platforms backport some of a later version into an
earlier one: a version number does not tell. Each function names the version with which its older part can go.
Differences of meaning are handled where they matter, not here.
"""

import inspect
import math
from typing import Any

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

_STREAMING = "org.apache.spark.sql.execution.streaming"
_FILE_MANAGERS = (
    f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    f"{_STREAMING}.FileSystemBasedCheckpointFileManager",  # until 4.1
)
_keys: dict[int, list[int]] = {}
"""number of partitions -> per partition, an integer whose hash Spark sends there"""


def checkpoint_file_manager(spark: SparkSession) -> str:
    """Return the class that keeps a query's record in any file system of Hadoop's. Spark 4.1 moved it."""
    jvm: Any = spark._jvm
    return next(name for name in _FILE_MANAGERS if isinstance(_find_class(jvm, name), JavaClass))


def _find_class(jvm: Any, name: str) -> Any:
    for part in name.split("."):
        jvm = getattr(jvm, part)
    return jvm


def source_name(execution: Any, source: Any, number: int) -> str:
    """Return the name of a query's source in Spark's records: before 4.2 its number."""
    try:
        return execution.sourceToIdMap().apply(source)
    except Py4JError:
        return str(number)


def spark_schema(schema: Any) -> StructType:
    """Return the Spark schema of an Arrow schema; a timestamp without zone is TIMESTAMP_NTZ, as from 4.2 on."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def arrow_schema(schema: StructType) -> Any:
    """Return the Arrow schema of a Spark schema; a timestamp is of the zone UTC, as always before 4.2."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def repartition_by_id(rows: DataFrame, count: int, subtask: str) -> DataFrame:
    """Shuffle rows so that partition n has those whose `subtask`, an integer in SQL, is n. Spark has it from 4.1 on."""
    by = partition_expression(rows, count, subtask)
    return rows.repartitionById(count, by) if hasattr(rows, "repartitionById") else rows.repartition(count, by)


def partition_expression(rows: DataFrame, count: int, subtask: str) -> Column:
    """Return the expression by which `repartition_by_id` partitions: a join on it of two such frames shuffles nothing.

    Before Spark 4.1, each subtask is replaced by a number whose hash Spark sends to its partition.
    """
    if hasattr(rows, "repartitionById"):
        return F.expr(subtask)
    keys = ", ".join(map(str, _keys_of(rows.sparkSession, count)))
    return F.expr(f"element_at(array({keys}), {subtask} + 1)")


def _keys_of(spark: SparkSession, count: int) -> list[int]:
    """Ask Spark, once per number of partitions, for an integer that its hash partitioning sends to each of them."""
    tried = int(count * (math.log(count) + 8))  # enough for all but one in 3000 numbers of partitions
    while count not in _keys:
        query = f"SELECT transform(sequence(0, {tried - 1}), i -> pmod(hash(cast(i AS int)), {count})) AS partitions"
        [[partitions]] = spark.sql(query).collect()  # Spark computes it while planning: no job runs
        first = {partition: key for key, partition in reversed(list(enumerate(partitions)))}
        if len(first) == count:
            _keys[count] = [first[partition] for partition in range(count)]
        tried *= 2
    return _keys[count]
