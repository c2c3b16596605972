"""What a step's operators read, as frames: the columns that they take, keys cast to their declared types, and the rows
of several inputs together.

The rows of a micro-batch are those of one source, or, of several, a union: each source is a column, a struct of its
columns, which is null in the rows of the others (`unite`). So an operator that reads two sources takes their rows out
of one frame, and Spark reads nothing twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from siltstone.errors import SiltstoneError, UsageError
from siltstone.operator import Operator
from siltstone.run.inputs import HASH, READ, TO, check_columns, internal_names, list_columns, original_column
from siltstone.run.read_rows import combine_all, combined_schema
from siltstone.run.task import StepTask
from siltstone.run.users_code import OperatorFailed
from siltstone.spark.executor import map_in_arrow
from siltstone.spark.key_casts import cast_key, check_key_types, needs_no_cast
from siltstone.spark.placement import PLACED
from siltstone.spark.types import is_for_python, quote, spark_type
from siltstone.spark.versions import spark_schema
from siltstone.time.event_time import RowTimes

CASE = "spark.sql.caseSensitive"


def unite(sources: Mapping[str, DataFrame], columns: Mapping[str, Iterable[str]]) -> DataFrame:
    """Make one frame of several sources: a struct per source, null in the rows of the others.

    Args:
        columns: source -> those of its columns that operators read.
    """
    parts = [rows.selectExpr(_struct(columns[name], {}, name)) for name, rows in sources.items()]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)


def schemas_of(schema: T.StructType, sources: Sequence[str]) -> dict[str, T.StructType]:
    """Return source -> its columns, of the schema of a micro-batch."""
    if len(sources) == 1:
        return {sources[0]: schema}
    found: dict[str, Any] = {name: schema[name].dataType for name in sources}
    return found


def rows_of_source(batch: DataFrame, name: str, sources: Sequence[str]) -> DataFrame:
    """Return the rows of one source, with its own columns."""
    return batch if len(sources) == 1 else batch.where(f"{quote(name)} is not null").selectExpr(f"{quote(name)}.*")


def columns_read(
    rows: DataFrame, operator: Operator, times: RowTimes | None = None, name: str | None = None
) -> list[str]:
    """List the columns of an input that a step of the operator takes: those of the key and its inputs, or, if it does
    not say which, all that Python has a type for; those that it is ordered by; and those with the event time.

    Args:
        rows: those of the input.
        name: the input; None for the only one.

    Raises:
        UsageError: a column is missing, has a name that Siltstone uses itself or that Spark does not tell from another,
            is of a type that Python does not have, or is of the key and of another type (`check_key_types`).
    """
    name = name or operator.input_names[0]
    given, combined = rows.schema, operator.combined
    every = [field.name for field in given if is_for_python(field.dataType)]
    keys = list(operator.key_columns(name).values())
    wanted = list(dict.fromkeys([*keys, *list_columns(operator, name, every, times)]))
    used = {each.casefold() for each in (*internal_names(operator), *PLACED)}  # Spark's names know no case
    named = wanted if combined is None else dict.fromkeys([*wanted, *combined.names])
    check_columns(operator, name, [each for each in named if each.casefold() in used], wanted, given.names)
    alike = Counter(map(str.lower, given.names))
    for each in wanted:
        twins = [other for other in given.names if other.lower() == each.lower()] if alike[each.lower()] > 1 else []
        if twins and (twins.count(each) > 1 or rows.sparkSession.conf.get(CASE) != "true"):
            raise UsageError(
                f"operator {operator.name} reads {each}, and {name} has the columns {' and '.join(twins)}, "
                f"which Spark does not tell apart ({CASE}): rename one, or leave it out"
            )
    check_key_types(given, operator, name)
    known = set(every)
    if unread := [each for each in wanted if each not in known]:
        raise UsageError(
            f"operator {operator.name} reads {unread[0]}, whose type Python does not have "
            f"({given[unread[0]].dataType.simpleString()}): convert it in the source"
        )
    return wanted


def keyed_rows(rows: DataFrame, task: StepTask) -> DataFrame:
    """Select the columns that the operator reads of its only input and the event time, with keys cast to the declared
    types, and the hash of the key.

    With dead letters, a key that cannot be cast is null, and its original value is kept in a column of its own.
    """
    operator, fails = task.operator, not task.sorts_out
    (name,) = operator.input_names
    columns = _select(rows, columns_read(rows, operator, task.times.get(name)), operator, fails=fails)
    if operator.combined is not None:
        carried = [READ] if task.read_sources else []
        # Rows of a source are digested before they are combined, by the hash.
        given = _frame(rows, columns, operator) if carried else rows.selectExpr(*_named(columns))
        combined = _combine(given, task)
        chosen = _select(combined, operator.combined.names, operator, fails=fails)
        return _frame(combined, chosen, operator, *carried)
    given = rows.schema
    cast = [f.name for f in operator.key if not needs_no_cast(given[f.name].dataType, spark_type(f.type))]
    originals = [] if fails else [f"{quote(name)} as {quote(original_column(name))}" for name in cast]
    return _frame(rows, columns, operator, *originals)


def hash_of(keys: Iterable[str]) -> str:
    """Return SQL that adds the hash of a key.

    It goes through the shuffle: to compute it again behind that would take a further call of the Dataset.

    Args:
        keys: SQL for each of the key's columns.
    """
    return f"xxhash64({', '.join(keys)}) as {HASH}"


def _select(rows: DataFrame, names: Sequence[str], operator: Operator, *, fails: bool) -> dict[str, str]:
    """Return column -> SQL for it, of columns by name; for those of the key as their declared types (`cast_key`).

    This is SQL because making a `Column` takes a dozen calls of the JVM.
    """
    given, keys = rows.schema, operator.key.names
    return {
        name: cast_key(quote(name), given[name].dataType, operator, name, fails=fails) if name in keys else quote(name)
        for name in names
    }


def _frame(rows: DataFrame, columns: Mapping[str, str], operator: Operator, *further: str) -> DataFrame:
    """Make the frame of some columns, name -> SQL, of further ones, and of the hash of the key."""
    return rows.selectExpr(*_named(columns), *further, hash_of(columns[name] for name in operator.key.names))


def _named(columns: Mapping[str, str]) -> list[str]:
    """Return SQL that selects some columns, name -> SQL."""
    return [sql if sql == quote(name) else f"{sql} as {quote(name)}" for name, sql in columns.items()]


def _combine(rows: DataFrame, task: StepTask) -> DataFrame:
    """Apply the operator's `combine` to rows before the shuffle."""
    operator, of_source = task.operator, bool(task.read_sources)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from combine_all(operator, batches, of_source=of_source)
        except SiltstoneError as error:
            raise OperatorFailed(error.full_text) from error  # the driver sees only its text, and whose it is

    return map_in_arrow(rows, run, spark_schema(combined_schema(operator, of_source=of_source)))


