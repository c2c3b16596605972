"""State edits: rows put into one variable's table, or deleted from it, by hand, as a step of its own.

Rows come as a table of changes (`TableSchema.changes`): the primary key, the value columns and `__deleted`, which marks
the keys to delete. They are checked batch by batch before the stream is taken over (`check_columns`, `cast_changes`).
The changes are then the input rows of one step, in which `EditOperator` replaces the operator.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import UsageError
from siltstone.model import Kind
from siltstone.operator import Operator, Rows, State
from siltstone.state.access import check_values
from siltstone.state.backend import SubtaskState
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.hashing import normalise_keys
from siltstone.state.nested import encode_nested, stored_columns
from siltstone.state.protocol import apply_delta
from siltstone.state.schema import DELETED, WRITTEN_AT, TableSchema
from siltstone.state.types import is_nested
from siltstone.state.variables import Variable
from siltstone.stream import Stream

COUNTS = pa.schema([("upserts", pa.int64()), ("inserts", pa.int64()), ("deletes", pa.int64()), ("absent", pa.int64())])
"""what `EditOperator` returns: rows put, new keys among them, rows deleted, keys to delete that did not exist"""


def find_editable(stream: Stream, operator: str, variable: str) -> tuple[Operator, TableSchema]:
    """Find an operator and the table of one of its variables.

    Raises:
        UsageError: the operator or variable does not exist, or variables of its kind cannot be edited.
    """
    found = {op.name: op for op in stream.operators}.get(operator)
    if found is None:
        known = ", ".join(op.name for op in stream.operators)
        raise UsageError(f"stream {stream.name} has no operator {operator!r}: it has {known}")
    variables = found.declared_variables()
    if variable not in variables:
        raise UsageError(f"operator {operator} has no variable {variable!r}: it has {', '.join(variables)}")
    if variables[variable].kind is Kind.OPAQUE:
        raise UsageError(
            f"variable {variable} of {operator} is opaque: its bytes have no rows and columns to edit; "
            "change it in the operator's own code"
        )
    if variable in found.broadcasts:
        raise UsageError(
            f"variable {variable} of {operator} is a broadcast table, whose rows are those of its input "
            f"{found.broadcasts[variable]}: let that give a newer row"
        )
    if assigned := variables[variable].assigns:
        kind = type(variables[variable]).__name__
        raise UsageError(
            f"variable {variable} of {operator} is a {kind}: it assigns the {assigned} of its rows itself; "
            "edit values and maps only"
        )
    return found, found.tables()[variable]


def optional_columns(operator: Operator, variable: str) -> tuple[str, ...]:
    """Return the value columns that rows to put may lack: the stamp of a TTL, which the next step then makes."""
    return (WRITTEN_AT,) if variable in operator.ttls() else ()


def check_columns(given: pa.Schema, schema: TableSchema, what: str, optional: Sequence[str] = ()) -> None:
    """Check that a table's changes can be read from given columns.

    Args:
        what: names the source of the columns, for errors.
        optional: see `optional_columns`.

    Raises:
        UsageError: an unknown, missing or repeated column, or one whose type cannot be cast to the table's.
    """
    known = ", ".join(f"{field.name} {field.type}" for field in schema.shown_changes)
    repeated = sorted({name for name in given.names if given.names.count(name) > 1})
    if repeated:
        raise UsageError(f"{what} has column {repeated[0]} twice: leave one out; the table has {known}")
    for name in given.names:
        if name not in schema.shown_changes.names:
            raise UsageError(f"{what} has the unknown column {name!r}: use those of the table, {known}")
    for name in schema.primary_key.names:
        if name not in given.names:
            raise UsageError(f"{what} lacks key column {name}: add it; the table has {known}")
    lacking = _missing_columns(given, schema, optional)
    if lacking and DELETED not in given.names:
        raise UsageError(f"{what} lacks column {lacking[0]}, which rows that are not deleted must have")
    for field in schema.shown_changes:
        if field.name in given.names and not _fits(given.field(field.name).type, field.type):
            raise UsageError(
                f"{what}: column {field.name} is {given.field(field.name).type}, not {field.type}: cast it"
            )


def cast_changes(
    rows: pa.Table, schema: TableSchema, what: str, optional: Sequence[str] = (), variable: Variable | None = None
) -> pa.Table:
    """Cast rows with checked columns to changes (`schema.shown_changes`). Without `__deleted`, no row is a deletion.

    Args:
        what: names the source of the rows, for errors.
        optional: see `optional_columns`.
        variable: checks the rows to put.

    Raises:
        UsageError: a key is null where it must not be, a value would change by the cast, a row to put lacks a
            column, or the variable refuses one.
    """
    columns = {}
    for field in [*schema.primary_key, pa.field(DELETED, pa.bool_(), nullable=False)]:
        if field.name not in rows.column_names:
            columns[DELETED] = pa.array(np.zeros(rows.num_rows, bool))
            continue
        columns[field.name] = column = _cast(rows, field, what)
        if column.null_count and not field.nullable:
            raise UsageError(f"{what}: column {field.name} is null in {column.null_count} rows: each needs a value")
    lacking = _missing_columns(rows.schema, schema, optional)
    puts = rows.num_rows - (pc.sum(columns[DELETED]).as_py() or 0)  # pyright: ignore[reportAttributeAccessIssue]
    if lacking and puts:
        raise UsageError(f"{what} lacks column {lacking[0]}, which rows that are not deleted must have")
    for field in schema.shown_value:
        there = field.name in rows.column_names
        columns[field.name] = _cast(rows, field, what) if there else pa.nulls(rows.num_rows, field.type)
    changes = pa.table([columns[name] for name in schema.shown_changes.names], schema=schema.shown_changes)
    if variable is not None and puts:
        try:
            variable.check_edit(changes.filter(pc.invert(columns[DELETED])))  # pyright: ignore[reportAttributeAccessIssue]
        except UsageError as error:
            raise UsageError(f"{what}: {error}", advice=error.advice) from None
    return changes


def _missing_columns(given: pa.Schema, schema: TableSchema, optional: Sequence[str]) -> list[str]:
    return [name for name in schema.value.names if name not in given.names and name not in optional]


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether some values of one type can be cast to the other; the cast itself checks each value."""
    if pa.types.is_dictionary(given):
        given = given.value_type
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        names = [field.name for field in given]
        return sorted(names) == sorted(field.name for field in wanted) and all(
            _fits(given.field(field.name).type, field.type) for field in wanted
        )
    if is_nested(wanted) and pa.types.is_list(given):
        return pa.types.is_list(wanted) and _fits(given.value_type, wanted.value_type)
    return pa.types.is_null(given) or _sort(given) == _sort(wanted)


