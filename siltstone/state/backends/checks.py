"""Checks of what callers give to a state and its tables, and results as tables; every backend shares them."""

from collections.abc import Collection

import pyarrow as pa

from siltstone.errors import BadRow, StateError, UsageError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys
from siltstone.state.schema import TableSchema


def check_begin(step: int, running: int | None, version: int) -> None:
    """Check that a step may begin, given the one that is open, if any, and the newest committed one.

    Raises:
        StateError: it may not.
    """
    if running is not None:
        raise StateError(f"step {running} is still open", advice=f"commit it or roll it back before step {step}")
    if step <= version:
        raise StateError(f"step {step} is not after version {version}", advice="roll back first")


def tracks(tracking: bool | Collection[str], table: str) -> bool:
    """Return whether a table's changes are noted, as `SubtaskState.begin` was told."""
    return tracking if isinstance(tracking, bool) else table in tracking


def check_commit(running: int | None) -> int:
    """Return the step that is open, which is to be committed.

    Raises:
        StateError: none is.
    """
    if running is None:
        raise StateError("there is no open step to commit", advice="call begin first")
    return running


def check_opaque(variable: str, changed: Collection[int], known: Collection[str], groups: KeyGroupRange) -> None:
    """Check that an opaque variable is known, and that the key groups to change are of this subtask.

    Raises:
        UsageError: they are not.
    """
    if variable not in known:
        raise UsageError(f"{variable!r} is not an opaque variable of this operator")
    for group in changed:
        if group not in groups:
            raise UsageError(f"key group {group} belongs to another subtask than that of {groups}")


def check_keys(batch: Keys, schema: TableSchema, groups: KeyGroupRange) -> None:
    """Check that a batch has keys of this table, of key groups of this subtask.

    Raises:
        UsageError: it does not.
        BadRow: a key is null in a column that is not nullable.
    """
    check_shape("keys", batch.columns.schema, schema.primary_key)
    if not len(batch.columns) == len(batch.hashes) == len(batch.key_groups):
        raise UsageError("keys, hashes and key groups of a batch must be equally many")
    for field, column in zip(schema.primary_key, batch.columns.columns, strict=True):
        if column.null_count and not field.nullable:
            raise BadRow(f"key column {field.name} is null in {column.null_count} rows", advice="drop or fill them")
    own = batch.key_groups
    if len(own) and not (own.min() in groups and own.max() in groups):
        raise UsageError(f"a key belongs to another subtask than that of key groups {groups}")


def check_values(batch: Keys, values: pa.Table, schema: TableSchema) -> None:
    """Check that there is one row of value columns per key.

    Raises:
        UsageError: there is not.
    """
    check_shape("values", values.schema, schema.value)
    if values.num_rows != len(batch):
        raise UsageError(f"{values.num_rows} rows of values for {len(batch)} keys")


def check_shape(what: str, given: pa.Schema, expected: pa.Schema) -> None:
    """Check names and types of columns; `what` begins the message.

    Raises:
        UsageError: they differ.
    """
    if given.names != expected.names or given.types != expected.types:
        shapes = [", ".join(f"{field.name} {field.type}" for field in schema) for schema in (given, expected)]
        raise UsageError(f"{what} have columns {shapes[0]}: this table has {shapes[1]}")


def as_table(columns: list[pa.Array], schema: pa.Schema, rows: int) -> pa.Table:
    """Make a table of columns; one without columns still has rows."""
    if not columns:
        return pa.table({"none": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays(columns, schema=schema)
