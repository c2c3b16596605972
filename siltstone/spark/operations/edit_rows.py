"""The rows of an edit, from whatever gives them: a file, a DataFrame, or a function of the state as it is.

They become one checked frame of changes (`TableSchema.shown_changes`), with at most one row for each primary key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from siltstone.change.edit import Editable, Route, cast_changes, check_columns
from siltstone.errors import SiltstoneError, UsageError
from siltstone.spark.executor import map_in_arrow
from siltstone.spark.session import cores
from siltstone.spark.types import quote, spark_type
from siltstone.spark.versions import arrow_schema
from siltstone.state.schema import DELETED, KEY_GROUP
from siltstone.state.types import is_nested
from siltstone.store.checksums import Checksum

Change: TypeAlias = Callable[[DataFrame], DataFrame]
"""makes changes of a variable's rows as they are"""
REFUSED = "__refused"
"""column with the reason why the rows cannot be taken, in one row of its own"""
_TIMES = "__times"
_BATCH_ROWS = 1 << 16
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class EditRows:
    """Rows to apply, before they are read: the name of their source, and a file's checksum."""

    source: str
    checksum: str | None
    rows: Path | DataFrame | Change

    @property
    def of_state(self) -> bool:
        """Whether they are made of the state."""
        return callable(self.rows)

    @classmethod
    def open(cls, rows: Path | DataFrame | Change, edited: Editable) -> "EditRows":
        """Check the columns of a file or a DataFrame, without reading a row.

        Raises:
            UsageError: the file does not exist or is not Parquet, or the columns do not fit.
        """
        if isinstance(rows, Path):
            return cls(str(rows.absolute()), _check_file(rows, edited), rows.absolute())
        if isinstance(rows, Expressions):
            rows.check(edited)
            return cls(str(rows), None, rows)
        if callable(rows):
            return cls(f"function {_name_of(rows)}", None, rows)
        if not isinstance(getattr(rows, "schema", None), StructType):
            raise UsageError(f"rows are {type(rows).__name__}: give a Path, a DataFrame, or a function that makes one")
        check_columns(arrow_schema(rows.schema), edited.schema, "the DataFrame", edited.optional)
        return cls("a DataFrame", None, rows)


@dataclass(frozen=True)
class Expressions:
    """A `Change` by Spark SQL: of the rows for which `where` is true, set columns, or delete them."""

    sets: Mapping[str, str]
    where: str | None
    deletes: bool = False

    def __str__(self) -> str:
        what = "delete" if self.deletes else "set " + ", ".join(f"{name} = {sql}" for name, sql in self.sets.items())
        return what if self.where is None else f"{what} where {self.where}"

    def __call__(self, rows: DataFrame) -> DataFrame:
        """Return the changes. Each expression sees the columns as they are in the state."""
        chosen = rows if self.where is None else rows.where(self.where)
        if self.deletes:
            return chosen.withColumn(DELETED, F.lit(True))
        return chosen.withColumns({name: F.expr(sql) for name, sql in self.sets.items()})

    def check(self, edited: Editable) -> None:
        """Check that it sets columns of the value alone.

        Raises:
            UsageError: it does not.
        """
        schema = edited.schema
        for name in self.sets:
            if name not in schema.value.names:
                is_key = name in schema.primary_key.names
                wrong = f"{name} is a key column, which an edit keeps" if is_key else f"there is no column {name}"
                raise UsageError(f"{wrong}: set value columns, {', '.join(schema.value.names)}")


def changes_frame(
    spark: SparkSession, given: EditRows, edited: Editable, max_parallelism: int, state: Callable[[], DataFrame]
) -> tuple[DataFrame, int, int]:
    """Read and check the rows; return them, persisted, and how many are to put and to delete. Their frame has a column
    more, which is null.

    Args:
        max_parallelism: the number of key groups.
        state: reads the variable as a table, for a `Change`.

    Raises:
        UsageError: the rows do not fit.
    """
    frame = _check_frame(spark, given, edited, state).persist()
    try:
        return frame, *_check_rows(frame, edited, given, max_parallelism)
    except BaseException:
        frame.unpersist()
        raise


def _name_of(change: Change) -> str:
    return f"{getattr(change, '__module__', '?')}.{getattr(change, '__qualname__', type(change).__qualname__)}"


def _check_file(rows: Path, edited: Editable) -> str:
    """Check the columns of a file; return its checksum."""
    if not rows.is_file():
        raise UsageError(f"{rows} is {'a directory' if rows.is_dir() else 'not there'}: name a Parquet file")
    try:
        check_columns(pq.read_schema(rows), edited.schema, str(rows), edited.optional)
        checksum = Checksum()
        with rows.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                checksum.update(piece)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{rows} cannot be read as a Parquet file: {str(error).splitlines()[0]}; name one") from None
    return checksum.text()


