"""One state table: records changed many at once, with digests, before-images and the list of changes."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from siltstone.errors import StateError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, Lookup
from siltstone.state.backends.checks import as_table, check_keys, check_values
from siltstone.state.backends.heap.layout import Layout
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.backends.heap.records import Records
from siltstone.state.backends.heap.scan import scan_records
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import normalise_keys
from siltstone.state.ordering import stable_order
from siltstone.state.schema import TableSchema

COMPACT_ROWS = 1 << 16
"""with fewer rows, dropping dead rows and values does not pay"""
EMPTIED_ROWS = 1 << 14
"""the same of a table without live rows"""

BeforeImages = Callable[[int, np.ndarray, np.ndarray], None]
"""called before a mutation: maximum rows of the table afterwards, ids (uint32[n]), their current records"""


@dataclass(frozen=True)
class HeapCounts:
    """The header's data of a table besides its digests."""

    generation: int = 0
    rows: int = 0
    """records, including dead ones"""
    live: int = 0
    entries: int = 1
    """entries of the arena"""
    interval: int = 1
    """interval of change tracking, counted from 1"""
    listed: int = 0
    """rows in this interval's list of changes"""
    known: bool = True
    """whether the list has every change of this interval"""


@dataclass
class _FoundIds:
    """Where the keys of a batch are: the memo that lets a put after a get skip the search."""

    mutation: int
    keys: pa.Table
    """normalised"""
    encoded: list[pa.Array | np.ndarray]
    ids: np.ndarray
    """int64[n]; -1 if there is no record"""
    block: np.ndarray
    """the records; arbitrary if there is none"""