def keyed_inputs(
    batch: DataFrame | None,
    outputs: Mapping[str, DataFrame],
    schemas: Mapping[str, T.StructType],
    task: StepTask,
) -> DataFrame:
    """Make the rows of an operator with several inputs: the key's columns, of the declared types, a struct per input
    (`run.inputs`), and the hash of the key; with broadcast tables also `TO`.

    Args:
        batch: the micro-batch; None in a step without one.
        outputs: the operators that have put something out -> that.
        schemas: input -> its columns.
    """
    operator, parts = task.operator, list[DataFrame]()
    sources = task.read_sources if batch is not None else ()
    if batch is not None and sources:
        one = len(task.sources) == 1
        own = [_InputOf(schemas[name], task, name, "" if one else f"{quote(name)}.") for name in sources]
        parts.append(own[0].select(batch) if one else _select_sources(batch, own, task))
    read = [name for name in operator.input_names if name in outputs]
    parts += [_InputOf(schemas[name], task, name).select(outputs[name]) for name in read]
    frame = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    for name in operator.input_names:
        if name not in (*sources, *read) and name in schemas:
            kind = _InputOf(schemas[name], task, name).kind
            frame = frame.withColumn(name, F.lit(None).cast(kind))
    return frame


def _select_sources(batch: DataFrame, inputs: Sequence["_InputOf"], task: StepTask) -> DataFrame:
    """Select the rows of some sources of a micro-batch, with the key of each."""
    some = {each.name: f"{quote(each.name)} is not null" for each in inputs}
    rows = batch if len(inputs) == len(task.sources) else batch.where(" or ".join(some.values()))
    keys = {
        key: f"case {' '.join(f'when {some[each.name]} then {each.keys[key]}' for each in inputs)} end"
        for key in task.operator.key.names
    }
    own = {each.name: f"case when {some[each.name]} then {each.struct} end" for each in inputs}
    shared = " or ".join(some[each.name] for each in inputs if each.is_broadcast)
    return rows.selectExpr(*_named(keys | own), *_receivers(task, shared or "false"), hash_of(keys.values()))


