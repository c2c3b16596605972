"""What an edit by hand does to the state of one variable in one subtask, by the kind of variable.

An edit comes as changes, at most one for each primary key: `TableSchema.changes` of `Variable.edit_schema`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.state.access import ListAccess, address, find_owners, positions, positions_of
from siltstone.state.backend import KeyedState, StateTable
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.ordering import stable_order
from siltstone.state.protocol import apply_delta, key_batch, split_changes
from siltstone.state.schema import KEY_GROUP, OPAQUE_VALUE


@dataclass(frozen=True)
class Edited:
    """How many rows an edit put, new ones among them, and deleted; and how many to delete did not exist."""

    upserts: int = 0
    inserts: int = 0
    deletes: int = 0
    absent: int = 0


def edit_table(state: KeyedState, name: str, changes: pa.Table, key_groups: np.ndarray) -> Edited:
    """Delete rows of a table, and put others.

    Raises:
        StateError: see `apply_delta`.
    """
    table, (gone, put) = state.tables[name], split_changes(changes)
    before = table.rows
    apply_delta(state, name, changes.take(pa.array(gone)), key_groups[gone])
    left = table.rows
    apply_delta(state, name, changes.take(pa.array(put)), key_groups[put])
    return Edited(len(put), table.rows - left, before - left, len(gone) - (before - left))


def edit_list(
    name: str,
    tables: Mapping[str, StateTable],
    changes: pa.Table,
    key_groups: np.ndarray,
    max_parallelism: int,
    *,
    drops_bounds: bool,
) -> Edited:
    """Delete rows of lists, and put others at their positions, or before or after the list.

    Those with positions before its first row, and after its last one, are put next to it in the order of their
    positions, so that a list has no long gaps.

    Args:
        drops_bounds: see `ListAccess`.
    """
    table, lists = tables[name], ListAccess(name, tables, drops_bounds=drops_bounds)
    keys, owner = find_owners(table.schema.key, changes, key_groups)
    entries = key_batch(table.schema, changes, max_parallelism, key_groups)
    position, (gone, put) = positions_of(entries), split_changes(changes)
    head, tail = lists.read_bounds(keys)
    before = table.rows
    table.delete(entries.take(gone))
    left = table.rows
    at, given = owner[put], position[put]
    early, late = given < head[at], given >= tail[at]
    target = np.where(late, tail[at] + _rank(at, given, late), given)
    target = np.where(early, head[at] - 1 - _rank(at, ~given, early), target)
    table.put(address(keys, at, positions(target)), changes.select(table.schema.value.names).take(pa.array(put)))
    counts = [np.bincount(at[which], minlength=len(keys)) for which in (early, late)]
    moved = np.flatnonzero(counts[0] + counts[1])
    if len(moved):
        lists.write_bounds(keys.take(moved), (head - counts[0])[moved], (tail + counts[1])[moved])
    # A position to delete that was in no list may be one where a row has just been put.
    held = gone[(position[gone] >= head[owner[gone]]) & (position[gone] < tail[owner[gone]])]
    if len(held):
        touched, ordinal = np.unique(owner[held], return_inverse=True)
        lists.trim(keys.take(touched), ordinal, position[held])
    return Edited(len(put), table.rows - left, before - left, len(gone) - (before - left))


def _rank(owner: np.ndarray, value: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return, of the chosen rows, the rank of the value among those of its owner (int64[n]); 0 elsewhere."""
    chosen = np.flatnonzero(which)
    order = chosen[stable_order(owner[chosen], value[chosen])]
    first = np.searchsorted(owner[order], owner[order])
    ranks = np.zeros(len(owner), np.int64)
    ranks[order] = np.arange(len(order)) - first
    return ranks


def edit_opaque(name: str, state: KeyedState, changes: pa.Table, fresh: bytes) -> Edited:
    """Replace the bytes of some key groups of an opaque variable.

    Args:
        fresh: the bytes of a new object, which replaces a deleted one.
    """
    gone, put = split_changes(changes)
    groups = fixed_values(one_array(changes.column(KEY_GROUP))).tolist()
    values, stored = changes.column(OPAQUE_VALUE), state.opaque[name]
    there = [groups[i] for i in gone if stored.get(groups[i], fresh) != fresh]
    inserts = sum(groups[i] not in stored for i in put)
    state.set_opaque(name, {groups[i]: values[int(i)].as_py() for i in put} | dict.fromkeys(there, fresh))
    return Edited(len(put), inserts, len(there), len(gone) - len(there))
