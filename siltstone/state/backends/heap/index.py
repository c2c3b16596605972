"""A hash index that grows in small steps: linear hashing (Litwin, 1980) over segments of open addressing.

A slot is a uint64: a tag, which is 32 bits of the mixed hash, above the row's number plus one; 0 is a free slot. The
tag alone says where a search begins, so slots move without the rows' hashes, which no record has (docs/adr/0084). A
search stays in the segment of its tag, and is done for many keys at once in rounds. To grow, segments are split in
turn, each into itself and a new last one; so a growing table costs a little with each batch, never a pause. Only the
newest entries are ever removed, by `truncate` at rollback, so that no probe sequence breaks.

    slots    8 numbers, the first of which is how many segments there are; then the segments
    split    entries of the segments that are being split; while it is there, the split is to be repeated
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from siltstone.errors import StateError, Unreachable
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.store.private import write_private_file

MAX_ROWS = 2**32 - 2
SEGMENT_BITS = 13
"""a segment has 2**13 slots"""
MAX_LOAD = 0.45
"""mean load of the segments; those that are not split yet have up to twice as much"""
_HEAD = 8
_SPLIT_AT_ONCE = 64
_READ_SLOTS = 1 << 20
_TAG_SHIFT = np.uint64(32)
_TAG_BITS = 32
_ROW = np.uint64(0xFFFFFFFF)
_TAG = ~_ROW
# 2**64 / golden ratio: the top bits of the product depend on every bit of the hash. The hash's own low bits
# decide its key group, so within one subtask they are far from uniform.
_REMIX = np.uint64(0x9E3779B97F4A7C15)


def tags(hashes: np.ndarray) -> np.ndarray:
    """Return the tag of each hash, in the upper half as in a slot."""
    mixed = hashes * _REMIX
    mixed &= _TAG
    return mixed


class Index:
    """Finds row numbers by hash; the caller compares the keys themselves. `directory` None keeps it in memory."""

    def __init__(self, directory: Path | None, rows: int = 0) -> None:
        """Open the index of `rows` rows in a directory, or make an empty one."""
        self._split = directory / "split" if directory else None
        self._region = MappedArray(directory / "slots" if directory else None, np.uint64, scattered=True)
        self._region.reserve(_HEAD + (1 << SEGMENT_BITS))
        segments = int(self._region.items[0])
        if rows and not segments:
            raise self._damaged_error()
        self._size = 1 << SEGMENT_BITS
        self._resize(segments or 1)
        if self._split and self._split.exists():
            self._finish_split()

    def _resize(self, segments: int) -> None:
        """Use this many segments, for which there is room."""
        end = _HEAD + segments * self._size
        if len(self._region.items) < end:
            raise self._damaged_error()
        self.segments = segments
        self.slots = self._region.items[_HEAD:end]
        level = segments.bit_length() - 1
        self._narrow, self._wide = np.uint64((1 << level) - 1), np.uint64((2 << level) - 1)
        self._region.items[0] = segments

    def _damaged_error(self) -> StateError:
        return StateError(
            f"{self._region.path} is missing or cut short", advice="delete this working state and restore it"
        )

    def home(self, entries: np.ndarray) -> np.ndarray:
        """Return the slot (int64) at which the search for the tag of each entry starts.

        The tag's low bits choose the segment, and its high bits the place in it.
        """
        tag = entries >> _TAG_SHIFT
        segment = tag & self._wide
        if (self.segments & (self.segments - 1)) == 0:
            segment &= self._narrow
        else:
            np.bitwise_and(segment, self._narrow, out=segment, where=segment >= self.segments)
        segment <<= np.uint64(SEGMENT_BITS)
        tag >>= np.uint64(_TAG_BITS - SEGMENT_BITS)
        segment |= tag
        return segment.view(np.int64)

    def advance(self, position: np.ndarray) -> np.ndarray:
        """Return `position` moved by one slot of its segment."""
        onward = position + 1
        onward -= (onward & (self._size - 1) == 0) * self._size
        return onward

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
            at = self.advance(at)
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

    def make_room(self, rows: int, held: int) -> None:
        """Make room for `rows` rows in total.

        Args:
            held: how many rows there are; entries of later ones, which an interrupted rollback may leave, are dropped.

        Raises:
            StateError: there are too many rows.
            Unreachable: the disk is full.
        """
        if rows > MAX_ROWS:
            raise StateError(
                f"{rows} rows in one subtask's table are too many", advice="raise the stream's parallelism"
            )
        segments = -(-rows // int(MAX_LOAD * self._size))
        if segments <= self.segments:
            return
        self._region.reserve(_HEAD + segments * self._size)
        self._resize(self.segments)
        if not held:
            self.slots[:] = 0
            self._resize(segments)
        while self.segments < segments:
            # Each doubles the segments at most, so that none is split twice at once.
            first, until = self._next_split()
            self._begin_split(min(segments, until) - self.segments, first, held)

    def _next_split(self) -> tuple[int, int]:
        """Return the next segment to split, and how many segments there may be after splitting some at once."""
        first = self.segments - (1 << (self.segments.bit_length() - 1))
        return first, min(self.segments + _SPLIT_AT_ONCE, 1 << self.segments.bit_length())

    def _begin_split(self, count: int, first: int, held: int) -> None:
        moving = _entries_of(self.slots[first * self._size : (first + count) * self._size], held)
        if self._split is None:
            self._apply_split(first, count, moving)
            return
        # A process may die while it rewrites slots: what they held is kept until all of it is in place.
        draft = self._split.with_name("split.new")
        try:
            head = np.array([first, count, self.segments], np.int64)
            write_private_file(draft, head.tobytes() + moving.tobytes())
            os.replace(draft, self._split)
        except OSError as error:
            raise Unreachable(f"cannot write {draft}: {error.strerror}; free some space") from error
        self._apply_split(first, count, moving)
        self._split.unlink()

    def _finish_split(self) -> None:
        """Repeat a split that a process did not live to finish."""
        assert self._split is not None
        first, count, segments = np.fromfile(self._split, np.int64, 3).tolist()
        moving = np.fromfile(self._split, np.uint64, offset=24)
        self._resize(segments)
        self._apply_split(first, count, moving)
        self._split.unlink()

    def _apply_split(self, first: int, count: int, moving: np.ndarray) -> None:
        """Split `count` segments, which had these entries (uint64[n])."""
        before = self.segments
        self._resize(before + count)
        for start in (first, before):
            self.slots[start * self._size : (start + count) * self._size] = 0
        self._enter(self.home(moving), moving)

    def entries(self, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tags (in the upper half) and the numbers (int64) of the rows below `rows`, some at a time."""
        for at in range(0, len(self.slots), _READ_SLOTS):
            found = _entries_of(self.slots[at : at + _READ_SLOTS], rows)
            yield found & _TAG, (found & _ROW).view(np.int64) - 1

    def insert(self, tag: np.ndarray, rows: np.ndarray) -> None:
        """Insert keys that are not in the index yet; there must be room.

        Whatever the order of insertion, the older row (the lower number) comes first: a newer one in its slot is moved
        on. So a search only passes older rows, and removing the newest ones breaks no search.
        """
        self._enter(self.home(tag), tag | (rows.astype(np.uint64) + np.uint64(1)))

    def _enter(self, position: np.ndarray, entry: np.ndarray) -> None:
        for _ in range(self._size):
            if not position.size:
                return
            held = np.take(self.slots, position, mode="clip")
            age = entry & _ROW
            claim = np.flatnonzero((held == 0) | ((held & _ROW) > age))[::-1]
            self.slots[position[claim]] = entry[claim]
            now = np.take(self.slots, position, mode="clip")
            lost = np.flatnonzero(now != entry)
            # An entry that exists already, left by an interrupted rollback, is neither.
            moved = np.flatnonzero((now == entry) & (held != 0) & (held != entry))
            # A claim lost to a newer row, because that one was written last, is repeated.
            again = (now & _ROW)[lost] > age[lost]
            onward = np.where(again, position[lost], self.advance(position[lost]))
            position = np.concatenate([onward, self.advance(position[moved])])
            entry = np.concatenate([entry[lost], held[moved]])
        raise StateError(
            f"the hashes of more than {self._size} keys of one table are alike", advice="choose other keys"
        )

    def truncate(self, rows: int) -> None:
        """Remove the entries of row number `rows` and of later ones. It reads all slots, 2 ms per million."""
        if self._split and self._split.exists():  # an error cut it short, such as too little memory
            self._finish_split()
        for at in range(0, len(self.slots), _READ_SLOTS):
            part = self.slots[at : at + _READ_SLOTS]
            part[np.flatnonzero(part & _ROW > np.uint64(rows))] = 0

    def close(self) -> None:
        """Close the file."""
        self._region.close()
        self.slots = self._region.items


def _entries_of(slots: np.ndarray, rows: int) -> np.ndarray:
    """Return the entries of rows below `rows`: others are left by an interrupted rollback."""
    number = slots & _ROW
    return slots[np.flatnonzero((number != 0) & (number <= np.uint64(rows)))]
