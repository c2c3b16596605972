"""Deliver staged outputs to a stream's sinks: Spark's tasks read the rows, or the driver if they are few; a Delta table
takes their files as they are, and for a database, for Kafka and for a function that takes Arrow the driver reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from siltstone.errors import SiltstoneError, StateError
from siltstone.format.output import read_again, read_output, staged_schema
from siltstone.sinks.arrow import ArrowSink, open_rows
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.resolve import DatabaseOrTopic
from siltstone.store.base import Store
from siltstone.store.open import open_store

if TYPE_CHECKING:  # Dagster loads sinks of a stream's definition in processes without Spark
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.catalog.records.outbox import OutputRecord

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
        except Exception as error:  # a user's sink may fail in any way
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
