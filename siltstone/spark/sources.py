"""Opens the source of a stream, and checks that the stream can read its rows."""

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from siltstone.errors import SiltstoneError, UsageError, summarize
from siltstone.operator import SOURCE
from siltstone.secret import Secret, hide
from siltstone.spark.queries import check_source
from siltstone.spark.step import columns_read
from siltstone.store.open import Warehouse
from siltstone.stream import DIRECTORY, Stream


def open_source(spark: SparkSession, stream: Stream, warehouse: Warehouse, options: Mapping[str, str]) -> DataFrame:
    """Open the source of a stream definition as a streaming DataFrame.

    Args:
        options: source options that differ from their defaults; see `Stream.source`.

    Raises:
        UsageError: the source fails with these options, or lacks a column that the stream reads.
    """
    if stream.source is None:
        raise UsageError(
            f"stream {stream.name} has no source of its own: give its rows with siltstone.write_stream(rows, stream)"
        )
    directory = warehouse.local.source(stream.beside or stream.origin or stream.name)
    secrets = {name: value.read() for name, value in stream.options.items() if isinstance(value, Secret)}
    given = {name: value for name, value in stream.options.items() if not isinstance(value, Secret)}
    try:
        rows = stream.source(spark, {**given, **options, **secrets, DIRECTORY: str(directory)})
    except SiltstoneError:
        raise
    except Exception as error:  # a user's source may fail in any way
        message = hide(summarize(error), secrets.values())
        cause = None if secrets else error  # a traceback could show them
        raise UsageError(f"the source of stream {stream.name} failed: {message}; check its options") from cause
    check_rows(stream, rows)
    return rows


def check_rows(stream: Stream, rows: DataFrame) -> None:
    """Make sure that a stream can read these rows.

    Raises:
        UsageError: they are not a streaming DataFrame, its source destroys what it has read, or a column is missing.
    """
    if not rows.isStreaming:
        raise UsageError(f"the source of stream {stream.name} is not a stream: make it with spark.readStream")
    check_source(rows)
    if stream.event_time is not None and stream.event_time not in rows.columns:
        raise UsageError(f"stream {stream.name}: add column {stream.event_time}, its event time, to its source")
    for operator in stream.operators:
        if operator.reads == SOURCE:
            columns_read(rows, operator)
