"""Merges a table's base with the deltas after it: the newest change of a primary key wins, deletes drop.

Into a table, which is a restore: deltas newest first, then the base, and what is there already stays. Or into another
base, which is a materialization: only what changed is held in memory, and the base streams past it; both come by key
group, and so does the result.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backend import KeyBatch, StateTable, part_of
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.hashing import distinct
from siltstone.state.heap import HeapTable
from siltstone.state.protocol import key_batch
from siltstone.state.schema import DELETED, TableSchema

Batch = tuple[pa.Table, np.ndarray]
"""rows, and the key group of each (uint16), ascending"""
TOGETHER_ROWS = 1 << 19
"""changes are held back until there are so many"""
_FILTER_BITS = 4
"""how many times as many slots as changes the filter has, as a power of two"""


class Changes:
    """What the deltas of one table say together: the newest row of each changed key, or that it is gone.

    Deltas come newest first, so that of a key that many of them change only the newest row is ever written.

    Args:
        schema: of the table.
        max_parallelism: key groups of the stream.
        live: where rows go, a table that is still empty; one in memory, for None.
    """

    def __init__(self, schema: TableSchema, max_parallelism: int, live: StateTable | None = None) -> None:
        self.schema = schema
        self._max_parallelism = max_parallelism
        self._live = HeapTable.in_memory(schema, max_parallelism) if live is None else live
        self._gone = HeapTable.in_memory(
            TableSchema(schema.key, schema.subkey, pa.schema([pa.field("gone", pa.bool_())])), max_parallelism
        )
        self._waiting: list[Batch] = []
        self._waiting_rows = 0
        self._hashes: list[np.ndarray] = []

    def add(self, changes: pa.Table, key_groups: np.ndarray) -> None:
        """Take one delta (`schema.changes`, one row a key), older than all before it."""
        self._waiting.append((changes, key_groups))
        self._waiting_rows += len(changes)
        if self._waiting_rows >= TOGETHER_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the deltas that have been taken: many together, because a key is then looked for once."""
        waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        if not any(len(changes) for changes, _ in waiting):
            return
        rows = pa.concat_tables([changes for changes, _ in waiting])
        batch = self._batch(rows, np.concatenate([owners for _, owners in waiting]))
        if len(waiting) > 1:
            first = np.sort(distinct(batch.hashes, batch.keys.columns)[0])
            if len(first) < len(batch):
                rows, batch = rows.take(pa.array(first)), part_of(batch, first)
        self._hashes.append(batch.hashes)
        deleted = fixed_values(one_array(rows.column(DELETED))).astype(bool)
        put = ~deleted
        if self._gone.rows:
            put &= ~self._gone.get(batch).found
        for table, chosen in ((self._live, np.flatnonzero(put)), (self._gone, np.flatnonzero(deleted))):
            if not len(chosen):
                continue
            whole = len(chosen) == len(batch)
            own, part = (batch, rows) if whole else (part_of(batch, chosen), rows.take(pa.array(chosen)))
            if table is self._live:
                table.put_absent(own, part.select(self.schema.value.names))
            else:
                # Where a newer row is there, it hides this as it hides what is older still.
                table.put_absent(own, pa.table({"gone": np.ones(len(chosen), bool)}))

    def put_base(self, rows: pa.Table, key_groups: np.ndarray) -> None:
        """Write the rows (`schema.rows`) of the base of which no change speaks."""
        self.flush()
        batch = self._batch(rows, key_groups)
        if self._gone.rows and (found := self._gone.get(batch).found).any():
            chosen = np.flatnonzero(~found)
            rows, batch = rows.take(pa.array(chosen)), part_of(batch, chosen)
        self._live.put_absent(batch, rows.select(self.schema.value.names))

    def _batch(self, rows: pa.Table, key_groups: np.ndarray) -> KeyBatch:
        return key_batch(self.schema, rows, self._max_parallelism, key_groups)

    def merged(self, base: Iterable[Batch], groups: KeyGroupRange) -> Iterator[Batch]:
        """Every live row of `groups`, key groups ascending over all batches.

        Args:
            base: the rows (`schema.rows`) before the changes, key groups ascending over all batches.
        """
        self.flush()
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
        batch = self._batch(rows, owners)
        perhaps = filter_.perhaps(batch.hashes)
        if not len(perhaps):
            return None
        some = part_of(batch, perhaps)
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
