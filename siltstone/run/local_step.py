"""Run a step of every operator in this process, without Spark: what Spark does to the rows is done here.

Keys are cast to the declared types as in `spark.key_casts`: a value that does not stay the same is refused. Rows are
combined, hashed, sent to the subtask of their key group, and sorted there. Each task gets a copy of its operator, as a
Spark worker does, so what the operator keeps in attributes is lost after the task.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import UsageError
from siltstone.operator import Operator
from siltstone.run.fusing import check_keys
from siltstone.run.inputs import (
    HASH,
    READ,
    TO,
    check_columns,
    hash_keys,
    internal_names,
    list_columns,
    misfit_reason,
    original_column,
)
from siltstone.run.processing import ACKNOWLEDGEMENT, outputs_of, rows_of_output
from siltstone.run.read_rows import combine_all, combined_schema
from siltstone.run.subtask import run_subtask
from siltstone.run.task import StepTask
from siltstone.run.users_code import OperatorFailed
from siltstone.state.columns import fixed_values, null_mask, one_array
from siltstone.state.hashing import key_groups
from siltstone.state.json_rows import SHOWN_CHARACTERS, json_rows
from siltstone.state.types import is_nested
from siltstone.stream import Stream

_compute: Any = pyarrow.compute
_SPARKS = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.date64(): pa.date32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}
"""types of which Spark has no columns -> the type that it gives them"""
_WHOLE = {pa.float32(): 1 << 24, pa.float64(): 1 << 53}
"""greatest integer up to which a float represents each"""


def run_step(
    stream: Stream, tasks: Mapping[str, StepTask], rows: Mapping[str, pa.Table] | None
) -> tuple[dict[str, pa.Table], dict[str, list[Acknowledgement]]]:
    """Run one step of every operator, each after the one it reads, subtask after subtask.

    Args:
        tasks: operator -> its task.
        rows: source -> its rows, with Spark's types (`as_spark`); None for a step without rows.

    Returns:
        Output -> its rows, and operator -> the acknowledgements of its subtasks.

    Raises:
        UsageError: rows lack a column that an operator reads, or have a key that cannot be cast.
        SiltstoneError, OperatorFailed: the error of a subtask, or its operator does not keep the key as it says.
    """
    outputs, received = dict[str, pa.Table](), dict[str, list[Acknowledgement]]()
    for operator in stream.sort_operators():
        task = replace(tasks[operator.name], hands_on=True)
        given = {name: outputs[name] if name in outputs else (rows or {}).get(name) for name in operator.input_names}
        inputs = {name: rows_as_spark(table) for name, table in given.items() if table is not None}
        parts = split_rows(inputs, task) if any(table.num_rows for table in inputs.values()) else {}
        made, received[operator.name] = _run_subtasks(task, parts)
        outputs |= made
    return outputs, received


def _run_subtasks(
    task: StepTask, parts: Mapping[int, Sequence[pa.RecordBatch]]
) -> tuple[dict[str, pa.Table], list[Acknowledgement]]:
    """Run all subtasks of an operator; return output -> its rows, and what they acknowledged."""
    outputs = {name: [columns.empty_table()] for name, columns in outputs_of([task.operator]).items()}
    received = list[Acknowledgement]()
    for subtask in range(task.parallelism):
        own = replace(task, operator=_copy_operator(task.operator))
        for batch in run_subtask(own, subtask, "local", iter(parts.get(subtask, ()))):
            if batch.column(ACKNOWLEDGEMENT).null_count:
                name, rows = rows_of_output(task.operator, batch)
                outputs[name].append(pa.Table.from_batches([rows]))
                if task.operator.keeps_key and name == task.operator.name:
                    check_keys(task, subtask, outputs[name][-1])
            else:
                received.append(Acknowledgement.from_bytes(batch.column(ACKNOWLEDGEMENT)[0].as_py()))
                received[-1].raise_failure()
    return {name: pa.concat_tables(parts) for name, parts in outputs.items()}, received


def _copy_operator(operator: Operator) -> Operator:
    try:
        return deepcopy(operator)
    except TypeError:  # it has something that is not copied by value
        return copy(operator)


def rows_as_spark(rows: pa.Table) -> pa.Table:
    """Return rows with the types that Spark gives their columns."""
    return pa.table([as_spark(column) for column in rows.columns], names=rows.column_names)


def as_spark(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column with the type that Spark gives it."""
    array = one_array(column)
    if pa.types.is_timestamp(array.type):  # Spark cuts off what is below a microsecond
        return array.cast(pa.timestamp("us", array.type.tz), safe=False)
    return array.cast(_SPARKS.get(array.type, array.type))


