"""Opens the source of a stream, and checks that the stream can read its rows."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.errors import SiltstoneError, UsageError, summarize
from siltstone.operator import SOURCE, Operator
from siltstone.run.definition import SourceShape
from siltstone.run.processing import output_schema
from siltstone.run.widening_rules import COLLATIONS
from siltstone.secret import Secret, hide
from siltstone.spark.inputs import columns_read
from siltstone.spark.key_casts import check_key_types
from siltstone.spark.queries import check_source, describe_sources
from siltstone.spark.versions import spark_schema
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
    for column in stream.time_columns.values():
        _check_event_time(stream.name, column, rows)
    for operator in stream.operators:
        if SOURCE in operator.input_names:
            columns_read(rows, operator, stream.row_times(operator).get(SOURCE), SOURCE)
    outputs = {operator.name: _check_output(operator) for operator in stream.operators}
    for operator in stream.operators:
        for name in operator.input_names:
            output = outputs.get(name)
            if output is not None and set(operator.key_columns(name).values()) <= set(output.names):
                check_key_types(output, operator, name)  # else the first rows tell


def shape_of(stream: Stream, rows: DataFrame) -> SourceShape:
    """Describe the source of a stream, and what operators read of it.

    Args:
        rows: the streaming DataFrame; of a micro-batch, of which Spark does not tell the sources, they are left out.
    """
    every = {field.name: _describe(field) for field in rows.schema}
    readers = [operator for operator in stream.operators if SOURCE in operator.input_names]
    read = {name for op in readers for name in columns_read(rows, op, stream.row_times(op).get(SOURCE), SOURCE)}
    chosen = {name: of for name, of in every.items() if name in read}
    reads_all = not all(operator.columns_of(SOURCE) for operator in readers)
    return SourceShape(every, chosen, reads_all, describe_sources(rows) if rows.isStreaming else None)


def _describe(field: T.StructField) -> Mapping[str, Any]:
    of = field.jsonValue()
    collations = of["metadata"].get(COLLATIONS)
    return {"type": of["type"], **({"collations": collations} if collations else {})}


def _check_output(operator: Operator) -> T.StructType:
    """Return the Spark schema of an operator's output."""
    made = T.StructType()
    for field in output_schema(operator):
        try:
            made = made.add(spark_schema(pa.schema([field]))[0])
        except PySparkTypeError:
            raise UsageError(
                f"operator {operator.name}: column {field.name} of its output is {field.type}, a type that Spark does "
                "not have: declare another, such as a wider signed integer for an unsigned one"
            ) from None
    return made


def _check_event_time(stream: str, column: str, rows: DataFrame) -> None:
    given = rows.schema
    if column not in given.names:
        raise UsageError(f"stream {stream}: add column {column}, its event time, to its source")
    kind = given[column].dataType
    if not isinstance(kind, T.TimestampType | T.TimestampNTZType | T.DateType):
        raise UsageError(
            f"stream {stream}: its event time, column {column}, is {kind.simpleString()}: convert it "
            "to a timestamp in the source"
        )
