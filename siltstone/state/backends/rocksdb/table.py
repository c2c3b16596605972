"""One state table in RocksDB: rows changed many at once, with digests, before-images and the list of changes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import StateError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, Lookup
from siltstone.state.backends.checks import as_table, check_keys, check_values
from siltstone.state.backends.rocksdb.coding import KeyCoding, RowCoding, expand, group_numbers
from siltstone.state.backends.rocksdb.database import AtomicWrite, Database
from siltstone.state.backends.rocksdb.packing import (
    Packed,
    from_list,
    from_matrix,
    lengths,
    sort_by_start,
    take,
    to_list,
)
from siltstone.state.backends.rocksdb.undo import Image, pack_strings, unpack_strings
from siltstone.state.columns import null_mask, take_from
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import normalise_keys
from siltstone.state.schema import TableSchema

BATCH_ROWS = 1 << 17
_WRITE_ROWS = 1 << 13
"""rows written at once: a step is undone as a whole, so a put need not be one batch"""
_READ_KEYS = 1 << 11
"""keys read at once, which bounds what Python and RocksDB need for each: a scan takes three times as long if it makes
an object of each of `BATCH_ROWS` pairs before it packs them"""
_AHEAD_BYTES = 1 << 23
"""old rows that a put reads before it writes"""
_BATCH_BYTES = 1 << 24
_FRESH_BYTES = 1 << 26
"""most bytes of a step's changes that are kept in memory for `RocksDBTable.changes`"""
_FIRST_PAIRS = 1 << 8
"""pairs that a scan reads before it knows how large they are"""

Write = Callable[[AtomicWrite, Image | None], None]
"""writes changes within the open step, with the images that undo them; StateError if none is open"""


@dataclass(frozen=True)
class RocksDBCounts:
    """The header's data of a table besides its digests."""

    live: int = 0
    interval: int = 1
    """interval of change tracking, counted from 1"""
    listed: int = 0
    """keys in this interval's list of changes; a key that was deleted and put again may be in it twice"""
    known: bool = True
    """whether the list has every change of this interval"""


@dataclass
class _Sorted:
    """The keys of a batch, nearly sorted."""

    columns: pa.Table
    """normalised, in the batch's order"""
    order: np.ndarray
    """int64[n]: the batch's row of each encoded key"""
    encoded: Packed


@dataclass
class _FoundRows:
    """The rows of a batch's keys: the memo that lets a put after a get skip the search."""

    mutation: int
    keys: _Sorted
    values: Packed
    """one per encoded key; null if missing"""