def _check_frame(spark: SparkSession, given: EditRows, edited: Editable, state: Callable[[], DataFrame]) -> DataFrame:
    """Read the rows as changes of the table; a row of its own says why a part of them cannot be taken."""
    schema = edited.schema
    fields = [StructField(f.name, spark_type(f.type)) for f in schema.shown_changes]
    shape = StructType([*fields, StructField(REFUSED, StringType())])
    what, optional, variable = given.source, edited.optional, edited.variable
    cast = partial(cast_changes, schema=schema, what=what, optional=optional, variable=variable)
    check = partial(_check_tables, cast=cast, out=arrow_schema(shape))
    rows = given.rows
    if isinstance(rows, Path):
        path, count = str(rows), pq.read_metadata(rows).num_row_groups
        pieces = spark.range(0, count, 1, max(1, min(count, 2 * cores(spark))))
        return pieces.mapInArrow(lambda ids: check(_row_groups(path, ids)), shape)
    frame = _call(rows, given.source, edited, state()) if callable(rows) else rows
    return map_in_arrow(frame, lambda batches: check(_tables(batches)), shape)


def _call(change: Change, source: str, edited: Editable, state: DataFrame) -> DataFrame:
    """Call a function with the state; it has all columns of the table, those that are new since as null.

    Raises:
        UsageError: what it returns does not fit.
    """
    columns = [_as_declared(field, state.columns) for field in edited.schema.shown_rows]
    try:
        made = change(state.select(*columns))
    except (SiltstoneError, PySparkException):
        raise
    except Exception as error:  # the user's code may raise any
        raise UsageError(f"{source} failed: {error!r}", advice="correct it, and edit again") from error
    if not isinstance(made, type(state)):
        raise UsageError(f"{source} returned {type(made).__name__}: let it return a DataFrame of changes")
    check_columns(arrow_schema(made.schema), edited.schema, source, edited.optional)
    return made


def _as_declared(field: pa.Field, there: Sequence[str]) -> Column:
    """Return a column of state with the type that it has now, or null if it is new."""
    if field.name not in there:
        return F.lit(None).cast(spark_type(field.type)).alias(field.name)
    column = F.col(quote(field.name))
    return column if is_nested(field.type) else column.cast(spark_type(field.type)).alias(field.name)


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in batches)


def _row_groups(path: str, ids: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Read some row groups of a file in batches of rows."""
    with pq.ParquetFile(path) as file:
        for batch in ids:
            yield from _tables(file.iter_batches(_BATCH_ROWS, batch.column(0).to_pylist()))


def _check_tables(
    rows: Iterator[pa.Table], cast: Callable[[pa.Table], pa.Table], out: pa.Schema
) -> Iterator[pa.RecordBatch]:
    refused = None
    for table in rows:
        if refused is None:
            try:
                changes = cast(table).cast(pa.schema(list(out)[:-1]))
                yield from changes.append_column(REFUSED, pa.nulls(len(changes), pa.string())).to_batches()
            except UsageError as error:
                refused = str(error)  # read on to the end: Spark does not reuse a worker that stops early
    if refused is not None:
        nulls = [pa.nulls(1, field.type) for field in list(out)[:-1]]
        yield pa.record_batch([*nulls, pa.array([refused])], schema=out)


def _check_rows(frame: DataFrame, edited: Editable, given: EditRows, max_parallelism: int) -> tuple[int, int]:
    """Check the changes; return the numbers of rows to put and to delete.

    Raises:
        UsageError: a row does not fit, there are no rows, or a key is repeated.
    """
    what, names = given.source, edited.schema.primary_key.names
    deleted = F.coalesce(F.sum(F.col(DELETED).cast("long")), F.lit(0))
    group = F.max(F.col(KEY_GROUP)) if edited.route is Route.KEY_GROUP else F.lit(0)
    summary = frame.agg(F.max(REFUSED), F.count("*"), deleted, group).first()
    assert summary is not None
    refused, count, deletes, highest = summary
    if refused is not None:
        raise UsageError(refused)
    if not count:
        advice = "change what chooses them" if given.of_state else "add the rows to put or delete"
        raise UsageError(f"{what} has no rows", advice=advice)
    if highest >= max_parallelism:
        raise UsageError(f"{what} has key group {highest}: use those of the stream, 0 to {max_parallelism - 1}")
    keys = [F.col(quote(name)) for name in names]
    repeated = frame.groupBy(*keys).agg(F.count("*").alias(_TIMES)).where(f"{_TIMES} > 1")
    shown = [key.cast("string").alias(name) for key, name in zip(keys, names, strict=True)]  # Python has not all times
    summary = repeated.agg(F.count("*"), F.min(F.struct(*shown))).first()
    assert summary is not None
    if summary[0]:
        such = ", ".join(f"{name} {value}" for name, value in summary[1].asDict().items())
        raise UsageError(f"{what} has {summary[0]} keys more than once, such as {such}: name each once")
    return count - deletes, deletes
