"""Calls that differ between the versions of Spark, 3.5 to 4.3.

Each difference is found by asking for the method or class, because platforms may add parts of a later version to an
earlier one: a version number does not tell. Each function names the version that brought the newer way. The older one
can be deleted once no older Spark is supported. Differences of meaning are handled where they matter, not here.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError
from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from siltstone.spark.executor import frame_of_pieces
from siltstone.spark.plans import look_up

_STREAMING = "org.apache.spark.sql.execution.streaming"
_FILE_MANAGERS = (
    f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    f"{_STREAMING}.FileSystemBasedCheckpointFileManager",  # until 4.1
)
_STATEFUL = (
    f"{_STREAMING}.operators.stateful.StatefulOperator",
    f"{_STREAMING}.StatefulOperator",  # until 4.1
)
PARTITION = "__partition"
"""a column that `repartition_by_id` may add"""
_keys: dict[int, list[int]] = {}
"""number of partitions -> per partition, an integer whose hash Spark sends there"""


def checkpoint_file_manager(spark: SparkSession) -> str | None:
    """Return the class that keeps a query's record in any file system of Hadoop's. Spark 4.1 moved it."""
    return _find_class(spark, _FILE_MANAGERS)


def offset_log_versions(spark: SparkSession) -> tuple[str, ...]:
    """Return the versions of the offset log that this Spark can read; the second came with 4.2."""
    return ("v1", "v2") if _find_class(spark, [f"{_STREAMING}.checkpointing.OffsetMap"]) else ("v1",)


def _find_class(spark: SparkSession, names: Sequence[str]) -> str | None:
    """Return the first of these names that is a class; None if none is."""
    for name in names:
        if isinstance(look_up(spark._jvm, name), JavaClass):
            return name
    return None


def stateful_operator(spark: SparkSession) -> Any:
    """Return the class of the nodes of a plan that keep state of Spark's own. Spark 4.1 moved it."""
    jvm: Any = spark._jvm
    name = _find_class(spark, _STATEFUL) or _STATEFUL[0]  # which the error names where there is neither
    return jvm.org.apache.spark.util.Utils.classForName(name, True, False)


def names_of_sources(execution: Any) -> Any:
    """Return the map of a query's sources to their names in Spark's records; None before 4.2."""
    return _call(execution, "sourceToIdMap")


def start_of_batch(execution: Any) -> Any:
    """Return the map of a query's sources to their part of its current batch. Spark 4.0 keeps it in a context."""
    return (_call(execution, "getLatestExecutionContext") or execution).newData()


def _call(target: Any, method: str) -> Any:
    """Call a method of an object of the JVM; None if it has none. To ask `dir` takes 45 ms of a step."""
    try:
        return getattr(target, method)()
    except Py4JError as error:
        if type(error) is Py4JError:  # what the method raised, or a lost connection, has a class of its own
            return None
        raise


def has_python_sources(spark: SparkSession) -> bool:
    """Whether Spark has data sources in Python: from 4.0 on."""
    return hasattr(spark, "dataSource")


def has_setting(spark: SparkSession, name: str) -> bool:
    """Whether this version of Spark has a setting, or it was set."""
    try:
        spark.conf.get(name)
    except (Py4JError, PySparkException):
        return False
    return True


def inherit_properties(spark: SparkSession, work: Callable[..., Any]) -> Callable[..., Any]:
    """Give what another thread will run this thread's local properties. From 4.0 on, PySpark asks for the session."""
    target: Any = inheritable_thread_target
    takes_session = "SparkSession" in str(inspect.signature(target).parameters["f"].annotation)
    return target(spark)(work) if takes_session else target(work)


def frame_of(spark: SparkSession, rows: pa.Table, schema: StructType) -> DataFrame:
    """Make a DataFrame of a few rows. Before 4.0, which takes Arrow tables, a Python task returns the rows."""
    if "Table" in str(inspect.signature(type(spark).createDataFrame).parameters["data"].annotation):
        return spark.createDataFrame(rows, schema)
    return frame_of_pieces(spark, lambda _: rows.to_batches(), 1, schema)


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema of an Arrow schema; a timestamp without zone is TIMESTAMP_NTZ, as from 4.2 on."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a Spark schema; a timestamp is of the zone UTC, as always before 4.2."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def repartition_by_id(rows: DataFrame, count: int, subtask: str, *, joined: bool) -> tuple[DataFrame, Column]:
    """Shuffle rows so that partition n has those whose `subtask` is n; see `DataFrame.repartitionById` of Spark 4.1.

    Before it, Spark gets a number whose hash it sends to the partition. For a join, the number is a further column,
    `PARTITION`: Spark takes equal expressions for different ones if sessions differ in their ANSI mode, and would
    shuffle again.

    Args:
        subtask: an integer in SQL, at least 0 and less than `count`.
        joined: whether the rows will be joined by what they are partitioned by.

    Returns:
        The shuffled rows, and what they are partitioned by: a join on it of two such frames shuffles nothing.
    """
    if hasattr(type(rows), "repartitionById"):
        by = F.expr(subtask)
        return rows.repartitionById(count, by), by
    keys = ", ".join(map(str, _keys_of(rows.sparkSession, count)))
    by = F.expr(f"element_at(array({keys}), {subtask} + 1)")
    if not joined:
        return rows.repartition(count, by), by
    shuffled = rows.withColumn(PARTITION, by).repartition(count, F.col(PARTITION))
    return shuffled, shuffled[PARTITION]


def _keys_of(spark: SparkSession, count: int) -> list[int]:
    """Ask Spark, once per number of partitions, for an integer that its hash partitioning sends to each of them."""
    tried = int(count * (math.log(count) + 8))  # enough for all but one in 3000 numbers of partitions
    while count not in _keys:
        query = f"SELECT transform(sequence(0, {tried - 1}), i -> pmod(hash(cast(i AS int)), {count})) AS partitions"
        [[partitions]] = spark.sql(query).collect()  # a job of one task
        first = {partition: key for key, partition in reversed(list(enumerate(partitions)))}
        if len(first) == count:
            _keys[count] = [first[partition] for partition in range(count)]
        tried *= 2
    return _keys[count]
