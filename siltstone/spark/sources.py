"""Opens the sources of a stream for one query, and checks that the stream can read their rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.catalog.records.source_entries import record_name
from siltstone.errors import SiltstoneError, UsageError, summarize
from siltstone.operator import SOURCE, Operator
from siltstone.run.definition import SourceShape, is_named
from siltstone.run.processing import outputs_of
from siltstone.run.widening_rules import COLLATIONS
from siltstone.secret import Secret, hide
from siltstone.spark.inputs import columns_read, unite
from siltstone.spark.key_casts import check_key_types
from siltstone.spark.queries import (
    SOURCE_EVOLUTION,
    check_source,
    describe_sources,
    names_own_sources,
    streaming_leaves,
)
from siltstone.spark.versions import spark_schema
from siltstone.store.open import Warehouse
from siltstone.stream import DIRECTORY, Stream


@dataclass(frozen=True)
class Input:
    """What the query of a stream reads: those of its sources that its operators read.

    Attributes:
        rows: of one such source, its own. Of several, a union: each source is a column of structs, null in the rows of
            the others, with those of its columns that operators read.
        names: per source of Spark's, in order, what the input log calls it; None for a stream whose only source is
            called "source", of which the log has Spark's own text.
        shapes: source -> what it is made of.
    """

    rows: DataFrame
    names: tuple[str, ...] | None
    shapes: Mapping[str, SourceShape]


def open_input(spark: SparkSession, stream: Stream, warehouse: Warehouse, options: Mapping[str, str]) -> Input:
    """Open the sources of a stream definition.

    Args:
        options: source options that differ from their defaults; see `Stream.source`.

    Raises:
        UsageError: a source fails with these options, or lacks a column that the stream reads.
    """
    directory = warehouse.local.source(stream.beside or stream.origin or stream.name)
    secrets = {name: value.read() for name, value in stream.options.items() if isinstance(value, Secret)}
    given = {name: value for name, value in stream.options.items() if not isinstance(value, Secret)}
    every = {**given, **options, **secrets, DIRECTORY: str(directory)}
    opened = {}
    for name in stream.read_sources:
        source = stream.source_functions[name]
        if source is None:
            rows = "rows" if len(stream.source_names) == 1 else "{SOURCE: rows}"
            raise UsageError(
                f"stream {stream.name} has no {_called(stream, name)} of its own: give its rows with "
                f"siltstone.write_stream({rows}, stream)"
            )
        try:
            opened[name] = source(spark, every)
        except SiltstoneError:
            raise
        except Exception as error:  # a user's source may fail in any way
            message = hide(summarize(error), secrets.values())
            cause = None if secrets else error  # a traceback could show them
            raise UsageError(
                f"the {_called(stream, name)} of stream {stream.name} failed: {message}; check its options"
            ) from cause
    return _make_input(stream, opened)


def make_input(stream: Stream, given: DataFrame | Mapping[str, DataFrame]) -> Input:
    """Make what the query of a stream reads, and make sure that the stream can read it.

    Args:
        given: the rows of its source; of several, source -> rows.

    Raises:
        UsageError: they are not streaming DataFrames, a source destroys what it has read, a column is missing, or two
            sources are one.
    """
    frames = _name_frames(stream, given)
    return _make_input(stream, {name: frames[name] for name in stream.read_sources})


def _make_input(stream: Stream, frames: Mapping[str, DataFrame]) -> Input:
    for name, rows in frames.items():
        _check_rows(stream, name, rows)
    _check_outputs(stream)
    _check_distinct(frames)
    shapes = {name: shape_of(stream, rows, name) for name, rows in frames.items()}
    if len(frames) == 1:
        [together] = frames.values()
    else:
        together = unite(frames, {name: shape.read for name, shape in shapes.items()})
    if not is_named(stream):
        return Input(together, None, shapes)
    if names_own_sources(together.sparkSession):
        raise UsageError(f"stream {stream.name} names its sources, and so would Spark: set {SOURCE_EVOLUTION} to false")
    return Input(together, _name_sources(frames, together), shapes)


def _name_frames(stream: Stream, given: DataFrame | Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    """Return source -> rows, in the stream's order."""
    wanted = stream.source_names
    if not isinstance(given, Mapping):
        if len(wanted) != 1:
            raise UsageError(
                f"stream {stream.name} has the sources {', '.join(wanted)}: give the rows of each, {{SOURCE: rows}}"
            )
        return {wanted[0]: given}
    if set(given) != set(wanted):
        raise UsageError(
            f"stream {stream.name} has the sources {', '.join(wanted)}, and rows are given of "
            f"{', '.join(given) or 'none'}: give those of each of its sources, and no other"
        )
    return {name: given[name] for name in wanted}


