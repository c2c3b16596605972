"""Merge a table's base with the deltas after it: the newest change of a primary key wins, deletes drop.

Deltas are added newest first and kept by key group. The base is streamed, some key groups at a time, and the first row
found of each key wins. Restores, materializations and comparisons all use this.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import Unreachable
from siltstone.model import KeyGroupRange
from siltstone.state.columns import fixed_values, one_array, row_bytes, split_by_bytes, take_from
from siltstone.state.hashing import first_rows
from siltstone.state.ordering import stable_order
from siltstone.state.protocol import key_batch
from siltstone.state.ranks import first_of_each, ranks
from siltstone.state.schema import DELETED, TableSchema

Batch = tuple[pa.Table, np.ndarray]
"""rows, and the key group of each (uint16), ascending"""
TOGETHER_ROWS = 1 << 19
"""changes that are sorted together; more if one delta has more"""
TOGETHER_BYTES = 256 << 20
"""maximum bytes of changes sorted together, unless one delta has more: Arrow cannot gather 2 GiB of a string column"""
MERGED_BYTES = 256 << 20
"""maximum bytes of rows copied together, unless one row has more"""
MERGED_ROWS = 1 << 16
"""about how many changes are merged with the base at once; at least those of one key group"""
NEWEST_ROWS = 1 << 19
"""about how many changes are compared by `newest_changes` at once; at least those of one key group"""


class Changes:
    """The deltas of one table together: the newest row of each changed key, or its deletion.

    Args:
        schema: the table's schema.
        max_parallelism: key groups of the stream.
        scratch: a directory to which changes are spilled, so that memory stays bounded; None keeps them in memory.
    """

    def __init__(self, schema: TableSchema, max_parallelism: int, scratch: Path | None = None) -> None:
        self.schema = schema
        self._max_parallelism = max_parallelism
        self._scratch = scratch
        self._waiting: list[Batch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._runs: list[_Run] = []

    def add(self, changes: pa.Table, key_groups: np.ndarray) -> None:
        """Add one delta (`schema.changes`, one row per key), older than all added before.

        Raises:
            Unreachable: `scratch` cannot be written.
        """
        if self._waiting_bytes + changes.nbytes > TOGETHER_BYTES:
            self._put_in_order(self._scratch)
        self._waiting.append((changes, key_groups))
        self._waiting_rows += len(changes)
        self._waiting_bytes += changes.nbytes
        if self._waiting_rows >= TOGETHER_ROWS:
            self._put_in_order(self._scratch)

    def merge(self, base: Iterable[Batch], groups: KeyGroupRange) -> Iterator[Batch]:
        """Yield every live row of `groups` (`schema.rows`), key groups ascending over all batches.

        Args:
            base: the rows (`schema.rows`) before the changes, key groups ascending over all batches.
        """
        self._put_in_order(None)
        upto = groups.start
        for rows, owners in base:
            if not len(owners):
                continue
            # The previous batch's last key group may continue in this one; its changes were yielded already.
            for part in self._parts(min(upto, int(owners[0])), int(owners[-1]) + 1):
                first, last = np.searchsorted(owners, [part.start, part.end]).tolist()
                yield from self._merge(rows.slice(first, last - first), owners[first:last], part, upto)
                upto = max(upto, part.end)
        nothing = self.schema.rows.empty_table(), np.zeros(0, np.uint16)
        for part in self._parts(upto, groups.end):
            yield from self._merge(*nothing, part, upto)

    def _put_in_order(self, scratch: Path | None) -> None:
        """Make one run of the waiting changes: sorted by key group, the newest of each key group first."""
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        if not any(len(changes) for changes, _ in waiting):
            return
        rows = pa.concat_tables([changes for changes, _ in waiting])
        owners = np.concatenate([owner for _, owner in waiting])
        if len(waiting) > 1:
            order = stable_order(owners)
            rows, owners = rows.combine_chunks().take(pa.array(order)), owners[order]
        if scratch is not None:
            rows = _spill(rows, scratch)
        self._runs.append(_Run(rows, owners, self._max_parallelism))

    def _parts(self, start: int, end: int) -> Iterator[KeyGroupRange]:
        return _split(self._runs, self._max_parallelism, start, end, MERGED_ROWS)

    def _merge(self, base: pa.Table, owners: np.ndarray, part: KeyGroupRange, upto: int) -> Iterator[Batch]:
        """Yield the live rows of some key groups, in one batch unless they are large; for key groups before `upto` only
        the base's rows."""
        found = [run.of(part) for run in self._runs]
        changes = [change for change, _ in found if len(change)]
        if not changes:
            yield base, owners
            return
        large = base.nbytes + sum(change.nbytes for change in changes) > MERGED_BYTES
        if large and len(part) > 1:
            for group in range(part.start, part.end):
                first, last = np.searchsorted(owners, [group, group + 1]).tolist()
                one = KeyGroupRange(group, group + 1)
                yield from self._merge(base.slice(first, last - first), owners[first:last], one, upto)
            return
        owners = np.concatenate([*(owner for _, owner in found), owners])
        changed = sum(map(len, changes))
        live = np.ones(len(owners), bool)
        live[:changed] = np.concatenate([~fixed_values(one_array(c.column(DELETED))).astype(bool) for c in changes])
        live[:changed] &= owners[:changed] >= upto
        # A delta's values may be null in rows that delete.
        shape = pa.schema([field.with_nullable(True) for field in self.schema.rows])
        tables = [pa.table(table.columns[: len(shape)], schema=shape) for table in (*changes, base)]
        # If rows are large, only those that stay are copied: a key may have a value in each of many deltas.
        rows = pa.concat_tables([table.select(self.schema.primary_key.names) if large else table for table in tables])
        rows = rows.combine_chunks()
        chosen = _find_newest(self.schema, rows, owners, self._max_parallelism)
        chosen = chosen[live[chosen]]
        if not large:
            yield pa.table(rows.take(pa.array(chosen)).columns, schema=self.schema.rows), owners[chosen]
            return
        for part_of in split_by_bytes(np.concatenate([row_bytes(table) for table in tables])[chosen], MERGED_BYTES):
            own = chosen[part_of]
            yield pa.table(take_from(tables, own).columns, schema=self.schema.rows), owners[own]


