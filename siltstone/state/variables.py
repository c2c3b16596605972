"""The kinds of state variable, as an operator declares them. Columns are `{name: type}` or an Arrow
schema."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import Kind
from siltstone.state.access import (
    DUE,
    HEAD,
    POSITION,
    TAIL,
    ListAccess,
    MapAccess,
    OpaqueAccess,
    TimerAccess,
    ValueAccess,
    WindowAccess,
)
from siltstone.state.backend import KeyedState
from siltstone.state.broadcast import BroadcastAccess
from siltstone.state.edits import Edited, edit_list, edit_opaque, edit_table
from siltstone.state.schema import KEY_GROUP, OPAQUE_SCHEMA, OPAQUE_VALUE, WRITTEN_AT, TableSchema
from siltstone.state.ttl import CLOCKS, STAMP, TTL, check_clock
from siltstone.state.types import is_nested

ColumnTypes: TypeAlias = pa.Schema | Mapping[str, pa.DataType]
T = TypeVar("T")

_NOTHING = pa.schema([])
_DUE = pa.schema([(DUE, pa.timestamp("us", "UTC"))])
_BOUNDS = pa.schema([(HEAD, pa.int64()), (TAIL, pa.int64())])


def key_of(columns: ColumnTypes, nullable: Sequence[str], what: str) -> pa.Schema:
    """Convert the columns of a key to an Arrow schema, of which only `nullable` are.

    Raises:
        UsageError: they are not columns, or a name in `nullable` is not one of them.
    """
    schema = schema_of(columns, what)
    if isinstance(nullable, str) or (unknown := set(nullable) - set(schema.names)):
        which = nullable if isinstance(nullable, str) else ", ".join(sorted(map(str, unknown)))
        raise UsageError(f"nullable of {what} must be a tuple of its columns ({', '.join(schema.names)}), not {which}")
    return pa.schema([field.with_nullable(field.name in nullable) for field in schema])


def schema_of(columns: ColumnTypes, what: str) -> pa.Schema:
    """Convert the columns to an Arrow schema.

    Raises:
        UsageError: they are neither a schema nor names with Arrow types.
    """
    if isinstance(columns, pa.Schema):
        return columns
    if not isinstance(columns, Mapping) or not all(isinstance(t, pa.DataType) for t in columns.values()):
        raise UsageError(f"{what} must be a pyarrow schema or a dict of column names to pyarrow types")
    return pa.schema(list(columns.items()))


def check_not_null(puts: pa.Table, column: str, why: str) -> None:
    """Check that a column of rows to put has no nulls.

    Raises:
        UsageError: it has.
    """
    if nulls := puts.column(column).null_count:
        raise UsageError(f"{column} is null in {nulls} rows, {why}", advice="set it, or delete them")


class Purpose(StrEnum):
    """What happens to rows that are due."""

    TIMER = "timer"
    """`Operator.on_timer` is called for their keys"""
    ROWS = "rows"
    """`Operator.on_due` takes them"""
    EXPIRY = "expiry"
    """they are deleted, since their time to live is over"""


@dataclass(frozen=True)
class DueColumn:
    """What a table's rows are due by: a column with a time, `plus_us` microseconds later, by a clock of `CLOCKS`."""

    clock: str
    column: str
    plus_us: int = 0
    purpose: Purpose = Purpose.TIMER


