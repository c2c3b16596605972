"""A hash index: open addressing with linear probing over 64-bit hashes, probed for many keys at once in rounds.

A slot is a uint64: the low 32 bits of the hash as a tag, above the row's number plus one; 0 is a free slot. Only the
newest entries are ever removed, by `remove` at rollback, so that no probe sequence breaks.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from siltstone.errors import StateError
from siltstone.state.backends.heap.mapped_array import MappedArray

MAX_ROWS = 2**32 - 2
_MAX_LOAD = 0.6
_MIN_BITS = 13
_TAG_SHIFT = np.uint64(32)
_ROW = np.uint64(0xFFFFFFFF)
# 2**64 / golden ratio: the top bits of the product depend on every bit of the hash. The hash's own low bits
# decide its key group, so within one subtask they are far from uniform.
_REMIX = np.uint64(0x9E3779B97F4A7C15)


def tags(hashes: np.ndarray) -> np.ndarray:
    """Return the tag of each hash, in the upper half as in a slot."""
    return hashes << _TAG_SHIFT


class Index:
    """Finds row numbers by hash; the caller compares the keys themselves. `path` None keeps it in memory."""

    def __init__(self, path: Path | None, rows: int = 0) -> None:
        """Open the index of `rows` rows, or make an empty one."""
        self._path = path
        self._region = MappedArray(path, np.uint64, held=int(rows / _MAX_LOAD), scattered=True)
        self._resize(max(_MIN_BITS, len(self._region.items).bit_length() - 1))

    def _resize(self, bits: int) -> None:
        self._region.reserve(1 << bits)
        self.slots = self._region.items[: 1 << bits]
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)

    def home(self, hashes: np.ndarray) -> np.ndarray:
        """Return the slot (int64) at which the search for each hash starts."""
        return ((hashes * _REMIX) >> self._shift).view(np.int64)

    def probe(self, position: np.ndarray, tag: np.ndarray, rows: int) -> np.ndarray:
        """Advance `position`, in place, to the next slot that is free or has the tag and a row below `rows`.

        Returns the rows found (int64), -1 for a free slot. Entries of rows that no longer exist (an interrupted
        rollback may leave some) are skipped.
        """
        limit = np.uint64(rows)
        entry = np.take(self.slots, position, mode="clip")
        # Equal tags leave row + 1; a free slot or another tag leaves a number far above any row.
        row = (entry ^ tag) - np.uint64(1)
        found = row < limit
        result = row.view(np.int64)
        result[~found] = -1
        pending = np.flatnonzero(~found & (entry != 0))
        at, wanted = position[pending], tag[pending]
        while pending.size:
            at += 1
            at &= self._mask
            entry = np.take(self.slots, at, mode="clip")
            row = (entry ^ wanted) - np.uint64(1)
            found = row < limit
            done = found | (entry == 0)
            which = pending[done]
            position[which] = at[done]
            result[which] = np.where(found, row.view(np.int64), -1)[done]
            rest = np.flatnonzero(~done)
            pending, at, wanted = pending[rest], at[rest], wanted[rest]
        return result

    def advance(self, position: np.ndarray) -> np.ndarray:
        """Return `position` moved by one slot."""
        return (position + 1) & self._mask

    def has_room(self, rows: int) -> bool:
        """Whether the load stays within its bound with `rows` rows in total."""
        return rows <= _MAX_LOAD * len(self.slots)

    def rebuild(self, rows: int, hashes: Iterable[np.ndarray]) -> None:
        """Make room for `rows` rows: a table at least twice as large, filled from the hashes of rows 0, 1, ...

        The new file replaces the old one by renaming, so that a killed process leaves one or the other.
        """
        if rows > MAX_ROWS:
            raise StateError(f"{rows} rows in one subtask's table are too many: raise the stream's parallelism")
        bits = max(len(self.slots).bit_length(), int(rows / _MAX_LOAD).bit_length())
        fresh = self._path.with_name(self._path.name + ".new") if self._path else None
        if fresh:
            fresh.unlink(missing_ok=True)
        self._region = MappedArray(fresh, np.uint64, scattered=True)
        self._resize(bits)
        first = 0
        for part in hashes:
            self.insert(part, np.arange(first, first + len(part)))
            first += len(part)
        if fresh and self._path:
            os.replace(fresh, self._path)
            self._region.path = self._path

    def insert(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        """Insert keys that are not in the index yet; there must be room.

        Whatever the order of insertion, the older row (the lower number) comes first: a newer one in its slot is moved
        on. So a search only passes older rows, and removing the newest ones breaks no search.
        """
        position, entry = self.home(hashes), tags(hashes) | (rows.astype(np.uint64) + np.uint64(1))
        while position.size:
            held = np.take(self.slots, position, mode="clip")
            age = entry & _ROW
            claim = np.flatnonzero((held == 0) | ((held & _ROW) > age))[::-1]
            self.slots[position[claim]] = entry[claim]
            now = np.take(self.slots, position, mode="clip")
            lost = np.flatnonzero(now != entry)
            # An entry that exists already, left by an interrupted rollback, is neither.
            moved = np.flatnonzero((now == entry) & (held != 0) & (held != entry))
            # A claim lost to a newer row, because that one was written last, is repeated.
            onward = position[lost] + ((now & _ROW)[lost] <= age[lost])
            position = np.concatenate([onward, position[moved] + 1]) & self._mask
            entry = np.concatenate([entry[lost], held[moved]])

    def remove(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        """Remove the newest entries, all at once; entries that were never written are no error."""
        entry = tags(hashes) | (rows.astype(np.uint64) + np.uint64(1))
        position = self.home(hashes)
        at, wanted, which = position.copy(), entry, np.arange(len(entry))
        found = np.zeros(len(entry), np.bool_)
        while which.size:
            slot = np.take(self.slots, at, mode="clip")
            hit = slot == wanted
            position[which[hit]] = at[hit]
            found[which[hit]] = True
            rest = np.flatnonzero(~hit & (slot != 0))
            at, wanted, which = self.advance(at[rest]), wanted[rest], which[rest]
        self.slots[position[found]] = 0

    def close(self) -> None:
        """Close the file."""
        self._region.close()
        self.slots = self._region.items
