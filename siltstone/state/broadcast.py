"""The type of `state.<variable>` of a broadcast table: the same rows in every subtask, as Flink's broadcast state has.

The table is read by its own key. Rows come from its input alone, and of those of a key the newest by one column stays,
whenever and in whichever order they come; of several newest ones the least by the other columns. So all subtasks, which
get the same rows in orders of their own, have the same table after each step. A row that says that it is removed stays
too, unseen, so that an older one that comes later does not bring it back.
"""

from functools import cached_property

import numpy as np
import pyarrow as pa

from siltstone.state.access import Columns, MapAccess, as_table, conform
from siltstone.state.backend import KeyedState, Lookup
from siltstone.state.columns import find_misfits, fixed_values, null_mask, one_array
from siltstone.state.hashing import find_distinct, normalise_keys
from siltstone.state.nested import nested_columns, stored_columns
from siltstone.state.protocol import key_batch
from siltstone.state.reduction import first_in_order, sort_by

_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


class BroadcastAccess:
    """A table that every subtask has, as of the rows of its input up to and including the step."""

    def __init__(self, name: str, state: KeyedState, by: str, removed: str | None) -> None:
        self._name, self._state, self._by, self._removed = name, state, by, removed
        self._table, self._entries = state.tables[name], MapAccess(name, state)

    def lookup(self, entries: Columns) -> Lookup:
        """Return the results of `get` and `contains` from one search."""
        table, key = as_table(entries), self._table.schema.key
        table = table.select([name for name in key.names if name in table.column_names])
        possible = np.ones(len(table), bool)
        for place, name in enumerate(table.column_names):
            column = table.column(name)
            if column.type in _VIEWS:  # Arrow takes no rows of them
                column = column.cast(_VIEWS[column.type])
                table = table.set_column(place, name, column)
            possible &= ~(null_mask(column) | find_misfits(column, key.field(name).type))
        at = np.flatnonzero(possible)
        own = self._entries.lookup(table if len(at) == len(table) else table.take(pa.array(at)))
        there = own.found if self._removed is None else own.found & ~_is_true(own.values, self._removed)
        found, place = np.zeros(len(table), bool), np.zeros(len(table), np.int64)
        found[at], place[at] = there, np.arange(len(at))
        return Lookup(found, own.values.take(pa.array(place, mask=~found)))

    def get(self, entries: Columns) -> pa.Table:
        """Return the values, one row per given entry, all null for an entry that does not exist.

        Args:
            entries: a table or dict with the key columns of the broadcast table, in any number of rows; others are
                ignored, so that `rows.table` can be passed if it has them. Nothing exists for a null, or for a value
                that is none of the column's type.

        Raises:
            UsageError: a key column is missing, or of a type that is never one of the table's.
        """
        return self.lookup(entries).values

    def contains(self, entries: Columns) -> np.ndarray:
        """Return bool[n]: which entries exist."""
        return self.lookup(entries).found

    @cached_property
    def table(self) -> pa.Table:
        """All rows, key and value columns, in the order of key group and key."""
        schema = self._table.schema
        held = schema.held(self._state.groups, self._state.max_parallelism)
        parts = [rows for rows, _ in self._table.scan(held)]
        rows = nested_columns(pa.concat_tables([schema.rows.empty_table(), *parts]), schema.nested)
        return rows if self._removed is None else rows.filter(pa.array(~_is_true(rows, self._removed)))

    def take(self, rows: pa.Table) -> None:
        """Take rows of the input (`TableSchema.shown_rows`), none of them with a null key or order; for the engine."""
        schema = self._table.schema
        given = stored_columns(conform(rows, schema.shown_rows, len(rows), self._name), schema.nested)
        given = normalise_keys(given)
        batch = key_batch(schema, given, self._state.max_parallelism)
        first, key = find_distinct(batch.hashes, batch.columns.columns)
        keys = batch.take(first)
        known = self._table.get(keys)
        old = np.flatnonzero(known.found)
        names = schema.value.names
        # Rows of the table come first: of equal rows the first is chosen, so one that it has is not written again.
        values = pa.concat_tables([known.values.take(pa.array(old)), given.select(names)]).combine_chunks()
        owner = np.concatenate([old, key])
        order = [self._by, *(name for name in names if name != self._by)]
        newest = sort_by([one_array(values.column(name)) for name in order], owner, largest=True)
        chosen = first_in_order(newest, owner, 1)
        fresh = chosen[chosen >= len(old)]
        if len(fresh):
            self._table.put(keys.take(owner[fresh]), values.take(pa.array(fresh)))
            self.__dict__.pop("table", None)


def _is_true(rows: pa.Table, column: str) -> np.ndarray:
    return fixed_values(one_array(rows.column(column)).fill_null(False)).astype(bool)
