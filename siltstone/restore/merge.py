"""Merges a table's base with the deltas after it: the newest change of a primary key wins, deletes drop.

Deltas come newest first and are held by key group; the base streams past them, some key groups at a time, and of every
key the first row found is the one that counts. A restore, a materialization and a comparison are all this.
"""

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import Unreachable
from siltstone.model import KeyGroupRange
from siltstone.state.columns import fixed_values, one_array, row_bytes, split_by_bytes, take_from
from siltstone.state.hashing import first_rows
from siltstone.state.protocol import key_batch
from siltstone.state.ranks import first_of_each, ranks
from siltstone.state.schema import DELETED, TableSchema

Batch = tuple[pa.Table, np.ndarray]
"""rows, and the key group of each (uint16), ascending"""
TOGETHER_ROWS = 1 << 19
"""so many changes are put in order at once, or those of one delta where they are more"""
TOGETHER_BYTES = 256 << 20
"""and so many bytes of changes at most, or those of one delta: Arrow cannot gather 2 GiB of one string column"""
MERGED_BYTES = 256 << 20
"""so many bytes of rows are copied together at most, unless one row has more"""
MERGED_ROWS = 1 << 16
"""about so many changes are merged with the base at once; all of a key group at least"""


class Changes:
    """What the deltas of one table say together: the newest row of each changed key, or that it is gone.

    Args:
        schema: of the table.
        max_parallelism: key groups of the stream.
        scratch: a directory in which changes may wait, so that memory stays bounded; None keeps them in memory.
    """

    def __init__(self, schema: TableSchema, max_parallelism: int, scratch: Path | None = None) -> None:
        self.schema = schema
        self._max_parallelism = max_parallelism
        self._scratch = scratch
        self._waiting: list[Batch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._runs: list[_Run] = []

    def add(self, changes: pa.Table, key_groups: np.ndarray) -> None:
        """Take one delta (`schema.changes`, one row a key), older than all before it.

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

    def merged(self, base: Iterable[Batch], groups: KeyGroupRange) -> Iterator[Batch]:
        """Every live row of `groups` (`schema.rows`), key groups ascending over all batches.

        Args:
            base: the rows (`schema.rows`) before the changes, key groups ascending over all batches.
        """
        self._put_in_order(None)
        upto = groups.start
        for rows, owners in base:
            if not len(owners):
                continue
            # The last key group of the batch before may go on in this one: its changes have passed already.
            for part in self._parts(min(upto, int(owners[0])), int(owners[-1]) + 1):
                first, last = np.searchsorted(owners, [part.start, part.end]).tolist()
                yield from self._merge(rows.slice(first, last - first), owners[first:last], part, upto)
                upto = max(upto, part.end)
        nothing = self.schema.rows.empty_table(), np.zeros(0, np.uint16)
        for part in self._parts(upto, groups.end):
            yield from self._merge(*nothing, part, upto)

    def _put_in_order(self, scratch: Path | None) -> None:
        """Make one run of what waits: by key group, the newest of each key group first."""
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        if not any(len(changes) for changes, _ in waiting):
            return
        rows = pa.concat_tables([changes for changes, _ in waiting])
        owners = np.concatenate([owner for _, owner in waiting])
        if len(waiting) > 1:
            order = np.argsort(owners, kind="stable")
            rows, owners = rows.combine_chunks().take(pa.array(order)), owners[order]
        if scratch is not None:
            rows = _spilled(rows, scratch)
        self._runs.append(_Run(rows, owners, self._max_parallelism))

    def _parts(self, start: int, end: int) -> Iterator[KeyGroupRange]:
        """Key groups start to end - 1, cut wherever there have been `MERGED_ROWS` changes."""
        before = sum((run.starts for run in self._runs), np.zeros(self._max_parallelism + 1, np.int64))
        inner = 1 + np.flatnonzero(np.diff(before[start : end + 1] // MERGED_ROWS)) + start
        return (KeyGroupRange(a, b) for a, b in pairwise(sorted({start, *inner.tolist(), end})))

    def _merge(self, base: pa.Table, owners: np.ndarray, part: KeyGroupRange, upto: int) -> Iterator[Batch]:
        """The live rows of some key groups, in one batch unless they are large; of those before `upto` only the
        base's."""
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
        # Of a delta the values may be null where it deletes.
        shape = pa.schema([field.with_nullable(True) for field in self.schema.rows])
        tables = [pa.table(table.columns[: len(shape)], schema=shape) for table in (*changes, base)]
        # Of large rows only those that stay are copied: a key may have a value in each of very many deltas.
        rows = pa.concat_tables([table.select(self.schema.primary_key.names) if large else table for table in tables])
        rows = rows.combine_chunks()
        chosen = self._newest(rows, owners)
        chosen = chosen[live[chosen]]
        if not large:
            yield pa.table(rows.take(pa.array(chosen)).columns, schema=self.schema.rows), owners[chosen]
            return
        for part_of in split_by_bytes(np.concatenate([row_bytes(table) for table in tables])[chosen], MERGED_BYTES):
            own = chosen[part_of]
            yield pa.table(take_from(tables, own).columns, schema=self.schema.rows), owners[own]

    def _newest(self, rows: pa.Table, owners: np.ndarray) -> np.ndarray:
        """The first row of each primary key, by key group."""
        keys = self.schema.primary_key.names
        rank = ranks(owners, rows.column(keys[0])) if len(keys) == 1 else None
        if rank is not None:
            return first_of_each(rank)
        batch = key_batch(self.schema, rows, self._max_parallelism, owners)
        newest = np.zeros(len(owners), bool)
        newest[first_rows(batch.hashes, batch.columns.columns)] = True
        chosen = np.flatnonzero(newest)
        return chosen[np.argsort(owners[chosen], kind="stable")]


class _Run:
    """Changes by key group, newest first; `starts` (int64[key groups + 1]) says where each key group begins."""

    def __init__(self, rows: pa.Table, owners: np.ndarray, key_groups: int) -> None:
        self._rows, self._owners = rows, owners
        self.starts = np.searchsorted(owners, np.arange(key_groups + 1))

    def of(self, part: KeyGroupRange) -> Batch:
        """Those of some key groups."""
        first, last = self.starts[[part.start, part.end]].tolist()
        return self._rows.slice(first, last - first), self._owners[first:last]


def _spilled(rows: pa.Table, directory: Path) -> pa.Table:
    """The same table in a file without a name, mapped: pages that the kernel may drop.

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
