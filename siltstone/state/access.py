"""Bound variables: the type of `state.<variable>` inside `Operator.process`. Every call works on many keys at once.

A list or window has two tables: its rows by (operator key, position), and the bounds `head` and `tail` per operator
key. New rows get positions `tail`, `tail + 1`, ...; a key's rows are those that exist at `head <= position < tail`.
Eviction may leave holes; positions are never reused while the bounds row exists.

`keys` are always distinct operator keys, such as `Rows.keys`. Entries of a map are rows of one table with the
operator's key columns, those of the map key, and for `put` those of the value; other columns are ignored, so that
`rows.table` can be passed if it has them. Rows of a list or window come with `at` (integers): the ordinal of each row's
key in `keys`, such as `Rows.key_index`; a key may occur many times or not at all.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from siltstone.errors import BadRow, UsageError
from siltstone.state.backend import KeyedState, Keys, Lookup, StateTable
from siltstone.state.columns import find_broken, fixed_values, null_mask, one_array
from siltstone.state.hashing import find_distinct, normalise_keys, xxhash64
from siltstone.state.json_rows import describe_broken
from siltstone.state.nested import nested_columns, stored_columns
from siltstone.state.ordering import stable_order
from siltstone.state.protocol import key_batch
from siltstone.state.reduction import order_codes
from siltstone.state.schema import TableSchema
from siltstone.state.ttl import read_table
from siltstone.state.types import check_fields

POSITION, HEAD, TAIL, DUE = "position", "head", "tail", "due"
_NO_POSITION = np.iinfo(np.int64).max
_TRIM_ROWS = 1 << 20
"""most rows that `ListAccess.trim` looks for at once, beyond one per key"""
Columns: TypeAlias = pa.Table | pa.RecordBatch | Mapping[str, Any]
"""an Arrow table or batch, or a dict of columns: Arrow or NumPy arrays or lists"""


def conform(columns: Columns, schema: pa.Schema, rows: int, what: str) -> pa.Table:
    """Convert `columns` to a table of exactly this schema and number of rows; values are cast if nothing is lost.

    Raises:
        UsageError: a column is missing or does not fit, a value is not of its type, or the number of rows differs.
    """
    table = as_table(columns)
    if table.num_rows != rows and len(schema):
        raise UsageError(f"{what}: {table.num_rows} rows were given for {rows} keys")
    arrays = []
    for field in schema:
        if field.name not in table.column_names:
            raise UsageError(f"{what}: column {field.name} is missing (given: {', '.join(table.column_names)})")
        column = table.column(field.name)
        try:
            check_fields(column.type, field.type)
            fitted = column if column.type == field.type else column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            why = str(error).splitlines()[0]
            raise UsageError(f"{what}: column {field.name} does not fit {field.type}: {why}") from None
        check_values(fitted, f"{what}: column {field.name}")
        arrays.append(fitted)
    return pa.table(arrays, schema=schema)


def check_values(column: pa.Array | pa.ChunkedArray, what: str) -> None:
    """Check that values are of their own type: what is written is what a restore reads (`state.columns.find_broken`).

    Raises:
        UsageError: some are not.
    """
    if (found := find_broken(column)).any():
        raise UsageError(f"{what} {describe_broken(column, found)}")


def _to_stored(columns: Columns, schema: TableSchema, rows: int, what: str) -> pa.Table:
    """Convert values as users give them to `schema.value`; see `conform`."""
    return stored_columns(conform(columns, schema.shown_value, rows, what), schema.nested)


def _to_shown(found: Lookup, schema: TableSchema) -> Lookup:
    """Return a lookup with its values as users see them."""
    return Lookup(found.found, nested_columns(found.values, schema.nested)) if schema.nested else found


class ValueAccess:
    """At most one row of values per key."""

    def __init__(self, name: str, tables: Mapping[str, StateTable]) -> None:
        self._name, self._table = name, tables[name]

    def lookup(self, keys: Keys, *, renews: bool = True) -> Lookup:
        """Return the results of `get` and `contains` from one search; `renews` is as for `ListAccess.get`."""
        return _to_shown(read_table(self._table, keys, renews=renews), self._table.schema)

    def get(self, keys: Keys) -> pa.Table:
        """Return the values, one row per key, all null for a key without a row."""
        return self.lookup(keys).values

    def contains(self, keys: Keys) -> np.ndarray:
        """Return bool[n]: which keys have a row."""
        return self.lookup(keys).found

    def put(self, keys: Keys, values: Columns) -> None:
        """Insert or replace one row per key.

        Raises:
            UsageError: the columns do not fit the declared ones.
        """
        self._table.put(keys, _to_stored(values, self._table.schema, len(keys), self._name))

    def delete(self, keys: Keys) -> None:
        """Delete the rows of these keys; a missing row is no error."""
        self._table.delete(keys)


class TimerAccess:
    """At most one time per key."""

    def __init__(self, name: str, tables: Mapping[str, StateTable]) -> None:
        self._name, self._table = name, tables[name]

    def get(self, keys: Keys) -> pa.Array:
        """Return when each key's timer is due (timestamp, UTC); null for a key without one."""
        return one_array(self._table.get(keys).values.column(DUE))

    def set(self, keys: Keys, at: Any) -> None:
        """Set the timers of these keys, in place of those they have.

        Args:
            at: one time for all (datetime or Arrow scalar), or one per key (Arrow or NumPy array, or list). Times
                without a zone are UTC.

        Raises:
            UsageError: they are not times, some are null, or their number differs.
        """
        kind = self._table.schema.value.field(DUE).type
        times = _one_per_key(at, len(keys))
        if not pa.types.is_timestamp(times.type):
            raise UsageError(f"{self._name}: a timer is set to a timestamp, not to {times.type}")
        try:
            times = times if times.type == kind else times.cast(kind)
        except pa.ArrowInvalid as error:
            raise UsageError(f"{self._name}: a time does not fit {kind}: {str(error).splitlines()[0]}") from None
        if times.null_count:
            raise UsageError(f"{self._name}: {times.null_count} of the times are null: clear the timers of such keys")
        self._table.put(keys, conform({DUE: times}, self._table.schema.value, len(keys), self._name))

    def clear(self, keys: Keys) -> None:
        """Remove the timers of these keys; keys without a timer are skipped."""
        self._table.delete(keys)