class Variable(ABC):
    """One named piece of an operator's state.

    `docs/structures.md` shows how to make a kind of one's own of another one.
    """

    kind: Kind = Kind.INCREMENTAL

    @property
    def edits_keys(self) -> bool:
        """Whether an edit depends on all rows that it has of a key."""
        return False

    def edit_schema(self, name: str, key: pa.Schema) -> TableSchema:
        """Return the columns of its edits: those of the table in which it keeps its rows, which has its name.

        Raises:
            UsageError: it has no such table.
        """
        tables = self.tables(name, key)
        if name not in tables:
            raise UsageError(
                f"variable {name} has the tables {', '.join(tables)}, and none of its own name",
                advice="let its kind define edit_schema and edit",
            )
        return tables[name]

    @property
    def optional(self) -> tuple[str, ...]:
        """The value columns that rows of an edit may lack."""
        return ()

    def check_edit(self, puts: pa.Table) -> None:  # noqa: B027  (most take any row)
        """Check rows that an edit puts: primary key and value columns.

        Raises:
            UsageError: the operator could not go on with them.
        """

    def edit(self, name: str, state: KeyedState, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        """Apply an edit in one subtask.

        Args:
            state: the tables as they are stored.
            changes: `changes` of `edit_schema`, each primary key once.
            key_groups: uint16[n], of their keys.

        Raises:
            UsageError: the operator could not go on with the outcome.
        """
        return edit_table(state, name, changes, key_groups)

    @abstractmethod
    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        """Return the state tables of a variable with this name, given the operator's key columns.

        Raises:
            UsageError: a state table cannot have these columns.
        """

    def due_columns(self, name: str) -> dict[str, DueColumn]:
        """Return, of the state tables whose rows fall due, by what."""
        return {}

    def ttls(self, name: str) -> dict[str, TTL]:
        """Return, of the state tables whose rows are stamped, their TTL."""
        return {}

    def layout(self) -> str:
        """Return what the variable is, recorded with the stream: state of another layout is refused by name.

        A kind of one's own adds the options that its tables depend on besides their schemas.
        """
        return type(self).__name__

    @abstractmethod
    def bind(self, name: str, state: KeyedState) -> Any:
        """Return the object that is `state.<name>` while a subtask runs.

        A kind of one's own returns an object of its own around that of the kind it is made of: `super().bind(...)`.
        """


@dataclass(frozen=True)
class ExpiringVariable(Variable):
    """A variable whose rows may have a time to live, each its own."""

    ttl: TTL | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.ttl is not None and not isinstance(self.ttl, TTL):
            raise UsageError(f'ttl is {self.ttl!r}: use a TTL, such as st.TTL("30 days")')

    @property
    def optional(self) -> tuple[str, ...]:
        return () if self.ttl is None else (WRITTEN_AT,)  # the next step stamps them

    def due_columns(self, name: str) -> dict[str, DueColumn]:
        after_us = None if self.ttl is None else self.ttl.after_us
        if self.ttl is None or after_us is None:
            return {}
        return {name: DueColumn(self.ttl.clock, WRITTEN_AT, after_us, Purpose.EXPIRY)}

    def ttls(self, name: str) -> dict[str, TTL]:
        return {} if self.ttl is None else {name: self.ttl}

    def _make_schema(self, name: str, key: pa.Schema, subkey: pa.Schema, value: ColumnTypes) -> TableSchema:
        """Make the schema of the table with the rows: with a TTL, it has the stamp as its last column."""
        columns = schema_of(value, f"the value of {name}")
        if self.ttl is None:
            return TableSchema(key, subkey, columns)
        if WRITTEN_AT in (*key.names, *subkey.names, *columns.names):
            raise UsageError(f"{name} has a TTL, which adds a column {WRITTEN_AT}: give its own column another name")
        return TableSchema(key, subkey, pa.schema([*columns, STAMP]))


@dataclass(frozen=True)
class ValueState(ExpiringVariable):
    """At most one row of `value` columns per key, each with a time to live if there is a `ttl`."""

    value: ColumnTypes

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return {name: self._make_schema(name, key, _NOTHING, self.value)}

    def bind(self, name: str, state: KeyedState) -> ValueAccess:
        return ValueAccess(name, state.tables)


@dataclass(frozen=True)
class MapState(ExpiringVariable):
    """A map per key, from `key` columns, of which those in `nullable` may be null, to `value` columns.

    With a `ttl`, each entry has a time to live.
    """

    key: ColumnTypes
    value: ColumnTypes
    nullable: tuple[str, ...] = ()

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        subkey = key_of(self.key, self.nullable, f"the map key of {name}")
        if not subkey.names:
            raise UsageError(f"{name} needs at least one map key column; without one it is a ValueState")
        return {name: self._make_schema(name, key, subkey, self.value)}

    def bind(self, name: str, state: KeyedState) -> MapAccess:
        return MapAccess(name, state)


@dataclass(frozen=True)
class ListState(ExpiringVariable):
    """A list per key of rows of `value` columns, in the order appended.

    With a `ttl`, each row has a time to live.
    """

    value: ColumnTypes

    @property
    def edits_keys(self) -> bool:
        return True

    @property
    def drops_bounds(self) -> bool:
        """Whether nothing is left of a list without rows."""
        return self.ttl is not None

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        position = pa.schema([pa.field(POSITION, pa.int64(), nullable=False)])
        rows = self._make_schema(name, key, position, self.value)
        return {name: rows, f"{name}.bounds": TableSchema(key, _NOTHING, _BOUNDS)}

    def bind(self, name: str, state: KeyedState) -> ListAccess:
        return ListAccess(name, state.tables, drops_bounds=self.drops_bounds)

    def edit(self, name: str, state: KeyedState, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        lists = self.drops_bounds
        return edit_list(name, state.tables, changes, key_groups, state.max_parallelism, drops_bounds=lists)


@dataclass(frozen=True)
class WindowState(ListState):
    """The rows of a sliding window per key: inserted in any order, evicted by the `order` column.

    `order` names an integer, float, date or timestamp column of `value`, such as the event time. With a `ttl`, each row
    has a time to live, whatever its place.
    """

    order: str

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        value = schema_of(self.value, f"the value of {name}")
        if self.order not in value.names:
            raise UsageError(f"{name} is ordered by {self.order!r}, which is not one of its columns: {value.names}")
        kind = value.field(self.order).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)):
            raise UsageError(
                f"{name} cannot be ordered by {self.order} of type {kind}: use a number, date or timestamp"
            )
        return super().tables(name, key)

    def check_edit(self, puts: pa.Table) -> None:
        check_not_null(puts, self.order, "and it orders the window")

    def bind(self, name: str, state: KeyedState) -> WindowAccess:
        return WindowAccess(name, state.tables, self.order, drops_bounds=self.drops_bounds)


