"""Deliver staged outputs to a stream's sinks: Spark's tasks read the rows, or the driver if they are few; a Delta table
takes their files as they are, and for a database, for Kafka and for a function that takes Arrow the driver reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JNetworkError

from siltstone.errors import SiltstoneError, StateError, UsageError
from siltstone.format.output import read_again, read_output, staged_schema
from siltstone.run.processing import outputs_of
from siltstone.sinks.arrow import ArrowSink, open_rows
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.resolve import DatabaseOrTopic
from siltstone.store.base import Store
from siltstone.store.open import open_store
from siltstone.stream import Stream

if TYPE_CHECKING:  # Dagster loads sinks of a stream's definition in processes without Spark
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.catalog.records.outbox import OutputRecord

_USUAL = (
    *(pa.bool_(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.date32()),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC")),
)
FEW_BYTES = 1 << 20
"""most bytes of rows that the driver reads itself, which takes less time than a job of Python tasks"""


def deliverers(
    spark: "SparkSession", sinks: Mapping[str, Any], store_url: str
) -> dict[str, Callable[["OutputRecord"], None]]:
    """Map each output's name to a function that delivers it to its sink.

    Args:
        sinks: the resolved sinks (`sinks.resolve`).
    """
    return {name: _deliverer(spark, name, sink, store_url) for name, sink in sinks.items()}


def check_frames(spark: "SparkSession", stream: Stream, sinks: Mapping[str, Any]) -> None:
    """Check that sinks that get a DataFrame can have one of their rows, before a step makes any.

    Spark is asked only about types that not every version has in a DataFrame; a task returns a row of them.

    Raises:
        UsageError: Spark has no such column.
    """
    from siltstone.spark.executor import frame_of_pieces
    from siltstone.spark.failures import describe
    from siltstone.spark.versions import spark_schema

    for name, schema in outputs_of(stream.operators).items():
        unusual = pa.schema([field for field in schema if not _is_usual(field.type)])
        if name not in sinks or isinstance(sinks[name], SinkTable | DatabaseOrTopic | ArrowSink) or not unusual.names:
            continue
        try:
            row = pa.record_batch([pa.nulls(1, field.type) for field in unusual], schema=unusual)
            frame_of_pieces(spark, lambda _, row=row: [row], 1, spark_schema(unusual)).collect()
        except Py4JNetworkError:  # the JVM is gone
            raise
        except Exception as error:  # each version says so in another way
            columns = ", ".join(f"{field.name} {field.type}" for field in unusual)
            raise UsageError(
                f"the sink of {name} gets its rows as a DataFrame, and Spark has none with {columns} "
                f"({describe(error)}): return other types, or give them to an ArrowSink"
            ) from error


def _is_usual(kind: pa.DataType) -> bool:
    """Whether each version of Spark has a column of the type in a DataFrame."""
    types = pa.types
    if types.is_struct(kind) or types.is_list(kind):
        return all(_is_usual(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_decimal128(kind):
        return kind.scale >= 0
    return types.is_signed_integer(kind) or kind in _USUAL


def _deliverer(spark: "SparkSession", name: str, sink: Any, store_url: str) -> Callable[["OutputRecord"], None]:
    def give(output: "OutputRecord") -> None:
        try:
            if isinstance(sink, SinkTable):
                sink.deliver(output)
            elif output.sink_files:  # the sink was a table when these rows were staged
                SinkTable(open_store(store_url), output.stream, name).deliver(output)
            elif isinstance(sink, DatabaseOrTopic):
                sink.deliver(output)
            elif isinstance(sink, ArrowSink):
                sink.function(open_rows(open_store(store_url), output), output.sink_id)
            else:
                deliver = getattr(sink, "deliver", sink)
                deliver(staged_rows(spark, store_url, output), output.sink_id)
        except SiltstoneError:
            raise
        except (Exception, SystemExit) as error:  # a user's sink may fail in any way
            from siltstone.run.outbox import check_output
            from siltstone.spark.failures import describe

            # Spark wraps errors of its tasks: rows that were altered after the commit are not the sink's fault.
            check_output(open_store(store_url), output)
            raise StateError(
                f"stream {output.stream}: the sink of {output.name} failed at checkpoint {output.checkpoint}: "
                f"{describe(error)}; the checkpoint is complete, and the next run delivers it first"
            ) from error

    return give


def staged_rows(spark: "SparkSession", store_url: str, output: "OutputRecord") -> "DataFrame":
    """Make a frame of the rows of an output, from the store; each object is verified before its first row.

    Raises:
        CorruptObject: an object of few rows is missing, cut or altered, in two reads; with many rows the frame's tasks
            fail.
        Unreachable: the store does not answer, likewise.
    """
    from siltstone.spark.executor import frame_of_pieces
    from siltstone.spark.versions import frame_of, spark_schema

    recorded = staged_schema(output.arrow_schema)
    schema, objects = spark_schema(recorded), output.objects
    if not objects:
        return spark.createDataFrame([], schema)
    few = read_few_rows(open_store(store_url), output)
    if few is not None:
        return frame_of(spark, pa.Table.from_batches(few, recorded), schema)

    def read(number: int) -> Iterator[pa.RecordBatch]:
        return read_output(open_store(store_url), objects[number], output.arrow_schema)

    return frame_of_pieces(spark, read, len(objects), schema)


def read_few_rows(store: Store, output: "OutputRecord") -> list[pa.RecordBatch] | None:
    """Read the rows of an output, each object verified first; None if they are more than `FEW_BYTES`.

    Raises:
        CorruptObject: missing, cut or altered, in two reads.
        Unreachable: the store does not answer.
    """
    if sum(stored.bytes for stored in output.objects) > FEW_BYTES:
        return None
    return read_again(lambda: _read_up_to(FEW_BYTES, store, output))


def _read_up_to(most_bytes: int, store: Store, output: "OutputRecord") -> list[pa.RecordBatch] | None:
    batches, size = list[pa.RecordBatch](), 0
    for stored in output.objects:
        for batch in read_output(store, stored, output.arrow_schema):
            batches.append(batch)
            size += batch.nbytes
            if size > most_bytes:  # they compress well
                return None
    return batches