class MapAccess:
    """A map per operator key. Every call takes entries as one table: the operator's key columns and the map key's."""

    def __init__(self, name: str, state: KeyedState) -> None:
        self._name, self._state, self._table = name, state, state.tables[name]

    def lookup(self, entries: Columns, *, renews: bool = True) -> Lookup:
        """Return the results of `get` and `contains` from one search; `renews` is as for `ListAccess.get`."""
        batch, _, entry = self._address(as_table(entries))
        found = _to_shown(read_table(self._table, batch, renews=renews), self._table.schema)
        if entry is None:
            return found
        return Lookup(found.found[entry], found.values.take(pa.array(entry)))

    def get(self, entries: Columns) -> pa.Table:
        """Return the values, one row per given entry, all null for an entry that does not exist."""
        return self.lookup(entries).values

    def contains(self, entries: Columns) -> np.ndarray:
        """Return bool[n]: which entries exist."""
        return self.lookup(entries).found

    def put(self, entries: Columns) -> None:
        """Insert or replace entries, with the value columns in the table; the last of several equal ones wins.

        Raises:
            UsageError: a column is missing or does not fit, or a key belongs to another subtask.
            BadRow: a map key is null in a column that is not nullable.
        """
        table = as_table(entries)
        batch, newest, _ = self._address(table)
        values = _to_stored(table, self._table.schema, table.num_rows, self._name)
        self._table.put(batch, values if newest is None else values.take(pa.array(newest)))

    def group(self, entries: Columns) -> tuple[pa.Table, np.ndarray]:
        """Return (distinct, index): the distinct entries, and for each given one its ordinal among them (int64[n]).

        For reductions of many rows per entry, before one `put` of each.
        """
        batch, _, entry = self._address(as_table(entries))
        return batch.columns, np.arange(len(batch)) if entry is None else entry

    def delete(self, entries: Columns) -> None:
        """Delete entries; a missing entry is no error."""
        self._table.delete(self._address(as_table(entries))[0])

    def _address(self, entries: pa.Table) -> tuple[Keys, np.ndarray | None, np.ndarray | None]:
        """Return the distinct entries, the last row of each, and each row's entry; None, None if all are distinct."""
        schema = self._table.schema
        table = normalise_keys(conform(entries, schema.primary_key, entries.num_rows, self._name))
        owners = table.select(schema.key.names)
        for field in schema.primary_key:
            name = field.name
            if not field.nullable and (nulls := table.column(name).null_count):
                if name in schema.key.names:
                    raise UsageError(f"{self._name}: key column {name} is null in {nulls} entries")
                raise _null_error(f"{self._name}: map key {name}", table.column(name), xxhash64(owners.columns), owners)
        batch = key_batch(schema, table, self._state.max_parallelism)
        groups = schema.held(self._state.groups, self._state.max_parallelism)
        if len(batch) and not (batch.key_groups.min() in groups and batch.key_groups.max() in groups):
            raise UsageError(f"{self._name}: entries of keys of another subtask: use keys of the rows alone")
        first, entry = find_distinct(batch.hashes, batch.columns.columns)
        if len(first) == len(entry):
            return batch, None, None
        newest = np.empty(len(first), np.int64)
        newest[entry] = np.arange(len(entry))  # the last assignment to an index wins
        return batch.take(newest), newest, entry