class RocksDBTable:
    """Implements `StateTable`. Rows lie under `rows` (a prefix of 3 bytes), lists of changes under `lists`."""

    def __init__(
        self,
        schema: TableSchema,
        groups: KeyGroupRange,
        max_parallelism: int,
        database: Database,
        write: Write,
        prefixes: tuple[bytes, bytes],
    ) -> None:
        self.schema = schema
        self.groups = groups
        self.max_parallelism = max_parallelism
        self.tracking = False
        self.tracking_s = 0.0
        self.imaged = True
        """whether before-images are kept: not in a step before which the table was empty"""
        self.counts = RocksDBCounts()
        self._digests = np.zeros(max_parallelism, np.uint64)
        self._database, self._write = database, write
        self._rows, self._lists = prefixes
        self._keys, self._values = KeyCoding(schema, self._rows), RowCoding(schema)
        self._mutation = 0
        self._swept = 0
        self._by_group: tuple[tuple[int, int], Packed, np.ndarray] | None = None
        self._fresh: list[tuple[Packed, Packed]] | None = None
        """the keys and values that were written since the last mark, oldest first; null for deletes. None if not all
        are here"""
        self._fresh_bytes = 0
        self._newest: tuple[tuple[int, int], Packed] | None = None

    @property
    def rows(self) -> int:
        """The number of live rows."""
        return self.counts.live

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism]: per key group, the sum modulo 2**64 of the digests of its live rows."""
        return self._digests.copy()

    # Reading and writing

    def reserve(self, rows: int) -> None:
        """Do nothing: RocksDB needs no room beforehand."""

    def expect_changes(self, rows: int) -> None:
        """Do nothing: RocksDB writes in the background by itself."""

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys."""
        found = self._find(batch)
        back = np.empty(len(batch), np.int64)
        back[found.keys.order] = np.arange(len(batch))
        present, columns = self._decode(found.values, back)
        return Lookup(present, as_table(columns, self.schema.value, len(batch)))

    def _sort(self, batch: Keys) -> _Sorted:
        check_keys(batch, self.schema, self.groups)
        columns = normalise_keys(batch.columns)
        encoded = self._keys.encode(columns, batch.key_groups)
        order = batch.memo.get(_Sorted)  # the same in all tables, since all have the same keys
        if order is None:
            order = batch.memo[_Sorted] = sort_by_start(encoded, len(self._rows))
        return _Sorted(columns, order, take(encoded, order))

    def _recall(self, batch: Keys) -> _FoundRows | None:
        memo = batch.memo.get(self)
        return memo if memo is not None and memo.mutation == self._mutation else None

    def _find(self, batch: Keys) -> _FoundRows:
        found = self._recall(batch)
        if found is None:
            keys = self._sort(batch)
            found = batch.memo[self] = _FoundRows(self._mutation, keys, self._read(keys.encoded))
        return found

    def _read(self, keys: Packed, enough_bytes: float = math.inf) -> Packed:
        """Return the values of keys, null if missing. Stop after the first keys that reach `enough_bytes` together."""
        if not self.rows:  # RocksDB would look for each of them among what was deleted
            return pa.nulls(len(keys), pa.large_binary())
        parts, size = [from_list([])], 0
        for at in range(0, len(keys), _READ_KEYS):
            parts.append(from_list(self._database.get_many(to_list(keys[at : at + _READ_KEYS]))))
            size += parts[-1].nbytes
            if size >= enough_bytes:
                break
        return pa.concat_arrays(parts)

    def _decode(self, found: Packed, back: np.ndarray | None = None) -> tuple[np.ndarray, list[pa.Array]]:
        """Return which rows exist (bool[n]), and their value columns, with nulls for missing rows.

        Args:
            back: int64[n], the index in `found` of each row; by default they are in order.
        """
        present, packed = ~null_mask(found), found.drop_null()
        with self._database.translate_damage():
            columns = self._values.decode(packed, self._values.records(packed))
        return present if back is None else present[back], expand(columns, present, back)

    def _records(self, found: Packed) -> np.ndarray:
        """Return the records that values begin with, with zeros for missing rows."""
        records = np.zeros(len(found), self._values.dtype)
        with self._database.translate_damage():
            if not found.null_count:
                return self._values.records(found)
            records[~null_mask(found)] = self._values.records(found.drop_null())
        return records

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key; the keys of a batch are distinct."""
        check_values(batch, values, self.schema)
        most = BATCH_ROWS if self.imaged else _WRITE_ROWS  # a restore's rows are sorted, and larger than memory
        if self not in batch.memo and len(batch) > most:
            check_keys(batch, self.schema, self.groups)
            for at in range(0, len(batch), most):
                part = np.arange(at, min(at + most, len(batch)))
                self.put(batch.take(part), values.slice(at, len(part)))
            return
        found = self._recall(batch)
        keys = found.keys if found else self._sort(batch)
        batch.memo.pop(self, None)  # its rows are old from here on
        rows = pa.Table.from_arrays([*keys.columns.columns, *values.columns], schema=self.schema.rows).combine_chunks()
        tables = [pa.Table.from_batches([each]) for each in rows.to_batches()]
        for part, image in self._images(keys.encoded, found):
            which = keys.order[part]
            self._put(take_from(tables, which), batch.key_groups[which], image)

    def _images(self, encoded: Packed, found: _FoundRows | None) -> Iterator[tuple[slice, Image]]:
        """Yield before-images of as many keys as are written at once, and which ones of `encoded` they are."""
        done = 0
        while done < len(encoded):
            # RocksDB reads faster before it writes, so as much is read ahead as may be in memory.
            old = found.values if found else self._read(encoded[done:], _AHEAD_BYTES)
            for at in range(0, len(old), _WRITE_ROWS):
                values = old[at : at + _WRITE_ROWS]
                part = slice(done + at, done + at + len(values))
                yield part, Image(encoded[part], values)
            done += len(old)

    def _put(self, rows: pa.Table, groups: np.ndarray, image: Image) -> None:
        """Put rows, whose keys are those of the image."""
        old, digest = self._records(image.values), row_digests(rows)
        marks = self.counts.interval if self.tracking else old["mark"]
        new = self._values.encode(rows.select(self.schema.value.names), digest, marks)
        changes = self._database.changes()
        changes.put(to_list(image.keys), to_list(new))
        self._change(changes, image, new, groups, old, digest, image.values.null_count)

    def load(self, batches: Iterable[tuple[pa.Table, np.ndarray]]) -> None:
        """Fill key groups without rows with rows in order of key; undoing the step clears the table.

        Raises:
            StateError: it was not empty before the step, or the rows are not in order, or of other key groups.
        """
        if self.imaged or self.tracking:
            raise StateError("rows are loaded only into an empty table that tracks no changes")
        with self._database.load_sorted() as put:
            for rows, groups in batches:
                if len(groups) and not (groups.min() in self.groups and groups.max() in self.groups):
                    raise StateError(f"rows belong to another subtask than that of {self.groups}")
                keys = self._keys.encode(normalise_keys(rows.select(self.schema.primary_key.names)), groups)
                digests = row_digests(rows)
                put(to_list(keys), to_list(self._values.encode(rows.select(self.schema.value.names), digests, 0)))
                self._digests += group_sums(digests, groups, self.max_parallelism)
                self.counts = replace(self.counts, live=self.counts.live + len(groups), known=False)
        self._mutation += 1

    def delete(self, batch: Keys) -> None:
        """Delete the rows of these keys; a missing row is no error."""
        found = self._find(batch)
        which = found.values.is_valid()
        image = Image(found.keys.encoded.filter(which), found.values.drop_null())
        groups = batch.key_groups[found.keys.order[~null_mask(found.values)]]
        changes = self._database.changes()
        changes.delete(to_list(image.keys))
        none, nothing = pa.nulls(len(groups), pa.large_binary()), np.zeros(len(groups), np.uint64)
        self._change(changes, image, none, groups, self._records(image.values), nothing, -len(groups))

    def _change(
        self,
        changes: AtomicWrite,
        image: Image,
        new: Packed,
        groups: np.ndarray,
        old: np.ndarray,
        digest: np.ndarray,
        born: int,
    ) -> None:
        """Write changes of the image's keys to `new` values; then update digests, the list of changes, and counts."""
        keys, listed = image.keys, self.counts.listed
        if self.tracking:
            start = time.perf_counter()
            unlisted = old["mark"] != self.counts.interval
            fresh = keys if unlisted.all() else keys.filter(pa.array(unlisted))
            if len(fresh):
                changes.put([self._list_key(self.counts.interval, listed)], [pack_strings([fresh])])
                listed += len(fresh)
            self.tracking_s += time.perf_counter() - start
        self._write(changes, image if self.imaged else None)
        self._note_fresh(keys, new)
        self._digests += group_sums(digest - old["digest"], groups, self.max_parallelism)
        self.counts = replace(
            self.counts,
            live=self.counts.live + born,
            listed=listed,
            known=self.counts.known and (self.tracking or len(keys) == 0),
        )
        self._mutation += 1

    # Change tracking and scanning

    def begin(self, *, tracking: bool) -> None:
        """Begin a step."""
        self.tracking, self.imaged = tracking, self.rows > 0
        self._fresh, self._fresh_bytes = [] if tracking and not self.counts.listed else None, 0

    def _note_fresh(self, keys: Packed, new: Packed) -> None:
        """Keep what was written, so that nobody has to read it again for `changes`."""
        if self._fresh is not None:
            self._fresh.append((keys, new))
            self._fresh_bytes += keys.nbytes + new.nbytes
            if not self.tracking or self._fresh_bytes > _FRESH_BYTES:
                self._fresh = None

    def _list_key(self, interval: int, first: int) -> bytes:
        """The key of the part of an interval's list that begins with its `first`-th key."""
        return self._lists + interval.to_bytes(8, "big") + first.to_bytes(8, "big")

    def count_changed(self) -> np.ndarray:
        """Return int64[max_parallelism]: how many keys of each key group changed since the last `mark()`."""
        return np.bincount(self._sorted_changes()[1], minlength=self.max_parallelism)

    def _sorted_changes(self) -> tuple[Packed, np.ndarray]:
        """Return the keys in the list of changes, once each, and their key groups, sorted by key group; cached."""
        if not self.counts.known:
            raise StateError("rows changed untracked since the last mark", advice="take a base of this table")
        of = self._mutation, self.counts.interval
        if self._by_group is None or self._by_group[0] != of:
            parts, at = [from_matrix(np.zeros((0, 1), np.uint8))], 0
            while at < self.counts.listed:
                part = self._database.get(self._list_key(self.counts.interval, at))
                if part is None:
                    raise StateError(f"the list of changes is cut at key {at} of {self.counts.listed}")
                with self._database.translate_damage():
                    parts += unpack_strings(part)
                at += len(parts[-1])
            keys = pc.unique(pa.concat_arrays(parts))
            order = sort_by_start(keys, len(self._rows))
            keys = keys.take(pa.array(order))
            with self._database.translate_damage():
                self._by_group = of, keys, group_numbers(keys)
        return self._by_group[1:]

    def changes(self, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
        """Return every key changed since the last `mark()`, once, newest, sorted by key group; only of `groups`."""
        keys, owners = self._sorted_changes()
        newest, part = self._newest_values(keys), slice(None)
        if groups is not None:
            part = slice(*np.searchsorted(owners, [groups.start, groups.end]).tolist())
        keys = keys[part]
        present, values = self._decode(self._read(keys) if newest is None else newest[part])
        with self._database.translate_damage():
            columns, owners = self._keys.decode(keys)
        return as_table([*columns, *values, pa.array(~present)], self.schema.changes, len(keys)), owners

    def _newest_values(self, keys: Packed) -> Packed | None:
        """Return the values of all changed keys, null if deleted, if they were written since the table was opened."""
        if not self._fresh:
            return None
        of = self._mutation, self.counts.interval
        if self._newest is None or self._newest[0] != of:
            written, values = (
                pa.concat_arrays([from_list([]), *parts]) for parts in zip(*self._fresh[::-1], strict=True)
            )
            self._newest = of, values.take(pc.index_in(keys, written))  # of several, the first
        return self._newest[1]

    def mark(self) -> None:
        """Forget the changes, since a checkpoint that contains them is being taken."""
        self._write(self._database.changes(), None)
        self._by_group = self._newest = None
        self._fresh, self._fresh_bytes = [], 0
        self.counts = replace(self.counts, interval=self.counts.interval + 1, listed=0, known=True)

    def scan(self, groups: KeyGroupRange, *, in_order: bool = True) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield all live rows of `groups` by key group, then primary key: RocksDB has them in no other order."""
        if not len(groups) or not self.rows:
            return
        sizes, parts, rows, size = [_FIRST_PAIRS], list[tuple[Packed, Packed]](), 0, 0
        start, end = self._keys.group_start(groups.start), self._keys.group_start(groups.end)
        for pairs in self._database.items(start, end, sizes):
            part = from_list([key for key, _ in pairs]), from_list([value for _, value in pairs])
            part_bytes = sum(int(lengths(packed).sum()) for packed in part)
            parts.append(part)
            rows, size = rows + len(pairs), size + part_bytes
            if rows >= BATCH_ROWS or size >= _BATCH_BYTES:
                yield self._rows_of(parts)
                parts, rows, size = [], 0, 0
            # The list is being iterated: append what the next part may have, by the mean size of this one.
            sizes.append(max(1, min(_READ_KEYS, BATCH_ROWS - rows, _BATCH_BYTES * len(pairs) // part_bytes)))
        if parts:
            yield self._rows_of(parts)

    def _rows_of(self, parts: Iterable[tuple[Packed, Packed]]) -> tuple[pa.Table, np.ndarray]:
        """Return rows and their key groups, given parts of their keys and values."""
        keys, values = (pa.concat_arrays(packed) for packed in zip(*parts, strict=True))
        with self._database.translate_damage():
            columns, owners = self._keys.decode(keys)
            columns += self._values.decode(values, self._values.records(values))
        return as_table(columns, self.schema.rows, len(keys)), owners

    # Upkeep, called by the subtask

    def reset(self, counts: RocksDBCounts, digests: np.ndarray) -> None:
        """Take over counts and digests, after the rows were brought to them."""
        self.counts, self._digests = counts, digests
        self._fresh = self._newest = None
        self._mutation += 1

    def clear(self, changes: AtomicWrite) -> None:
        """Delete all rows."""
        changes.delete_range(self._keys.group_start(0), self._keys.group_start(self.max_parallelism))

    def sweep(self, oldest_interval: int, changes: AtomicWrite) -> None:
        """Delete lists of changes of intervals before this one."""
        changes.delete(self._database.keys(self._list_key(self._swept, 0), self._list_key(oldest_interval, 0)))
        self._swept = max(self._swept, oldest_interval - 1)