def _receivers(task: StepTask, shared: str) -> list[str]:
    """Return SQL for `TO`, by which a row becomes one per subtask; nothing for an operator without broadcast tables.

    Args:
        shared: SQL for whether a row is of a broadcast input.
    """
    if not task.operator.broadcasts:
        return []
    every, none = f"sequence(0, {task.parallelism - 1})", "array(cast(null as int))"
    return [f"explode(case when {shared} then {every} else {none} end) as {TO}"]


class _InputOf:
    """SQL for the rows of one of several inputs of an operator.

    Raises:
        UsageError: the input lacks a column that the operator reads.

    Attributes:
        is_broadcast: whether its rows go to every subtask; they have no key.
        keys: key column -> SQL for it.
        struct: SQL for the struct of the columns that it reads.
        kind: the type of that.
    """

    def __init__(self, schema: T.StructType, task: StepTask, name: str, prefix: str = "") -> None:
        operator, fails = task.operator, not task.sorts_out
        every = [field.name for field in schema if is_for_python(field.dataType)]
        columns, of_key = list_columns(operator, name, every, task.times.get(name)), operator.key_columns(name)
        check_columns(operator, name, [], [*of_key.values(), *columns], schema.names)  # of an output, nobody has yet
        kinds = {key: schema[column].dataType for key, column in of_key.items()}
        self.name, self.is_broadcast, self._task = name, name in operator.broadcast_inputs, task
        nulls = {f.name: f"cast(null as {spark_type(f.type).simpleString()})" for f in operator.key}
        self.keys = nulls | {
            key: cast_key(prefix + quote(column), kinds[key], operator, key, fails=fails)
            for key, column in of_key.items()
        }
        cast = [key for key, kind in kinds.items() if not needs_no_cast(kind, spark_type(operator.key.field(key).type))]
        originals = {original_column(key): of_key[key] for key in cast} if task.sorts_out else {}
        self.struct = _struct(columns, originals, "", prefix)
        chosen = [(column, schema[column].dataType) for column in columns]
        further = [(each, schema[column].dataType) for each, column in originals.items()]
        self.kind = T.StructType([T.StructField(each, kind) for each, kind in [*chosen, *further]])

    def select(self, rows: DataFrame) -> DataFrame:
        """Select the key's columns, the struct and the hash of rows that are all of the input."""
        receivers = _receivers(self._task, "true" if self.is_broadcast else "false")
        return rows.selectExpr(*_named(self.keys | {self.name: self.struct}), *receivers, hash_of(self.keys.values()))


def _struct(columns: Iterable[str], renamed: Mapping[str, str], name: str, prefix: str = "") -> str:
    """Return SQL for a struct of some columns, and of others under other names."""
    fields = [f"{prefix}{quote(column)} as {quote(column)}" for column in columns]
    fields += [f"{prefix}{quote(column)} as {quote(other)}" for other, column in renamed.items()]
    made = f"struct({', '.join(fields)})"
    return f"{made} as {quote(name)}" if name else made
