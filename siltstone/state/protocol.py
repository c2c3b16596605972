"""The engine's four calls on state, per key group (DBSP: get, set, getDelta, applyDelta)."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siltstone.errors import StateError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import KeyedState, Keys, StateTable
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.hashing import key_groups as groups_of
from siltstone.state.hashing import xxhash64
from siltstone.state.schema import DELETED, TableSchema


def get_state(state: KeyedState, table: str, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield all live rows of some key groups, in bounded batches, in any order: (`schema.rows`, uint16 key groups)."""
    yield from _table(state, table).scan(groups, in_order=False)


def set_state(state: KeyedState, table: str, rows: pa.Table, key_groups: np.ndarray | None = None) -> None:
    """Put rows of a full state (`schema.rows`) into a table, which is empty at the first call.

    `key_groups` (uint16[n]) saves computing them. May be called with one batch after another.

    Raises:
        StateError: the table does not exist, or a row belongs to another subtask.
    """
    target = _table(state, table)
    target.put(_batch(state, target, rows, key_groups), rows.select(target.schema.value.names))


def get_delta(state: KeyedState, table: str, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
    """Return what changed since the last mark, one row per primary key: (`schema.changes`, uint16 key groups).

    Sorted by key group; with `groups` only theirs.

    Raises:
        StateError: the table does not exist, or tracking was off since the last mark.
    """
    return _table(state, table).changes(groups)


def apply_delta(state: KeyedState, table: str, changes: pa.Table, key_groups: np.ndarray | None = None) -> None:
    """Apply the puts and deletes in `changes` (`schema.changes`, one row per primary key).

    Raises:
        StateError: the table does not exist, or a row belongs to another subtask.
    """
    target = _table(state, table)
    for rows, apply in zip(split_changes(changes), (_delete, _put), strict=True):
        if len(rows):
            part = changes if len(rows) == len(changes) else changes.take(pa.array(rows))
            apply(target, _batch(state, target, part, None if key_groups is None else key_groups[rows]), part)


def split_changes(changes: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the ordinals of the rows to delete, and of those to put."""
    deleted = fixed_values(one_array(changes.column(DELETED))).astype(bool)
    return np.flatnonzero(deleted), np.flatnonzero(~deleted)


def key_batch(schema: TableSchema, rows: pa.Table, max_parallelism: int, key_groups: np.ndarray | None = None) -> Keys:
    """Make keys from the primary keys of a table's rows; `key_groups` (uint16[n]) saves computing them."""
    hashes = xxhash64(rows.select(schema.key.names).columns)
    groups = groups_of(hashes, max_parallelism) if key_groups is None else key_groups
    if schema.subkey.names:
        hashes = xxhash64(rows.select(schema.subkey.names).columns, hashes)
    return Keys(rows.select(schema.primary_key.names), hashes, groups)


def _put(target: StateTable, batch: Keys, rows: pa.Table) -> None:
    target.put(batch, rows.select(target.schema.value.names))


def _delete(target: StateTable, batch: Keys, rows: pa.Table) -> None:
    target.delete(batch)


def _table(state: KeyedState, table: str) -> StateTable:
    if table not in state.tables:
        raise StateError(
            f"state table {table!r} does not exist", advice=f"use one of {', '.join(sorted(state.tables))}"
        )
    return state.tables[table]


def _batch(state: KeyedState, target: StateTable, rows: pa.Table, key_groups: np.ndarray | None) -> Keys:
    batch = key_batch(target.schema, rows, state.max_parallelism, key_groups)
    groups, held = batch.key_groups, target.schema.held(state.groups, state.max_parallelism)
    if len(groups) and not (groups.min() in held and groups.max() in held):
        raise StateError(
            f"rows of key groups {groups.min()} to {groups.max()} do not belong to a subtask that has "
            f"{state.groups.start} to {state.groups.end - 1}"
        )
    return batch