@dataclass(frozen=True, eq=False)
class Delta:
    """A delta whose values are decoded if one of them is wanted.

    `keys` are the primary keys, one row per key, `key_groups` (uint16, ascending) theirs, and `rows()` returns the
    changes (`TableSchema.changes`), or raises CorruptObject.
    """

    keys: pa.Table
    key_groups: np.ndarray
    rows: Callable[[], pa.Table]


def newest_changes(
    deltas: Sequence[Delta], schema: TableSchema, groups: KeyGroupRange, max_parallelism: int
) -> Iterator[Batch]:
    """Yield the newest change of each key of `groups` (`schema.changes`), key groups ascending.

    Args:
        deltas: newest first. A delta is not decoded if newer ones have all of its keys.

    Raises:
        CorruptObject: a wanted delta's values are damaged.
    """
    runs = [_Run(delta.keys, delta.key_groups, max_parallelism) for delta in deltas]
    for part in _split(runs, max_parallelism, groups.start, groups.end, NEWEST_ROWS):
        found = [run.of(part) for run in runs]
        owners = np.concatenate([np.zeros(0, np.uint16), *(owner for _, owner in found)])
        if not len(owners):
            continue
        chosen = _find_newest(
            schema, pa.concat_tables([keys for keys, _ in found]).combine_chunks(), owners, max_parallelism
        )
        starts = np.cumsum([0, *(len(keys) for keys, _ in found)])
        which = np.searchsorted(starts, chosen, side="right") - 1
        # Positions among the chosen keys' deltas, which alone are decoded.
        wanted, nth = np.unique(which, return_inverse=True)
        tables = [deltas[i].rows() for i in wanted]
        firsts = [run.starts[part.start] for run in runs] - starts[:-1]
        begins = np.cumsum([0, *map(len, tables)])
        places = begins[nth] + firsts[which] + chosen
        large = sum(table.nbytes for table in tables) > MERGED_BYTES
        sizes = np.concatenate([row_bytes(table) for table in tables])[places] if large else np.zeros(len(places))
        for some in split_by_bytes(sizes, MERGED_BYTES):
            yield take_from(tables, places[some]), owners[chosen[some]]


def _find_newest(schema: TableSchema, rows: pa.Table, owners: np.ndarray, max_parallelism: int) -> np.ndarray:
    """Return the position of each primary key's first row, by key group."""
    keys = schema.primary_key.names
    rank = ranks(owners, rows.column(keys[0])) if len(keys) == 1 else None
    if rank is not None:
        return first_of_each(rank)
    batch = key_batch(schema, rows, max_parallelism, owners)
    newest = np.zeros(len(owners), bool)
    newest[first_rows(batch.hashes, batch.columns.columns)] = True
    chosen = np.flatnonzero(newest)
    return chosen[stable_order(owners[chosen])]


class _Run:
    """Changes by key group, newest first; `starts` (int64[key groups + 1]) are the positions where key groups begin."""

    def __init__(self, rows: pa.Table, owners: np.ndarray, key_groups: int) -> None:
        self._rows, self._owners = rows, owners
        self.starts = np.searchsorted(owners, np.arange(key_groups + 1))

    def of(self, part: KeyGroupRange) -> Batch:
        """Return the changes of some key groups."""
        first, last = self.starts[[part.start, part.end]].tolist()
        return self._rows.slice(first, last - first), self._owners[first:last]


def _split(runs: Sequence[_Run], max_parallelism: int, start: int, end: int, rows: int) -> Iterator[KeyGroupRange]:
    """Split key groups start to end - 1 into ranges of about `rows` changes."""
    before = sum((run.starts for run in runs), np.zeros(max_parallelism + 1, np.int64))
    inner = 1 + np.flatnonzero(np.diff(before[start : end + 1] // rows)) + start
    return (KeyGroupRange(a, b) for a, b in pairwise(sorted({start, *inner.tolist(), end})))


def _spill(rows: pa.Table, directory: Path) -> pa.Table:
    """Write a table to an unnamed file and return it mapped, so that the kernel may drop its pages.

    Raises:
        Unreachable: the disk is full or the directory cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            with pa.ipc.new_file(file, rows.schema) as out:
                out.write_table(rows)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise Unreachable(f"cannot write below {directory}: {error.strerror}; free some space") from error
    return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()
