"""How many rows Spark hands to a Python task at once.

Where Spark bounds the bytes of a batch (`spark.sql.execution.arrow.maxBytesPerBatch`), it measures the batch after each
row, which takes as long as all else that it does for the row in Python's stage, and several times as long for the
structs of several inputs. So the bytes are not bounded where the rows that a step's tasks get are narrow: numbers,
times and texts, of which a batch has few thousand (`spark.sql.execution.arrow.maxRecordsPerBatch`). They stay bounded
for binary values, lists and maps, which one row may have megabytes of; if Python code of the user's runs in the
source, since nobody knows what it is given; and if the user has chosen a bound.

The batches are joined again in Python, because each takes a digest and a call of what handles it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
BOUNDED, UNBOUNDED = str(64 << 20), str((1 << 31) - 1)
_JOINED_ROWS = 1 << 17
_JOINED_BYTES = 64 << 20
_NARROW = (T.NumericType, T.BooleanType, T.StringType, T.DateType, T.TimestampType, T.TimestampNTZType)
_RUNS_PYTHON = ("python", "pandas", "inarrow")
"""parts of the names of a plan's nodes that run Python"""


def choose_batches(rows: DataFrame, others: Iterable[T.StructType]) -> None:
    """Decide, once per query, whether Spark bounds the bytes of its batches: set it in the session of a micro-batch.

    Args:
        rows: the micro-batch, of a session of the query's own.
        others: the columns of other rows that reach Python tasks: what operators return to others, or combine.
    """
    spark = rows.sparkSession
    if not isinstance(spark, SparkSession) or spark.conf.get(BYTES, None) is not None:
        return
    is_narrow = all(_is_narrow(field.dataType) for schema in (rows.schema, *others) for field in schema)
    spark.conf.set(BYTES, UNBOUNDED if is_narrow and not _runs_python(rows) else BOUNDED)


def _is_narrow(kind: T.DataType) -> bool:
    if isinstance(kind, T.StructType):
        return all(_is_narrow(field.dataType) for field in kind)
    return isinstance(kind, _NARROW)


def _runs_python(rows: DataFrame) -> bool:
    frame: Any = rows
    plan = frame._jdf.queryExecution().optimizedPlan().toString().lower()  # which has UDFs as nodes
    return any(name in plan for name in _RUNS_PYTHON)


def join_batches(batches: Iterator[pa.RecordBatch], most_rows: int = _JOINED_ROWS) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches to batches of at most `most_rows` and 64 MiB; one that is larger stays as it is."""
    waiting, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > most_rows or size + batch.nbytes > _JOINED_BYTES):
            yield from _joined(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    yield from _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return batches if len(batches) < 2 else pa.Table.from_batches(batches).combine_chunks().to_batches()