def _called(stream: Stream, source: str) -> str:
    return f"source {source}" if stream.sources else "source"


def _check_rows(stream: Stream, source: str, rows: DataFrame) -> None:
    if not rows.isStreaming:
        raise UsageError(
            f"the {_called(stream, source)} of stream {stream.name} is not a stream: make it with spark.readStream"
        )
    check_source(rows)
    if (column := stream.time_columns.get(source)) is not None:
        _check_event_time(stream, source, column, rows)


def _check_outputs(stream: Stream) -> None:
    """Check that operators can take the keys of the outputs that they read."""
    outputs = {name: _check_output(op, name) for name, op in stream.outputs.items()}
    for operator in stream.operators:
        for name in operator.input_names:
            output = outputs.get(name)
            if output is not None and set(operator.key_columns(name).values()) <= set(output.names):
                check_key_types(output, operator, name)  # else the first rows tell


def _check_distinct(frames: Mapping[str, DataFrame]) -> None:
    leaves = {name: streaming_leaves(rows) for name, rows in frames.items()}
    for (first, some), (second, others) in combinations(leaves.items(), 2):
        if any(one.equals(other) for one in some for other in others):
            raise UsageError(
                f"source {second} reads the same DataFrame as {first}: open it twice (two spark.readStream), or read "
                "one source by two operators"
            )


def _name_sources(frames: Mapping[str, DataFrame], together: DataFrame) -> tuple[str, ...]:
    """Return the name in the record of each of Spark's sources in the plan of `together`, in order.

    One that is used twice has one name: Spark keeps one log of it, and finds it by equality, too.
    """
    leaves, names = iter(streaming_leaves(together)), list[str]()
    for source, rows in frames.items():
        known: list[Any] = []
        for leaf in islice(leaves, len(streaming_leaves(rows))):
            number = next((n for n, each in enumerate(known) if each.equals(leaf)), len(known))
            known += [leaf] if number == len(known) else []
            names.append(record_name(source, number))
    return tuple(names)


def shape_of(stream: Stream, rows: DataFrame, source: str = SOURCE) -> SourceShape:
    """Describe a source of a stream, and what operators read of it.

    Args:
        rows: the streaming DataFrame; of a micro-batch, of which Spark does not tell the sources, they are left out.
    """
    every = {field.name: _describe(field) for field in rows.schema}
    readers = [operator for operator in stream.operators if source in operator.input_names]
    times = [stream.row_times(operator).get(source) for operator in readers]
    read = dict.fromkeys(
        name for op, of in zip(readers, times, strict=True) for name in columns_read(rows, op, of, source)
    )
    chosen = {name: of for name, of in every.items() if name in read}
    reads_all = not all(operator.columns_of(source) for operator in readers)
    return SourceShape(every, chosen, reads_all, describe_sources(rows) if rows.isStreaming else None)


def _describe(field: T.StructField) -> Mapping[str, Any]:
    of = field.jsonValue()
    collations = of["metadata"].get(COLLATIONS)
    return {"type": of["type"], **({"collations": collations} if collations else {})}


def _check_output(operator: Operator, name: str) -> T.StructType:
    """Return the Spark schema of an output of an operator."""
    made = T.StructType()
    for field in outputs_of([operator])[name]:
        try:
            made = made.add(spark_schema(pa.schema([field]))[0])
        except PySparkTypeError:
            raise UsageError(
                f"operator {operator.name}: column {field.name} of its output is {field.type}, a type that Spark does "
                "not have: declare another, such as a wider signed integer for an unsigned one"
            ) from None
    return made


def _check_event_time(stream: Stream, source: str, column: str, rows: DataFrame) -> None:
    given, called = rows.schema, _called(stream, source)
    if column not in given.names:
        raise UsageError(f"stream {stream.name}: add column {column}, its event time, to its {called}")
    kind = given[column].dataType
    if not isinstance(kind, T.TimestampType | T.TimestampNTZType | T.DateType):
        raise UsageError(
            f"stream {stream.name}: its event time, column {column}, is {kind.simpleString()}: convert it "
            f"to a timestamp in the {called}"
        )