class ListAccess:
    """A list of rows per key, in the order in which they were appended.

    Args:
        drops_bounds: whether the bounds of a list go with its last row, so that nothing is left of it.
    """

    def __init__(self, name: str, tables: Mapping[str, StateTable], *, drops_bounds: bool) -> None:
        self._name, self._table, self._bounds = name, tables[name], tables[f"{name}.bounds"]
        self._drops_bounds = drops_bounds

    def append(self, keys: Keys, at: np.ndarray, rows: Columns) -> None:
        """Append rows to the lists of their keys, in the order given.

        Raises:
            UsageError: the columns do not fit the declared ones.
        """
        table = _to_stored(rows, self._table.schema, len(at), self._name)
        if not len(at):
            return
        counts = np.bincount(at, minlength=len(keys))
        touched = np.flatnonzero(counts)
        if len(touched) < len(keys):
            keys, counts = keys.take(touched), counts[touched]
            at = np.searchsorted(touched, at)
        head, tail = self.read_bounds(keys)
        rank = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        if (at[1:] < at[:-1]).any():
            # Rows of one key are kept together in state, so that they compress better once stored.
            order = stable_order(at)
            at, table = at[order], table.take(pa.array(order))
        self._table.put(address(keys, at, positions(tail[at] + rank)), table)
        self.write_bounds(keys, head, tail + counts)

    def get(self, keys: Keys, *, renews: bool = True) -> tuple[np.ndarray, pa.Table]:
        """Return (at, rows): all rows of these keys, by ordinal of the key, in the order of the list.

        Args:
            renews: False to read without an effect on how long rows live, where a TTL is renewed by reads.
        """
        at, _, rows = self._read(keys, renews=renews)
        return at, nested_columns(rows, self._table.schema.nested)

    def delete(self, keys: Keys) -> None:
        """Delete these keys' lists."""
        at, position, _ = self._read(keys, renews=False)
        self._table.delete(address(keys, at, positions(position)))
        self._bounds.delete(keys)

    def trim(self, keys: Keys, owner: np.ndarray, position: np.ndarray) -> None:
        """Advance the bounds of these keys to their first existing rows, since some were deleted; delete those of keys
        without rows.

        Args:
            owner: int64[n], the ordinal in `keys` of each deleted row's key.
            position: int64[n], where the rows were.
        """
        head, tail = self.read_bounds(keys)
        first, count = head + count_from(head, owner, position), 1
        left = np.flatnonzero(first < tail)
        while len(left):  # a list may begin with a long gap: each turn looks twice as far
            sizes = np.minimum(tail[left] - first[left], count)
            starts = np.cumsum(sizes) - sizes
            position = np.arange(sizes.sum()) - np.repeat(starts - first[left], sizes)
            batch = address(keys, np.repeat(left, sizes), positions(position))
            found = read_table(self._table, batch, renews=False).found
            least = np.minimum.reduceat(np.where(found, position, _NO_POSITION), starts)
            first[left] = np.where(least < _NO_POSITION, least, first[left] + sizes)
            left = left[(least == _NO_POSITION) & (first[left] < tail[left])]
            count = max(1, min(2 * count, _TRIM_ROWS // max(1, len(left))))
        self._move_head(keys, head, first, tail)

    def _move_head(self, keys: Keys, head: np.ndarray, first: np.ndarray, tail: np.ndarray) -> None:
        """Write the heads that moved; where rows go by themselves, delete the bounds of empty lists."""
        empty = (first == tail) & self._drops_bounds
        if empty.any():  # all of them keep what was read of them
            self._bounds.delete(keys if empty.all() else keys.take(np.flatnonzero(empty)))
        moved = np.flatnonzero((first != head) & ~empty)
        if len(moved):
            self.write_bounds(keys.take(moved), first[moved], tail[moved])

    def _read(self, keys: Keys, *, renews: bool) -> tuple[np.ndarray, np.ndarray, pa.Table]:
        """Return (at, position, rows) of all existing rows, in the order of the positions."""
        head, tail = self.read_bounds(keys)
        sizes = tail - head
        at = np.repeat(np.arange(len(keys)), sizes)
        position = np.arange(len(at)) - np.repeat(np.cumsum(sizes) - sizes - head, sizes)
        lookup = read_table(self._table, address(keys, at, positions(position)), renews=renews)
        if lookup.found.all():
            return at, position, lookup.values
        there = np.flatnonzero(lookup.found)
        return at[there], position[there], lookup.values.take(pa.array(there))

    def read_bounds(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        """Return (head, tail) of the keys' lists (int64[n]); for the engine."""
        lookup = self._bounds.get(keys)
        head, tail = (fixed_values(one_array(lookup.values.column(name))) for name in (HEAD, TAIL))
        return np.where(lookup.found, head, 0), np.where(lookup.found, tail, 0)

    def write_bounds(self, keys: Keys, head: np.ndarray, tail: np.ndarray) -> None:
        """Set the bounds of the keys' lists; for the engine."""
        self._bounds.put(keys, pa.table([pa.array(head), pa.array(tail)], schema=self._bounds.schema.value))


class WindowAccess(ListAccess):
    """The rows of a sliding window per key: inserted in any order, evicted by the column that orders them."""

    def __init__(self, name: str, tables: Mapping[str, StateTable], order: str, *, drops_bounds: bool) -> None:
        super().__init__(name, tables, drops_bounds=drops_bounds)
        self._order = order

    def insert(self, keys: Keys, at: np.ndarray, rows: Columns) -> None:
        """Add rows to the windows of their keys.

        Raises:
            UsageError: the columns do not fit the declared ones.
            BadRow: the order column of a row is null.
        """
        table = conform(rows, self._table.schema.shown_value, len(at), self._name)
        if table.column(self._order).null_count:
            what = f"{self._name}: column {self._order} orders the window and"
            raise _null_error(what, table.column(self._order), keys.hashes[at], at)
        self.append(keys, at, table)

    def get(self, keys: Keys, *, renews: bool = True) -> tuple[np.ndarray, pa.Table]:
        """Return (at, rows): all rows of these keys, by ordinal of the key, then in order; equal ones as inserted."""
        at, _, rows = self._read(keys, renews=renews)
        moments = self._moments(rows)
        if not np.all((at[1:] > at[:-1]) | (moments[1:] >= moments[:-1])):
            order = stable_order(at, order_codes(one_array(rows.column(self._order))))
            at, rows = at[order], rows.take(pa.array(order))
        return at, nested_columns(rows, self._table.schema.nested)

    def evict(self, keys: Keys, before: Any) -> None:
        """Delete the rows whose order column is less than `before`, a scalar or one value per key (null: keep all).

        Raises:
            UsageError: `before` does not have the type of the order column.
        """
        limits, unlimited = self._limits(before, len(keys))
        at, position, rows = self._read(keys, renews=False)
        gone = (self._moments(rows) < limits[at]) & ~unlimited[at]
        if not gone.any():
            return
        self._table.delete(address(keys, at[gone], positions(position[gone])))
        head, tail = self.read_bounds(keys)
        first = tail.copy()
        kept_at, kept_position = at[~gone][::-1], position[~gone][::-1]
        first[kept_at] = kept_position  # the last assignment, which is the first position, wins
        self._move_head(keys, head, first, tail)

    def _moments(self, rows: pa.Table) -> np.ndarray:
        return fixed_values(one_array(rows.column(self._order)))

    def _limits(self, before: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
        kind = self._table.schema.value.field(self._order).type
        try:
            array = _one_per_key(before, size)
            array = array if array.type == kind else array.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            why = str(error).splitlines()[0]
            raise UsageError(f"{self._name}: evict needs {kind} to compare with {self._order}: {why}") from None
        if len(array) != size:
            raise UsageError(f"{self._name}: evict was given {len(array)} limits for {size} keys")
        return fixed_values(array), null_mask(array)


def _one_per_key(given: Any, size: int) -> pa.Array:
    """Return values that were given as one per key, or as one for all keys, as an array of one per key."""
    if isinstance(given, pa.Array | pa.ChunkedArray | np.ndarray | list | tuple):
        return one_array(given if isinstance(given, pa.Array | pa.ChunkedArray) else pa.array(given))
    return pa.repeat(given, size)


def as_table(columns: Columns) -> pa.Table:
    """Return columns as a table."""
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    return pa.table(dict(columns)) if isinstance(columns, Mapping) else columns


def _null_error(what: str, column: pa.ChunkedArray, owners: np.ndarray, at: Any) -> BadRow:
    """Make the error for entries with a null where none is allowed; `owners` are the hashes of their keys."""
    message, reason = f"{what} is null in {column.null_count} rows", f"{what} is null"
    return BadRow(message, advice="drop them", rows=null_mask(column), reason=reason, keys=owners, at=at)


def count_from(head: np.ndarray, owner: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Count the positions of each owner that follow each other from its head on (int64[owners])."""
    order = stable_order(owner, position)
    owner, position = owner[order], position[order]
    sizes = np.bincount(owner, minlength=len(head))
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.bincount(owner[position - rank == head[owner]], minlength=len(head))


def address(keys: Keys, at: np.ndarray, subkeys: pa.Table) -> Keys:
    """Return the primary keys (operator key `at[i]`, subkey i)."""
    owners = keys.columns.take(pa.array(at))
    table = pa.table([*owners.columns, *subkeys.columns], schema=pa.schema([*owners.schema, *subkeys.schema]))
    return Keys(table, xxhash64(subkeys.columns, keys.hashes[at]), keys.key_groups[at])


def find_owners(key: pa.Schema, entries: pa.Table, key_groups: np.ndarray) -> tuple[Keys, np.ndarray]:
    """Return the distinct operator keys (`key`) of primary keys, and of each primary key the ordinal of its owner.

    Args:
        entries: n primary keys.
        key_groups: uint16[n], theirs.
    """
    columns = entries.select(key.names)
    hashes = xxhash64(columns.columns)
    first, owner = find_distinct(hashes, columns.columns)
    return Keys(columns.take(pa.array(first)), hashes[first], key_groups[first]), owner


def positions_of(rows: Keys) -> np.ndarray:
    """Return the positions (int64[n]) of primary keys of a list."""
    return fixed_values(one_array(rows.columns.column(POSITION)))


def positions(position: np.ndarray) -> pa.Table:
    """Return positions (integers) as the subkey columns of a list's rows."""
    schema = pa.schema([pa.field(POSITION, pa.int64(), nullable=False)])
    return pa.table([pa.array(position, pa.int64())], schema=schema)


class OpaqueAccess:
    """One object per key group, made by `create` if it does not exist; `flush` saves those that changed."""

    def __init__(
        self,
        name: str,
        state: KeyedState,
        create: Callable[[], Any],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        self._name, self._state = name, state
        self._create, self._serialize, self._deserialize = create, serialize, deserialize
        self._live: dict[int, Any] = {}

    def __getitem__(self, key_group: int) -> Any:
        """Return the object of a key group; changes to it are saved at the end of the step.

        Raises:
            UsageError: the key group belongs to another subtask.
        """
        group = self._check_own(key_group)
        if group not in self._live:
            stored = self._state.opaque[self._name].get(group)
            self._live[group] = self._create() if stored is None else self._deserialize(stored)
        return self._live[group]

    def __setitem__(self, key_group: int, value: Any) -> None:
        """Replace the object of a key group."""
        self._live[self._check_own(key_group)] = value

    def __contains__(self, key_group: int) -> bool:
        return key_group in self._live or key_group in self._state.opaque[self._name]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the key groups that have an object, ascending."""
        return iter(sorted(self._live.keys() | self._state.opaque[self._name].keys()))

    def __len__(self) -> int:
        return len(self._live.keys() | self._state.opaque[self._name].keys())

    def flush(self) -> None:
        """Serialize the objects that were accessed and save those whose bytes changed.

        Raises:
            UsageError: `serialize` did not return bytes.
        """
        stored, changed = self._state.opaque[self._name], {}
        for group, value in sorted(self._live.items()):
            data = self._serialize(value)
            if not isinstance(data, bytes):
                raise UsageError(f"{self._name}: serialize returned {type(data).__name__}: it must return bytes")
            if stored.get(group) != data:
                changed[group] = data
        if changed:
            self._state.set_opaque(self._name, changed)

    def _check_own(self, key_group: int) -> int:
        group = int(key_group)
        if group not in self._state.groups:
            owned = self._state.groups
            raise UsageError(
                f"{self._name}: key group {group} is not of this subtask, which has {owned.start} to {owned.end - 1}"
            )
        return group
