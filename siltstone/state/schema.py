"""The schema of a state table, and which changes of it recorded state can follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from siltstone.errors import SchemaConflict, UsageError
from siltstone.model import KeyGroupRange
from siltstone.state.nested import has_more_fields
from siltstone.state.types import checked_type, is_nested, is_wider, type_of, type_text, value_type_of

DELETED = "__deleted"
"""name of the boolean column that marks a delete in a table of changes"""
RESERVED_PREFIX = "__"
WRITTEN_AT = "written_at"
"""name of the value column that a TTL adds (`siltstone.state.ttl`)"""
KEY_GROUP, OPAQUE_VALUE = "key_group", "value"
OPAQUE_SCHEMA = pa.schema([(KEY_GROUP, pa.uint16()), (OPAQUE_VALUE, pa.binary())])
"""the columns of an opaque variable, read as a table"""
_NULLABLE = "nullable"
_STAMP_TYPE = type_text(pa.timestamp("us", "UTC"))


@dataclass(frozen=True)
class TableSchema:
    """One state table: operator key columns, further primary-key columns, value columns.

    `key` is the operator's key, which alone determines the key group. `subkey` is the rest of the primary key (a map's
    key, a list's position) and may be empty. A column of either holds nulls only if its field is nullable; null is then
    one more value, as in Spark's `groupBy`, and comes last. Value columns may be null.
    Types: signed and unsigned integers, float32/64, decimal128, bool, string, binary, date32, timestamp("us", zone);
    of value columns also structs and lists of them.

    Every subtask has all rows of a `broadcast` table, whose key is its own and not the operator's. Of its key groups,
    each is logged by the subtask that has it, as those of any other table.

    A table stores a nested value as bytes (`state.nested`). So `value`, `rows` and `changes` have such a column as
    binary; `nested` has its type, and `shown_value`, `shown_rows` and `shown_changes` have it as users see it.

    Raises:
        UsageError: a type is not supported, a name is used twice or starts with two underscores, or there is no key.
    """

    key: pa.Schema
    subkey: pa.Schema
    value: pa.Schema
    broadcast: bool = False
    nested: tuple[tuple[str, pa.DataType], ...] = field(init=False)

    def __post_init__(self) -> None:
        names = [*self.key.names, *self.subkey.names, *self.value.names]
        if not self.key.names:
            raise UsageError("a state table needs at least one key column")
        if len(set(names)) != len(names):
            raise UsageError(f"column names must be distinct: {', '.join(names)}")
        for name in names:
            if name.startswith(RESERVED_PREFIX) or not name:
                raise UsageError(f"column name {name!r} is reserved")
        for column in [*self.key, *self.subkey]:
            checked_type(column.type, column.name, nested=False)
        kinds = [(column.name, checked_type(column.type, column.name, nested=True)) for column in self.value]
        nested = tuple((name, kind) for name, kind in kinds if is_nested(kind))
        object.__setattr__(self, "nested", nested)
        stored = [column.with_type(pa.binary()) if column.name in dict(nested) else column for column in self.value]
        object.__setattr__(self, "value", pa.schema(stored))

    def held(self, own: KeyGroupRange, max_parallelism: int) -> KeyGroupRange:
        """Return the key groups of the table that a subtask with the key groups `own` has."""
        return KeyGroupRange(0, max_parallelism) if self.broadcast else own

    @property
    def primary_key(self) -> pa.Schema:
        """Key then subkey columns."""
        return pa.schema([*self.key, *self.subkey])

    @property
    def rows(self) -> pa.Schema:
        """Primary key, then value columns: the shape of a full table, a base, or a restore."""
        return pa.schema([*self.primary_key, *self.value])

    @property
    def changes(self) -> pa.Schema:
        """`rows` plus the boolean column `__deleted`: the shape of a delta (a delete has null values)."""
        return self.rows.append(pa.field(DELETED, pa.bool_(), nullable=False))

    @property
    def shown_value(self) -> pa.Schema:
        """The value columns, as users see them."""
        kinds = dict(self.nested)
        return pa.schema([each.with_type(kinds.get(each.name, each.type)) for each in self.value])

    @property
    def shown_rows(self) -> pa.Schema:
        """`rows`, as users see them."""
        return pa.schema([*self.primary_key, *self.shown_value])

    @property
    def shown_changes(self) -> pa.Schema:
        """`changes`, as users see and give them."""
        return self.shown_rows.append(pa.field(DELETED, pa.bool_(), nullable=False))

    def to_json(self) -> dict[str, Any]:
        """Return a plain description: {"key": [[name, type], ...], "subkey": ..., "value": ...}; of a nullable column
        of the key or subkey it is [name, type, "nullable"]. A broadcast table also has {"broadcast": true}."""
        value = [[f.name, type_text(f.type)] for f in self.shown_value]
        plain = {"key": describe_key(self.key), "subkey": describe_key(self.subkey), "value": value}
        return plain | {"broadcast": True} if self.broadcast else plain

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Self:
        """Make a schema from the result of `to_json`."""
        value = pa.schema([(name, value_type_of(kind)) for name, kind in text["value"]])
        broadcast = text.get("broadcast", False)
        if broadcast not in (False, True):
            raise UsageError(f"a table's broadcast is {broadcast!r}: it is true, or left out")
        return cls(_parse_key(text["key"]), _parse_key(text["subkey"]), value, broadcast)

    def reads(self, field: pa.Field, stored: pa.DataType) -> bool:
        """Whether a stored column may be read as `field`: it has its type or, of a value column, a narrower one."""
        return stored == field.type or (field.name in self.value.names and is_wider(field.type, stored))

    def check_follows(self, recorded: "TableSchema", what: str) -> None:
        """Check that recorded state can follow this definition: value columns may be added (read as null) and become
        wider (`types.is_wider`, `nested.has_more_fields`), and columns of the key may become nullable.

        Raises:
            SchemaConflict: it cannot; the message shows both schemas and names the table (`what`).
        """
        old, new = recorded.to_json(), self.to_json()
        kept = {n: t for n, t in new["value"]}
        same = all(key_follows(new[part], old[part]) for part in ("key", "subkey"))
        same = same and self.broadcast == recorded.broadcast
        if not same or any(n not in kept or not _value_follows(kept[n], t) for n, t in old["value"]):
            rule = (
                "value columns may be added, or get a wider integer, float64 for float32, a decimal of more digits and "
                "the same scale, or more fields at the end of a struct; key columns may become nullable"
            )
            lost = [n for n, t in old["value"] if n == WRITTEN_AT and t == _STAMP_TYPE and n not in kept]
            kept_by = "; the column of a TTL stays, by ttl=st.TTL(None), which keeps rows for ever" if lost else ""
            raise SchemaConflict(f"{what} changed shape: recorded {old}, now {new}; {rule}{kept_by}")


def _value_follows(now: str, recorded: str) -> bool:
    if now == recorded:
        return True
    kinds = value_type_of(now), value_type_of(recorded)
    return has_more_fields(*kinds) if all(map(is_nested, kinds)) else is_wider(*kinds)


def describe_key(key: pa.Schema) -> list[list[str]]:
    """Return the columns of a key as `TableSchema.to_json` does."""
    return [[f.name, str(f.type), *([_NULLABLE] if f.nullable else [])] for f in key]


def key_follows(now: Sequence[Sequence[str]], recorded: Sequence[Sequence[str]]) -> bool:
    """Whether described keys have the same columns, of which those that may hold nulls still may."""
    return len(now) == len(recorded) and all(
        list(new) in (list(old), [*old, _NULLABLE]) for new, old in zip(now, recorded, strict=True)
    )


def _parse_key(columns: Sequence[Sequence[str]]) -> pa.Schema:
    fields = []
    for name, kind, *nullable in columns:
        if nullable not in ([], [_NULLABLE]):
            raise UsageError(f"column {name!r} is {nullable}: a column of a key is {_NULLABLE} or nothing")
        fields.append(pa.field(name, type_of(kind), bool(nullable)))
    return pa.schema(fields)