def split_rows(inputs: Mapping[str, pa.Table], task: StepTask) -> dict[int, list[pa.RecordBatch]]:
    """Return subtask -> its rows, with the hashes of their keys, in the order that the operator wants.

    Args:
        inputs: input -> its rows.

    Raises:
        UsageError: a column is missing, or a key's type cannot be cast to the declared one.
        SiltstoneError, OperatorFailed: `combine` failed, or a key cannot be cast.
    """
    operator = task.operator
    if operator.reads_several:
        chosen = _join_inputs(inputs, task)
    else:
        ((name, rows),) = inputs.items()
        chosen = _select(rows, _list_columns(rows, task, name), task)
    if operator.combined is not None:
        chosen = _combine(chosen, task)
    if not chosen.num_rows:
        return {}
    if operator.broadcasts:
        chosen = _send_to_each(chosen, task)
    if operator.order_by:
        chosen = chosen.take(_sort_order(chosen, operator))
    hashes = hash_keys(chosen, operator)
    chosen = chosen.append_column(HASH, pa.array(hashes.view(np.int64)))
    receiver = key_groups(hashes, task.max_parallelism).astype(np.int64) * task.parallelism // task.max_parallelism
    if operator.broadcasts:
        to = one_array(chosen.column(TO))
        receiver = np.where(null_mask(to), receiver, fixed_values(to))
    return {n: chosen.filter(pa.array(receiver == n)).to_batches() for n in range(task.parallelism)}


def _send_to_each(rows: pa.Table, task: StepTask) -> pa.Table:
    """Add `TO`: the rows of broadcast inputs once for each subtask, and null in the others."""
    shared = np.zeros(len(rows), bool)
    for name in task.operator.broadcast_inputs:
        if name in rows.column_names:
            shared |= ~null_mask(rows.column(name))
    one, each = rows.filter(pa.array(~shared)), rows.filter(pa.array(shared))
    parts = [one.append_column(TO, pa.nulls(len(one), pa.int32()))]
    parts += [each.append_column(TO, pa.array(np.full(len(each), n, np.int32))) for n in range(task.parallelism)]
    return pa.concat_tables(parts)


def _list_columns(rows: pa.Table, task: StepTask, name: str) -> list[str]:
    """List the columns that a step of the operator takes of an input: of the key first."""
    operator = task.operator
    read = list_columns(operator, name, rows.column_names, task.times.get(name))
    wanted = list(dict.fromkeys([*operator.key_columns(name).values(), *read]))
    taken = [each for each in wanted if each in internal_names(operator)]
    check_columns(operator, name, taken, wanted, rows.column_names)
    return wanted


def _join_inputs(inputs: Mapping[str, pa.Table], task: StepTask) -> pa.Table:
    """Put the rows of several inputs together (`run.inputs`)."""
    operator, parts = task.operator, list[pa.Table]()
    for name, rows in inputs.items():
        if not rows.num_columns:
            continue
        _list_columns(rows, task, name)
        of_key = operator.key_columns(name)
        given = {key: rows.column(column) for key, column in of_key.items()}
        given = given or {field.name: pa.nulls(len(rows), field.type) for field in operator.key}
        keys = _select(pa.table(given), list(given), task)
        read = list_columns(operator, name, rows.column_names, task.times.get(name))
        fields = {column: one_array(rows.column(column)) for column in read}
        fields |= {each: one_array(keys.column(each)) for each in keys.column_names if each not in given}
        null = pa.array(
            np.zeros(len(rows), bool)
        )  # no struct is; without any field, only this tells how many there are
        struct = pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=null)
        parts.append(keys.select(list(given)).append_column(name, struct))
    return pa.concat_tables(parts, promote_options="default")


def _select(rows: pa.Table, names: Sequence[str], task: StepTask) -> pa.Table:
    """Select columns, with those of the key as their declared types.

    With dead letters, a key that cannot be cast is null, and its original value is kept in a column of its own.
    """
    operator, columns, originals = task.operator, dict[str, pa.Array](), dict[str, pa.Array]()
    for name in names:
        columns[name] = column = one_array(rows.column(name))
        declared = operator.key.field(name).type if name in operator.key.names else column.type
        if column.type == declared:
            continue
        columns[name] = cast = _cast_key(column, declared, operator, name)
        if task.sorts_out:
            originals[original_column(name)] = column
        elif (lost := null_mask(cast) & ~null_mask(column)).any():
            [shown] = json_rows(pa.table({name: column.filter(pa.array(lost))[:1]}))
            raise OperatorFailed(f"{misfit_reason(operator, name)}: {shown[:SHOWN_CHARACTERS]}")
    return pa.table(columns | originals)