class HeapTable:
    """Implements `StateTable`. `directory` contains its generations of files; None keeps it in memory.

    `before` writes every mutation's before-images to the subtask's undo file; while it is None, and the table has
    a directory, no step is open and every change is refused.
    """

    def __init__(
        self,
        schema: TableSchema,
        groups: KeyGroupRange,
        max_parallelism: int,
        directory: Path | None,
        counts: HeapCounts | None = None,
        digests: np.ndarray | None = None,
    ) -> None:
        self.schema = schema
        self.groups = groups
        self.max_parallelism = max_parallelism
        self.directory = directory
        self.before: BeforeImages | None = None
        self.tracking = False
        self.tracking_s = 0.0
        self._counts = counts or HeapCounts()
        self._digests = np.zeros(max_parallelism, np.uint64) if digests is None else digests
        self._mutation = 0
        self._layout = Layout(schema)
        self.records = Records(
            self._layout, self._home(self._counts.generation), self._counts.rows, self._counts.entries
        )
        self._listed = self._list(self._counts)
        self._by_group: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None

    @classmethod
    def in_memory(cls, schema: TableSchema, max_parallelism: int) -> Self:
        """Make a table of all key groups without files, steps or tracking, for merging a chain."""
        return cls(schema, KeyGroupRange(0, max_parallelism), max_parallelism, None)

    def _home(self, generation: int) -> Path | None:
        return self.directory / str(generation) if self.directory else None

    def _list(self, counts: HeapCounts) -> MappedArray:
        home = self._home(counts.generation)
        path = home / f"changes.{counts.interval}" if home else None
        return MappedArray(path, np.uint32, held=counts.listed)

    @property
    def rows(self) -> int:
        """The number of live rows."""
        return self._counts.live

    @property
    def counts(self) -> HeapCounts:
        """What a header must record, besides digests, to open the table again unchanged."""
        return self._counts

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism]: per key group, the sum modulo 2**64 of the digests of its live rows."""
        return self._digests.copy()

    # Reading and writing

    def reserve(self, rows: int) -> None:
        """Pre-allocate for `rows` rows in total."""
        self.records.make_room(rows)

    def expect_changes(self, rows: int) -> None:
        """Prepare in the background for `rows` changes or more, which are on their way."""
        self.records.expect_changes(rows)

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys."""
        found = self._find(batch)
        present = (found.ids >= 0) & (found.block["live"] != 0)
        valid = None if present.all() else present
        columns = self._layout.read_values(found.block, self.records.arena, valid)
        return Lookup(present, as_table(columns, self.schema.value, len(batch)))

    def _find(self, batch: Keys) -> _FoundIds:
        memo = batch.memo.get(self)
        if memo is not None and memo.mutation == self._mutation:
            return memo
        check_keys(batch, self.schema, self.groups)
        keys = normalise_keys(batch.columns)
        encoded = self._layout.encode_keys(keys)
        found = _FoundIds(self._mutation, keys, encoded, *self.records.find(batch.hashes, encoded))
        batch.memo[self] = found
        return found

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key; the keys of a batch are distinct."""
        check_values(batch, values, self.schema)
        if not self.directory:
            self.compact_if_worth()
        found = self._find(batch)
        block, ids, records = found.block, found.ids, self.records
        missing = np.flatnonzero(ids < 0)
        rows = records.rows + len(missing)
        there = ids >= 0 if len(missing) else slice(None)
        self._keep(rows, ids[there], block[there])
        records.make_room(rows)
        table = pa.Table.from_arrays([*found.keys.columns, *values.columns], schema=self.schema.rows)
        digest = row_digests(table)
        del batch.memo[self]  # until the block equals the table's records again
        if len(missing):
            block.view(self._layout.opaque)[missing] = np.void(bytes(self._layout.dtype.itemsize))
            block["group"][missing] = batch.key_groups[missing]
            self._layout.write_keys(block, missing, found.encoded, records.arena)
            ids[missing] = np.arange(records.rows, rows)
        born = len(batch) - int(np.count_nonzero(block["live"]))
        self._layout.write_values(block, values, records.arena)
        block["live"] = 1
        self._write(ids, block, digest, born)
        if len(missing):
            records.add(ids[missing], batch.hashes[missing])
            self._counts = replace(self._counts, rows=records.rows)
        found.mutation = self._mutation
        batch.memo[self] = found

    def delete(self, batch: Keys) -> None:
        """Delete the rows of these keys; a missing row is no error."""
        found = self._find(batch)
        live = (found.ids >= 0) & (found.block["live"] != 0)
        if live.all():
            ids, block = found.ids, found.block
            del batch.memo[self]  # its records change here
        else:
            ids, block = found.ids[live], found.block.view(self._layout.opaque)[live].view(self._layout.dtype)
        self._keep(self.records.rows, ids, block)
        # The record stays and can become live again, so that a rollback need not repair the index.
        self._layout.clear_values(block)
        block["live"] = 0
        self._write(ids, block, np.zeros(len(ids), np.uint64), -len(ids))

    def _keep(self, rows: int, ids: np.ndarray, block: np.ndarray) -> None:
        """Save the records about to change; every mutation begins with this."""
        if self.before:
            self.before(rows, ids.astype(np.uint32), block)
        elif self.directory:
            raise StateError("state can only change within a step", advice="call begin first")

    def _write(self, ids: np.ndarray, block: np.ndarray, digest: np.ndarray, born: int) -> None:
        """Write changed records, and update digests, the list of changes, and counts."""
        self._digests += group_sums(digest - block["digest"], block["group"], self.max_parallelism)
        block["digest"] = digest
        listed = self._counts.listed
        if self.tracking:
            start = time.perf_counter()
            fresh = ids[block["mark"] != self._counts.interval]
            self._listed.reserve(listed + len(fresh))
            self._listed.items[listed : listed + len(fresh)] = fresh
            listed += len(fresh)
            block["mark"] = self._counts.interval
            self.tracking_s += time.perf_counter() - start
        self.records.scatter(ids, block)
        self._counts = replace(
            self._counts,
            live=self._counts.live + born,
            entries=self.records.arena.entries,
            listed=listed,
            known=self._counts.known and (self.tracking or len(ids) == 0),
        )
        self._mutation += 1

    # Change tracking and scanning

    def count_changed(self) -> np.ndarray:
        """Return int64[max_parallelism]: how many keys of each key group changed since the last `mark()`."""
        return np.bincount(self._sorted_changes()[1], minlength=self.max_parallelism)

    def _sorted_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (uint32) and key groups (uint16) of the records in the list of changes, sorted by key group; the
        result is cached."""
        if not self._counts.known:
            raise StateError("rows changed untracked since the last mark", advice="take a base of this table")
        of = self._mutation, self._counts.interval
        if self._by_group is None or self._by_group[0] != of:
            ids = self._listed.items[: self._counts.listed]
            owners = self.records.column("group")[ids]
            order = stable_order(owners)
            self._by_group = of, ids[order], owners[order]
        return self._by_group[1:]

    def changes(self, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
        """Return every key changed since the last `mark()`, once, newest, sorted by key group; only of `groups`."""
        ids, owners = self._sorted_changes()
        if groups is not None:
            first, last = np.searchsorted(owners, [groups.start, groups.end])
            ids = ids[first:last]
        block = self.records.take(ids)
        live = block["live"] != 0
        columns = [
            *self._layout.read_keys(block, self.records.arena),
            *self._layout.read_values(block, self.records.arena, None if live.all() else live),
            pa.array(~live),
        ]
        return as_table(columns, self.schema.changes, len(ids)), block["group"].copy()

    def mark(self) -> None:
        """Forget the changes, since a checkpoint that contains them is being taken."""
        if self.directory and not self.before:
            raise StateError("a mark is part of a step", advice="call begin first")
        self._counts = replace(self._counts, interval=self._counts.interval + 1, listed=0, known=True)
        self._listed, self._by_group = self._list(self._counts), None

    def scan(self, groups: KeyGroupRange, *, in_order: bool = True) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield all live rows of `groups` by key group, then primary key, or in the order in which keys came.

        The table must not change meanwhile.
        """
        for block, rows in scan_records(self.records, self.schema, groups, in_order=in_order):
            yield rows, block["group"].copy()

    # Upkeep, called by the subtask

    def restore(
        self, images: Sequence[tuple[int, np.ndarray, np.ndarray]], counts: HeapCounts, digests: np.ndarray
    ) -> None:
        """Return to `counts` and `digests`, undoing mutations with the before-images in `before`, newest first."""
        self.records.restore(images, counts.rows, counts.entries)
        self._counts, self._digests = counts, digests
        self._listed = self._list(counts)
        self._mutation += 1

    def compact_if_worth(self) -> bool:
        """Drop dead rows and values if they are more than half; only while no before-images are pending.

        A table that was emptied has nothing to copy, so few dead rows are enough.
        Fills a new generation of files; `sweep` removes the old one, once a header names the new one.
        """
        counts = self._counts
        wanted = 2 * max(counts.live, COMPACT_ROWS) if counts.live or counts.listed else EMPTIED_ROWS
        if counts.rows <= wanted and counts.entries <= wanted * max(1, self._layout.variable_columns):
            return False
        keep = self.records.column("live") != 0
        listed = self._listed.items[: counts.listed]
        keep[listed] = True  # a deleted row that changed must still be reported
        parts = range(0, len(keep), COMPACT_ROWS)
        kept = [(np.flatnonzero(keep[at : at + COMPACT_ROWS]) + at).astype(np.uint32) for at in parts]
        ids = np.concatenate([np.zeros(0, np.uint32), *kept])
        del keep, kept
        home = self._home(counts.generation + 1)
        if home and home.exists():
            shutil.rmtree(home)
        records = self.records.copy(ids, home)
        counts = replace(counts, generation=counts.generation + 1, rows=records.rows, entries=records.arena.entries)
        moved = self._list(replace(counts, listed=0))
        moved.reserve(len(listed))
        moved.items[: len(listed)] = np.searchsorted(ids, listed)
        self.records, self._listed, self._counts = records, moved, counts
        self._mutation += 1
        return True

    def sweep(self, intervals: set[int]) -> None:
        """Remove files of other generations, and lists of changes of other intervals than these."""
        home = self._home(self._counts.generation)
        if home is None:
            return
        for other in home.parent.iterdir():
            if other != home:
                shutil.rmtree(other)
        for path in home.glob("changes.*"):
            if int(path.suffix[1:]) not in intervals:
                path.unlink()

    def close(self) -> None:
        """Close the files."""
        self.records.close()
        self._listed.close()