def _sort(kind: pa.DataType) -> str:
    of = pa.types
    if of.is_integer(kind) or of.is_floating(kind) or of.is_decimal(kind):
        return "number"
    if of.is_string(kind) or of.is_large_string(kind):
        return "string"
    if of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind):
        return "binary"
    return "date" if of.is_date(kind) else str(kind)


def _cast(rows: pa.Table, field: pa.Field, what: str) -> pa.Array:
    """Cast one column to the field's type.

    Raises:
        UsageError: a value would change, or is not of its own type.
    """
    column = one_array(rows.column(field.name))
    check_values(column, f"{what}: column {field.name}")
    if column.type == field.type:
        return column
    try:
        cast = column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"{what}: column {field.name} does not fit {field.type}: {why}; correct it") from None
    if is_nested(field.type) and not _same_values(column, cast):
        raise UsageError(f"{what}: column {field.name} does not fit {field.type}: a value would change; round it")
    if pa.types.is_floating(field.type) and not _same_numbers(column, cast):
        raise UsageError(
            f"{what}: column {field.name} does not fit {field.type}: digits of {column.type} would be lost; round it"
        )
    return cast


def _same_values(column: pa.Array, cast: pa.Array) -> bool:
    """Whether a cast to a nested type kept every value; of floats, Arrow rounds silently."""
    back = cast.cast(column.type)
    return encode_nested(back).equals(encode_nested(column))


def _same_numbers(column: pa.Array, cast: pa.Array) -> bool:
    """Whether a cast to floats kept every number; Arrow rounds silently."""
    try:
        back = cast.cast(column.type)
    except pa.ArrowInvalid:
        return False
    same = pc.equal(back, column)  # pyright: ignore[reportAttributeAccessIssue]
    if pa.types.is_floating(column.type):
        both_nan = pc.and_(pc.is_nan(back), pc.is_nan(column))  # pyright: ignore[reportAttributeAccessIssue]
        same = pc.or_(same, both_nan)  # pyright: ignore[reportAttributeAccessIssue]
    return pc.all(same).as_py() is not False  # pyright: ignore[reportAttributeAccessIssue]


class _EditedVariable(Variable):
    """Replaces the edited variable: bound, it is the subtask's whole state."""

    def __init__(self, real: Variable) -> None:
        self._real = real

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return self._real.tables(name, key)

    def bind(self, name: str, state: SubtaskState) -> SubtaskState:
        return state


class EditOperator(Operator):
    """Replaces an operator during one step. It has the same name, key and variables; its input rows are changes of one
    variable, and it returns how many there were (`COUNTS`)."""

    def __init__(self, edited: Operator, variable: str) -> None:
        self._edited, self._variable = edited, variable
        super().__init__(name=edited.name, key=edited.key, nullable=edited.nullable, output=COUNTS)

    def variables(self) -> dict[str, Variable]:
        """Return the operator's variables, with the edited one replaced."""
        own: Mapping[str, Variable] = self._edited.variables()
        return {**own, self._variable: _EditedVariable(own[self._variable])}

    @property
    def broadcasts(self) -> dict[str, str]:
        """Return nothing: an edit has no row for them."""
        return {}

    def defines(self, callback: str) -> bool:
        """Whether the operator has a callback that still comes: `checkpoint`, on the driver, with what it prepared
        before the edit. None comes in a task."""
        return callback == "checkpoint" and self._edited.defines(callback)

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Apply the deletions, then the puts; each key is among the changes at most once."""
        held: SubtaskState = getattr(state, self._variable)
        table = held.tables[self._variable]
        optional, variable = optional_columns(self._edited, self._variable), self._edited.variables()[self._variable]
        what = f"the edit of {self.name}.{self._variable}"
        changes = cast_changes(rows.table, table.schema, what, optional, variable)
        changes = stored_columns(changes, table.schema.nested)
        for field, column in zip(changes.schema, normalise_keys(changes).columns, strict=True):
            if field.name in table.schema.primary_key.names:
                changes = changes.set_column(changes.column_names.index(field.name), field, column)
        deleted = fixed_values(one_array(changes.column(DELETED))).astype(bool)
        counts = []
        for which in (deleted, ~deleted):
            before = table.rows
            apply_delta(held, self._variable, changes.filter(pa.array(which)), rows.key_groups[which])
            counts.append((int(which.sum()), abs(table.rows - before)))
        (asked, deletes), (upserts, inserts) = counts
        return pa.table([[upserts], [inserts], [deletes], [asked - deletes]], schema=COUNTS)
