"""The five kinds of state variable, as an operator declares them. Columns are `{name: type}` or an Arrow
schema."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import Kind
from siltstone.state.access import (
    HEAD,
    POSITION,
    TAIL,
    ListAccess,
    MapAccess,
    OpaqueAccess,
    ValueAccess,
    WindowAccess,
)
from siltstone.state.backend import SubtaskState
from siltstone.state.schema import TableSchema

ColumnTypes: TypeAlias = pa.Schema | Mapping[str, pa.DataType]
T = TypeVar("T")

_NOTHING = pa.schema([])
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


class Variable(ABC):
    """One named piece of an operator's state."""

    kind: Kind = Kind.INCREMENTAL

    @abstractmethod
    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        """Return the state tables of a variable with this name, given the operator's key columns.

        Raises:
            UsageError: a state table cannot have these columns.
        """

    @abstractmethod
    def bind(self, name: str, state: SubtaskState) -> Any:
        """Return the object that is `state.<name>` while a subtask runs."""


@dataclass(frozen=True)
class ValueState(Variable):
    """At most one row of `value` columns per key."""

    value: ColumnTypes

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        return {name: TableSchema(key, _NOTHING, schema_of(self.value, f"the value of {name}"))}

    def bind(self, name: str, state: SubtaskState) -> ValueAccess:
        return ValueAccess(name, state.tables)


@dataclass(frozen=True)
class MapState(Variable):
    """A map per key, from `key` columns, of which those in `nullable` may be null, to `value` columns."""

    key: ColumnTypes
    value: ColumnTypes
    nullable: tuple[str, ...] = ()

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        subkey = key_of(self.key, self.nullable, f"the map key of {name}")
        if not subkey.names:
            raise UsageError(f"{name} needs at least one map key column; without one it is a ValueState")
        return {name: TableSchema(key, subkey, schema_of(self.value, f"the value of {name}"))}

    def bind(self, name: str, state: SubtaskState) -> MapAccess:
        return MapAccess(name, state)


@dataclass(frozen=True)
class ListState(Variable):
    """A list per key of rows of `value` columns, in the order appended."""

    value: ColumnTypes

    def tables(self, name: str, key: pa.Schema) -> dict[str, TableSchema]:
        position = pa.schema([pa.field(POSITION, pa.int64(), nullable=False)])
        rows = TableSchema(key, position, schema_of(self.value, f"the value of {name}"))
        return {name: rows, f"{name}.bounds": TableSchema(key, _NOTHING, _BOUNDS)}

    def bind(self, name: str, state: SubtaskState) -> ListAccess:
        return ListAccess(name, state.tables)


@dataclass(frozen=True)
class WindowState(ListState):
    """The rows of a sliding window per key: inserted in any order, evicted by the `order` column.

    `order` names an integer, float, date or timestamp column of `value`, such as the event time.
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

    def bind(self, name: str, state: SubtaskState) -> WindowAccess:
        return WindowAccess(name, state.tables, self.order)


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

    def bind(self, name: str, state: SubtaskState) -> OpaqueAccess:
        return OpaqueAccess(name, state, self.create, self.serialize, self.deserialize)
