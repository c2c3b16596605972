"""Merges a table's base with the deltas after it: the newest change of a primary key wins, deletes drop.

Only what changed is held in memory; the base streams past it. Both come by key group and so does the result, which is
therefore a base again.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backend import KeyBatch
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.heap import HeapTable
from siltstone.state.protocol import key_batch
from siltstone.state.schema import DELETED, TableSchema

Batch = tuple[pa.Table, np.ndarray]
"""rows, and the key group of each (uint16), ascending"""
_FILTER_BITS = 4
"""how many times as many slots as changes the filter has, as a power of two"""


class Changes:
    """What the deltas of one table say together: the newest row of each changed key, or that it is gone."""

    def __init__(self, schema: TableSchema, max_parallelism: int) -> None:
        self.schema = schema
        self._max_parallelism = max_parallelism
        self._live = HeapTable.in_memory(schema, max_parallelism)
        self._gone = HeapTable.in_memory(
            TableSchema(schema.key, schema.subkey, pa.schema([pa.field("gone", pa.bool_())])), max_parallelism
        )
        self._hashes: list[np.ndarray] = []

    def add(self, changes: pa.Table, key_groups: np.ndarray) -> None:
        """Apply one delta (`schema.changes`, one row a key), newer than all before it."""
        deleted = fixed_values(one_array(changes.column(DELETED))).astype(bool)
        for rows, gone in ((np.flatnonzero(~deleted), False), (np.flatnonzero(deleted), True)):
            if not len(rows):
                continue
            part = changes if len(rows) == len(deleted) else changes.take(pa.array(rows))
            batch = key_batch(self.schema, part, self._max_parallelism, key_groups[rows])
            if gone:
                self._live.delete(batch)
                self._gone.put(batch, pa.table({"gone": np.ones(len(rows), bool)}))
            else:
                self._gone.delete(batch)
                self._live.put(batch, part.select(self.schema.value.names))
            self._hashes.append(batch.hashes)

    def merged(self, base: Iterable[Batch], groups: KeyGroupRange) -> Iterator[Batch]:
        """Every live row of `groups`, key groups ascending over all batches.

        Args:
            base: the rows (`schema.rows`) before the changes, key groups ascending over all batches.
        """
        filter_ = _KeyFilter(np.concatenate([np.zeros(0, np.uint64), *self._hashes]))
        waiting = _Ahead(self._live.scan(groups))
        for rows, owners in base:
            kept = self._unchanged(rows, owners, filter_)
            left = (rows, owners) if kept is None else (rows.filter(pa.array(kept)), owners[kept])
            yield from _interleaved(*left, waiting)
        yield from waiting.rest()

    def _unchanged(self, rows: pa.Table, owners: np.ndarray, filter_: "_KeyFilter") -> np.ndarray | None:
        """bool[n]: which rows of the base no change speaks of; None for all."""
        if not self._hashes:
            return None
        batch = key_batch(self.schema, rows, self._max_parallelism, owners)
        perhaps = filter_.perhaps(batch.hashes)
        if not len(perhaps):
            return None
        some = KeyBatch(batch.keys.take(pa.array(perhaps)), batch.hashes[perhaps], owners[perhaps])
        changed = self._live.get(some).found | self._gone.get(some).found
        kept = np.ones(len(owners), bool)
        kept[perhaps[changed]] = False
        return kept


class _KeyFilter:
    """Tells most keys that are not in a set from those that are, by one bit of a table for each hash."""

    def __init__(self, hashes: np.ndarray) -> None:
        bits = max(10, len(hashes).bit_length() + _FILTER_BITS)
        self._shift = np.uint64(64 - bits)
        self._slots = np.zeros(1 << bits, bool)
        self._slots[hashes >> self._shift] = True

    def perhaps(self, hashes: np.ndarray) -> np.ndarray:
        """Positions of those that may be in the set."""
        return np.flatnonzero(self._slots[hashes >> self._shift])


class _Ahead:
    """Batches of which some rows have been taken."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._held: deque[Batch] = deque()

    def upto(self, group: int) -> list[Batch]:
        """Take all rows of key groups up to and with `group`."""
        taken: list[Batch] = []
        while True:
            if not self._held:
                following = next(self._batches, None)
                if following is None:
                    return taken
                self._held.append(following)
            rows, owners = self._held.popleft()
            cut = int(np.searchsorted(owners, group, side="right"))
            if cut:
                taken.append((rows.slice(0, cut), owners[:cut]))
            if cut < len(owners):
                self._held.append((rows.slice(cut), owners[cut:]))
                return taken

    def rest(self) -> Iterator[Batch]:
        """Take all that is left."""
        yield from self._held
        yield from self._batches


def _interleaved(rows: pa.Table, owners: np.ndarray, waiting: _Ahead) -> Iterator[Batch]:
    """A batch of the base and the changed rows up to its last key group, by key group."""
    if not len(owners):
        return
    others = waiting.upto(int(owners[-1]))
    if not others:
        yield rows, owners
        return
    tables = [rows, *(table.cast(rows.schema) for table, _ in others)]
    groups = np.concatenate([owners, *(owner for _, owner in others)])
    order = np.argsort(groups, kind="stable")
    yield pa.concat_tables(tables).take(pa.array(order)), groups[order]
