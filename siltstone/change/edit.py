"""State edits: rows put into one variable, or deleted from it, by hand, as a step of its own.

Rows come as a table of changes of what the variable is when it is read as a table: the primary key, the value columns
and `__deleted`, which marks the keys to delete. They are checked batch by batch before the stream is taken over
(`check_columns`, `cast_changes`). The changes are then the input rows of one step, in which `EditOperator` replaces the
operator, and the variable applies them (`state.edits`).
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import UsageError
from siltstone.model import Kind
from siltstone.operator import Operator, Rows, State
from siltstone.run.task import StepTask
from siltstone.state.access import check_values
from siltstone.state.backend import KeyedState
from siltstone.state.columns import one_array
from siltstone.state.hashing import normalise_keys
from siltstone.state.nested import encode_nested, stored_columns
from siltstone.state.schema import DELETED, TableSchema
from siltstone.state.ttl import TTL
from siltstone.state.types import is_nested
from siltstone.state.variables import DueColumn, Variable
from siltstone.stream import Stream

COUNTS = pa.schema([("upserts", pa.int64()), ("inserts", pa.int64()), ("deletes", pa.int64()), ("absent", pa.int64())])
"""what `EditOperator` returns: rows put, new keys among them, rows deleted, keys to delete that did not exist"""


class Route(StrEnum):
    """To which subtasks a row of an edit goes."""

    KEY = "key"
    """that of its key"""
    KEY_GROUP = "key group"
    """that of the key group in the column `key_group`: an opaque variable"""
    EVERY = "every subtask"
    """all: a broadcast table"""


@dataclass(frozen=True)
class Editable:
    """A variable to edit.

    Attributes:
        name: its name; `prepared` for what the operator prepares.
    """

    operator: Operator
    name: str

    @classmethod
    def find(cls, stream: Stream, operator: str, variable: str) -> "Editable":
        """Find an operator and one of its variables.

        Raises:
            UsageError: it does not exist.
        """
        found = {op.name: op for op in stream.operators}.get(operator)
        if found is None:
            known = ", ".join(op.name for op in stream.operators)
            raise UsageError(f"stream {stream.name} has no operator {operator!r}: it has {known}")
        variables = found.variables()
        if variable not in variables:
            raise UsageError(f"operator {operator} has no variable {variable!r}: it has {', '.join(variables)}")
        return cls(found, variable)

    @property
    def variable(self) -> Variable:
        """The variable."""
        return self.operator.variables()[self.name]

    @property
    def schema(self) -> TableSchema:
        """The columns of its edits."""
        return self.variable.edit_schema(self.name, self.operator.key)

    @property
    def optional(self) -> tuple[str, ...]:
        """The value columns that rows to put may lack."""
        return self.variable.optional

    @property
    def route(self) -> Route:
        """To which subtasks its rows go."""
        if self.name in self.operator.broadcasts:
            return Route.EVERY
        return Route.KEY_GROUP if self.variable.kind is Kind.OPAQUE else Route.KEY


def check_columns(given: pa.Schema, schema: TableSchema, what: str, optional: Sequence[str] = ()) -> None:
    """Check that a table's changes can be read from given columns.

    Args:
        what: names the source of the columns, for errors.
        optional: value columns that rows to put may lack.

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
        optional: value columns that rows to put may lack.
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
    if is_nested(wanted) and (pa.types.is_list(given) or pa.types.is_large_list(given)):
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
    rounds = pa.types.is_floating(field.type) or (pa.types.is_decimal(field.type) and pa.types.is_floating(column.type))
    if rounds and not _same_numbers(column, cast):
        raise UsageError(
            f"{what}: column {field.name} does not fit {field.type}: digits of {column.type} would be lost; round it"
        )
    return cast


def _same_values(column: pa.Array, cast: pa.Array) -> bool:
    """Whether a cast to a nested type kept every value; of floats, Arrow rounds silently."""
    plain = _without_large(column.type)
    try:
        return encode_nested(cast.cast(plain)).equals(encode_nested(column.cast(plain)))
    except pa.ArrowInvalid:
        return False


def _without_large(kind: pa.DataType) -> pa.DataType:
    """Return a type with offsets of 32 bits for those of 64, as some writers of Parquet files use them."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_large(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_without_large(kind.value_type)))
    return pa.string() if pa.types.is_large_string(kind) else pa.binary() if pa.types.is_large_binary(kind) else kind


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


class _WholeState(Variable):
    """Bound, it is the subtask's state."""

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return {}

    def bind(self, name: str, state: KeyedState) -> KeyedState:
        return state


def edit_task(task: StepTask, edited: Editable) -> StepTask:
    """Return the task that applies changes, in place of the operator's own."""
    return replace(task, operator=EditOperator(edited), times={}, staged={}, hands_on=True, dead_letters=None)


class EditOperator(Operator):
    """Replaces an operator during one step. It has the same name and variables; its input rows are changes of one of
    them, and it returns how many there were (`COUNTS`). Its key is that of the changes."""

    def __init__(self, edited: Editable) -> None:  # the operator that it stands for was checked
        self.edited = edited
        self.name, self.key = edited.operator.name, edited.schema.key
        self.nullable = tuple(field.name for field in self.key if field.nullable)
        self.output, self.takes_all = COUNTS, edited.variable.edits_keys

    def variables(self) -> dict[str, Variable]:
        """Return the operator's variables."""
        return self.edited.operator.variables()

    def declared_variables(self) -> dict[str, Variable]:
        """Return what `process` uses: the whole state."""
        return {"whole": _WholeState()}

    def tables(self) -> dict[str, TableSchema]:
        """Return the operator's tables, whose key is not always that of the changes."""
        return self.edited.operator.tables()

    def due_columns(self) -> dict[str, DueColumn]:
        """Return nothing: nothing fires in an edit."""
        return {}

    def ttls(self) -> dict[str, TTL]:
        """Return nothing: rows have the stamps that the edit gives them."""
        return {}

    @property
    def broadcasts(self) -> dict[str, str]:
        """Return nothing: an edit has no row for them."""
        return {}

    def defines(self, callback: str) -> bool:
        """Whether the operator has a callback that still comes: `checkpoint`, on the driver, with what it prepared
        before the edit. None comes in a task."""
        return callback == "checkpoint" and self.edited.operator.defines(callback)

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Apply the changes; each key is among them at most once."""
        edited, schema = self.edited, self.edited.schema
        what = f"the edit of {self.name}.{edited.name}"
        changes = cast_changes(rows.table, schema, what, edited.optional, edited.variable)
        changes = stored_columns(changes, schema.nested)
        for field, column in zip(changes.schema, normalise_keys(changes).columns, strict=True):
            if field.name in schema.primary_key.names:
                changes = changes.set_column(changes.column_names.index(field.name), field, column)
        try:
            done = edited.variable.edit(edited.name, state.whole, changes, rows.key_groups)
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            why = str(error).splitlines()[0]
            raise UsageError(f"{what} does not fit into memory at once: {why}", advice="edit fewer rows") from error
        return pa.table([[count] for count in astuple(done)], schema=COUNTS)