def _cast_key(column: pa.Array, declared: pa.DataType, operator: Operator, name: str) -> pa.Array:
    """Cast a key column; null where a value would not stay the same.

    Raises:
        UsageError: columns of its type are not cast to the declared one.
    """
    given = column.type
    if pa.types.is_null(given) or (pa.types.is_timestamp(given) and pa.types.is_timestamp(declared)):
        return column.cast(declared)
    if not _may_cast(given, declared):
        inputs = " or ".join(operator.input_names)
        raise UsageError(
            f"operator {operator.name}: key column {name} is {given} in {inputs}, and {declared} where it is "
            "declared: declare it as it is, or convert it"
        )
    cast = _try_cast(column, declared)
    back = _try_cast(cast, given)
    same = _compute.equal(back, column)
    if given in _WHOLE:
        same = _compute.or_(same, _compute.and_(_compute.is_nan(back), _compute.is_nan(column)))
    if (given in _WHOLE) != (declared in _WHOLE):
        floats = column if given in _WHOLE else cast
        same = _compute.and_(same, _compute.less_equal(_compute.abs(floats), _WHOLE[floats.type]))
    return _compute.if_else(same, cast, pa.scalar(None, declared))


def _may_cast(given: pa.DataType, declared: pa.DataType) -> bool:
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if any(is_kind(given) for is_kind in numbers):
        return any(is_kind(declared) for is_kind in numbers)
    from_text = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_date)
    return pa.types.is_string(given) and any(is_kind(declared) for is_kind in from_text)


def _try_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column; null where Arrow refuses to."""
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(column) != 1:
            parts = [_try_cast(column.slice(place, 1), kind) for place in range(len(column))]
            return pa.concat_arrays(parts) if parts else pa.nulls(0, kind)
    try:  # of decimals, Arrow looks at the digits of the types, not at those of the value
        return pa.array([Decimal(str(column[0].as_py()))]).cast(kind)
    except (ArithmeticError, ValueError, pa.ArrowException):
        return pa.nulls(1, kind)


def _combine(rows: pa.Table, task: StepTask) -> pa.Table:
    """Combine rows before the shuffle, in one part per subtask, as that many tasks of Spark would."""
    operator = task.operator
    of_source = bool(task.read_sources)
    if of_source:
        rows = rows.append_column(HASH, pa.array(hash_keys(rows, operator).view(np.int64)))
    parts: Iterator[pa.RecordBatch] = iter(rows.combine_chunks().to_batches(-(-rows.num_rows // task.parallelism)))
    schema = combined_schema(operator, of_source=of_source)
    combined = pa.Table.from_batches(combine_all(operator, parts, of_source=of_source), schema)
    chosen = _select(combined, operator.combined.names, task)
    return chosen.append_column(READ, combined.column(READ)) if of_source else chosen


def _sort_order(rows: pa.Table, operator: Operator) -> pa.Array:
    """Return the order of rows as Spark sorts them: nulls first, and NaN after all numbers."""
    keys = dict[str, Any]()
    for name in operator.order_by:
        column = _column_at(rows, name, operator)
        if is_nested(column.type):
            column = _rank_nested(column)
        rank = np.where(null_mask(column), 0, 1)
        if pa.types.is_floating(column.type):
            rank[np.asarray(_compute.fill_null(_compute.is_nan(column), False))] = 2
        keys |= {f"{len(keys)} {name}": rank, f"{len(keys) + 1} {name}": column}
    return _compute.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys])


def _column_at(rows: pa.Table, name: str, operator: Operator) -> pa.Array:
    """Return a column by which rows are sorted: one of several inputs is `INPUT.COLUMN`."""
    if not operator.reads_several or name in operator.key.names:
        return one_array(rows.column(name))
    source, _, column = name.partition(".")
    if source not in rows.column_names:  # it has given no row so far, and has no schema
        return pa.nulls(len(rows), pa.int8())
    if not column:
        return one_array(rows.column(source))
    return _compute.struct_field(one_array(rows.column(source)), column)


def _rank_nested(column: pa.Array) -> pa.Array:
    """Return the ranks of lists and structs, which Spark compares element by element and field by field."""
    order = [_order_of(value) for value in column.to_pylist()]
    ranks = {value: rank for rank, value in enumerate(sorted(set(order)))}
    return pa.array([ranks[value] for value in order], pa.int64(), mask=null_mask(column))


def _order_of(value: Any) -> tuple[Any, ...]:
    """Return a tuple in the order of a Python value: nulls first, and NaN after all numbers."""
    if value is None:
        return (0,)
    if isinstance(value, dict | list):
        return 1, tuple(map(_order_of, value.values() if isinstance(value, dict) else value))
    return (2,) if isinstance(value, float) and math.isnan(value) else (1, value)
