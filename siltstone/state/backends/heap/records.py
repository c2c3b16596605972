"""The records of one table in one generation of files: found by key, read and written many at once.

Steps, digests and tracking are handled by `HeapTable`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.state.backends.heap.arena import Arena
from siltstone.state.backends.heap.index import Index, tags
from siltstone.state.backends.heap.layout import Layout
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.columns import split_by_bytes
from siltstone.store.private import make_private_directory

BATCH_ROWS = 1 << 17
_BATCH_BYTES = 1 << 26
_LARGE_BYTES = 1 << 28


class Records:
    """Records `0 <= i < rows`, their index and their arena; `home` None keeps them in memory."""

    def __init__(self, layout: Layout, home: Path | None, rows: int = 0, entries: int = 1) -> None:
        if home:
            make_private_directory(home)
        self.layout = layout
        self.rows = rows
        self.arena = Arena(home, entries)
        self._region = MappedArray(home / "rows" if home else None, layout.dtype, held=rows, scattered=True)
        self.index = Index(home, rows)

    def column(self, name: str) -> np.ndarray:
        """Return one field of all records, as a view."""
        return self._region.items[name][: self.rows]

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Return copies of many records; a copy of record 0 for -1."""
        # One opaque item per record is one copy per row; mode clip saves NumPy a buffer for the whole result.
        return np.take(self._items, ids, mode="clip").view(self.layout.dtype)

    def expect_changes(self, rows: int) -> None:
        """Begin to make the records' pages writable, if `rows` changes touch nearly all of them."""
        self._region.expect_writes(rows, ahead=True)

    def scatter(self, ids: np.ndarray, block: np.ndarray) -> None:
        """Write many records; there must be room."""
        self._region.expect_writes(len(ids))
        self._items[ids] = block.view(self.layout.opaque)

    @property
    def _items(self) -> np.ndarray:
        return self._region.items.view(self.layout.opaque)

    def find(self, hashes: np.ndarray, keys: Sequence[pa.Array | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Find encoded keys: (int64[n] ids, -1 if missing; the records, arbitrary if missing)."""
        tag = tags(hashes)
        position = self.index.home(tag)
        ids = self.index.probe(position, tag, self.rows)
        block = self.take(ids)
        wrong = self._find_wrong(ids, block, keys)
        while wrong.size:  # an equal tag does not imply an equal key
            at = self.index.advance(position[wrong])
            there = self.index.probe(at, tag[wrong], self.rows)
            position[wrong], ids[wrong] = at, there
            candidates = self.take(there)
            block.view(self.layout.opaque)[wrong] = candidates.view(self.layout.opaque)
            wrong = wrong[self._find_wrong(there, candidates, _select(keys, wrong))]
        return ids, block

    def _find_wrong(self, ids: np.ndarray, block: np.ndarray, keys: Sequence[pa.Array | np.ndarray]) -> np.ndarray:
        """Return which of the records found have another key."""
        there = np.flatnonzero(ids >= 0)
        if 2 * len(there) > len(ids):  # comparing missing ones as well costs less than removing them
            return np.flatnonzero(~self.layout.have_keys(block, keys, self.arena) & (ids >= 0))
        return there[~self.layout.have_keys(block[there], _select(keys, there), self.arena)]

    def make_room(self, rows: int) -> None:
        """Make room for `rows` records in total."""
        self._region.reserve(rows)
        self.index.make_room(rows, self.rows)

    def add(self, ids: np.ndarray, hashes: np.ndarray) -> None:
        """Count and index new records, already written at `ids`, which follow the last record."""
        self.index.insert(tags(hashes), ids)
        self.rows += len(ids)

    def restore(self, images: Sequence[tuple[int, np.ndarray, np.ndarray]], rows: int, entries: int) -> None:
        """Undo mutations, newest first: (maximum rows after the mutation, ids, their old records)."""
        for _, ids, records in images:
            self.scatter(ids, np.frombuffer(records, self.layout.dtype))
        if any(after > rows for after, _, _ in images):
            self.index.truncate(rows)
        self.rows, self.arena.entries = rows, entries

    def copy(self, ids: np.ndarray, home: Path | None) -> "Records":
        """Return new records in `home` with copies of only `ids` (ascending), numbered in that order."""
        new = Records(self.layout, home)
        new.make_room(len(ids))
        at = 0
        for batch in self.batches(ids):
            block = self.take(batch)
            self.layout.move_values(block, self.arena, new.arena)
            new.scatter(np.arange(at, at + len(block)), block)
            at += len(block)
        number = np.zeros(self.rows, np.uint32)  # counted from 1
        number[ids] = np.arange(1, len(ids) + 1)
        for tag, rows in self.index.entries(self.rows):
            there = number[rows]
            kept = np.flatnonzero(there)
            new.index.insert(tag[kept], there[kept].astype(np.int64) - 1)
        new.rows = len(ids)
        return new

    def batches(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield batches of records with at most `_LARGE_BYTES` of values each, unless one record has more: consecutive
        values may be far larger than the mean."""
        size = self.batch_rows
        for at in range(0, len(ids), size):
            batch = ids[at : at + size]
            if self.arena.held_bytes <= _LARGE_BYTES:
                yield batch
            else:
                sizes = self.layout.value_bytes(self.take(batch), self.arena)
                yield from (batch[part] for part in split_by_bytes(sizes, _LARGE_BYTES))

    @property
    def batch_rows(self) -> int:
        """The number of rows to handle at once: fewer if values are long."""
        width = self.layout.dtype.itemsize + self.layout.variable_columns * self.arena.mean_bytes
        return max(1, min(BATCH_ROWS, int(_BATCH_BYTES / width)))

    def close(self) -> None:
        """Close the files."""
        self._region.close()
        self.index.close()
        self.arena.close()


def _select(keys: Sequence[pa.Array | np.ndarray], rows: np.ndarray) -> list[pa.Array | np.ndarray]:
    return [key[rows] if isinstance(key, np.ndarray) else key.take(pa.array(rows)) for key in keys]