@dataclass(frozen=True)
class Timer(Variable):
    """At most one time per key at which `Operator.on_timer` is called.

    With `clock="event"` that is once the watermark has reached it (`EventTime`), with "processing" once the time of
    day has. A timer of the past fires at the end of the step that sets it.
    """

    clock: str = CLOCKS[0]

    def __post_init__(self) -> None:
        check_clock(self.clock, "a timer")

    def check_edit(self, puts: pa.Table) -> None:
        check_not_null(puts, DUE, "so they would never fire")

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return {name: TableSchema(key, _NOTHING, _DUE)}

    def due_columns(self, name: str) -> dict[str, DueColumn]:
        return {name: DueColumn(self.clock, DUE)}

    def bind(self, name: str, state: KeyedState) -> TimerAccess:
        return TimerAccess(name, state.tables)


@dataclass(frozen=True)
class BroadcastState(Variable):
    """A table that every subtask has: rules, rates, what all keys go by. It has a key of its own.

    Its rows are those of an input, `reads`: a source, or an output of another operator, which has these columns, by
    these names. The operator does not read that input by key. Each row goes to every subtask, before the other rows of
    the step. `by` names a column of `value`, which is never null. Of the rows of a key, the one with the greatest `by`
    stays, in whichever order they come; of several such rows, the least by the other columns of `value`, in their
    order, null last.

    `removed` names a boolean column of `value`. A row in which it is true is hidden, but kept, so that an older row
    that comes later does not bring the key back. Null counts as false.

    The operator reads the table (`siltstone.state.broadcast`), and does not change it. A row without key or `by` is a
    bad row (`on_bad_row`). There is no TTL.
    """

    reads: str
    key: ColumnTypes
    value: ColumnTypes
    by: str
    removed: str | None = None

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        own, value = key_of(self.key, (), f"the key of {name}"), schema_of(self.value, f"the value of {name}")
        if self.by not in value.names or is_nested(value.field(self.by).type):
            raise UsageError(f"{name}: by is {self.by!r}: name the column of its value by which a row is newer")
        if self.removed is not None and (
            self.removed not in value.names or not pa.types.is_boolean(value.field(self.removed).type)
        ):
            raise UsageError(f"{name}: removed is {self.removed!r}: name a boolean column of its value")
        return {name: TableSchema(own, _NOTHING, value, broadcast=True)}

    def layout(self) -> str:
        removed = "" if self.removed is None else f", removed {self.removed}"
        return f"{super().layout()} by {self.by}{removed}"

    def check_edit(self, puts: pa.Table) -> None:
        check_not_null(puts, self.by, "and newer rows are told by it")

    def edit(self, name: str, state: KeyedState, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        done = super().edit(name, state, changes, key_groups)
        return done if 0 in state.groups else Edited()  # every subtask does the same

    def bind(self, name: str, state: KeyedState) -> BroadcastAccess:
        return BroadcastAccess(name, state, self.by, self.removed)


@dataclass(frozen=True)
class OpaqueState(Variable, Generic[T]):
    """One object of a user-defined type per key group, saved whole at every checkpoint (non-incremental).

    `serialize` must return equal bytes for equal objects, on every machine; nothing is pickled.
    """

    create: Callable[[], T]
    serialize: Callable[[T], bytes]
    deserialize: Callable[[bytes], T]
    kind = Kind.OPAQUE

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return {}

    def edit_schema(self, name: str, key: pa.Schema) -> TableSchema:
        columns = list(OPAQUE_SCHEMA)
        return TableSchema(pa.schema([columns[0].with_nullable(False)]), _NOTHING, pa.schema(columns[1:]))

    def check_edit(self, puts: pa.Table) -> None:
        check_not_null(puts, OPAQUE_VALUE, "and an object is not")
        for group, value in zip(puts.column(KEY_GROUP).to_pylist(), puts.column(OPAQUE_VALUE), strict=True):
            data = value.as_py()
            try:
                again = self.serialize(self.deserialize(data))
            except Exception as error:  # the user's code may raise any
                raise UsageError(f"the value of key group {group} cannot be read: {error!r}; correct it") from error
            if again != data:
                raise UsageError(
                    f"the value of key group {group} is not what serialize makes of what it stands for",
                    advice="give what serialize returns",
                )

    def edit(self, name: str, state: KeyedState, changes: pa.Table, key_groups: np.ndarray) -> Edited:
        return edit_opaque(name, state, changes, self.serialize(self.create()))

    def bind(self, name: str, state: KeyedState) -> OpaqueAccess:
        return OpaqueAccess(name, state, self.create, self.serialize, self.deserialize)
