"""Buffered reading of blocks: each is fetched once, ahead of its use, and dropped after it.

Only the wanted ranges of an object are fetched. Each is verified by its handle's checksum, or, if only part of the
handle's bytes is wanted, by the object's range checksums (`store.ranged`); damage to unwanted bytes does not matter.
Source: the buffered restore of US 9471438, in which data come in chunks, each fetched once and dropped when the read
offset has passed it.
"""

import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from siltstone.errors import CorruptObject
from siltstone.model import Handle, StoredObject
from siltstone.store.ahead import fetch_threads
from siltstone.store.base import Store
from siltstone.store.checksums import start_hash
from siltstone.store.ranged import RangedFile, with_ranges

AHEAD_BYTES = 64 << 20
"""maximum bytes fetched ahead of their use, unless one block has more"""
FETCHES = 4
"""number of concurrent fetches"""
GAP_BYTES = 64 << 10
"""ranges of an object at most this far apart are fetched together"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to read: whole, or `in_parts`, as a file of which only the parts read are fetched and verified; such a
    block is a whole object."""

    handle: Handle
    in_parts: bool = False


class BlockReader:
    """Reads blocks of objects that the manifests name.

    Args:
        objects: the objects that may be read, as recorded in the manifests.
        scratch: the directory for objects that have to be files while they are read; None for the system's directory
            of temporary files.
    """

    def __init__(self, store: Store, objects: Iterable[StoredObject], scratch: Path | None = None) -> None:
        self.store = self._store = store
        self.scratch = scratch or Path(tempfile.gettempdir())
        self._objects = {stored.name: stored for stored in objects}
        self._fetched: list[int] = []

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched so far."""
        return sum(self._fetched)

    def count(self, fetched_bytes: int) -> None:
        """Count bytes that were fetched without it."""
        self._fetched.append(fetched_bytes)

    def blocks(self, wanted: Iterable[Wanted]) -> Generator[pa.Buffer | pa.NativeFile, None, None]:
        """Yield each block's bytes, or a file if it is wanted in parts, in order.

        Consecutive blocks of one object are fetched together.

        Raises:
            CorruptObject: the next block's object is missing, cut or altered, or in no manifest.
            Unreachable: the store does not answer.
        """
        runs = [list(run) for _, run in groupby(wanted, key=lambda w: (w.handle.object, w.in_parts))]
        if len(runs) <= 1:
            for run in runs:
                yield from self._fetch(run)
            return
        waiting: deque[tuple[int, Future[list[pa.Buffer | pa.NativeFile]]]] = deque()
        with fetch_threads(min(FETCHES, len(runs))) as pool:
            ahead, left = 0, deque(runs)
            while waiting or left:
                while left and (not waiting or (ahead < AHEAD_BYTES and len(waiting) < 2 * FETCHES)):
                    run = left.popleft()
                    size = 0 if run[0].in_parts else sum(w.handle.length for w in run)
                    waiting.append((size, pool.submit(self._fetch, run)))
                    ahead += size
                size, fetched = waiting.popleft()
                blocks = deque(fetched.result())
                del fetched
                while blocks:
                    yield blocks.popleft()
                ahead -= size

    def _fetch(self, run: Sequence[Wanted]) -> list[pa.Buffer | pa.NativeFile]:
        name = run[0].handle.object
        if name not in self._objects:
            raise CorruptObject(f"{name} is in a handle but not in a manifest", advice="restore another checkpoint")
        stored = self._objects[name]
        for wanted in run:
            if wanted.handle.offset + wanted.handle.length > stored.bytes:
                raise CorruptObject(f"{name}: {wanted.handle.variable} would be beyond its end")
        if run[0].in_parts:
            place = 0, stored.bytes, stored.checksum
            if any((w.handle.offset, w.handle.length, w.handle.checksum) != place for w in run):
                raise CorruptObject(f"object {name} does not match a handle of {run[0].handle.variable}")
            self._objects[name] = stored = with_ranges(self._store, stored, self._fetched.append)
            return [pa.PythonFile(RangedFile(self._store, stored, self._fetched.append), mode="r") for _ in run]
        if len(run) == 1 and run[0].handle.length == stored.bytes:
            self._fetched.append(stored.bytes)
            return [self._store.read(stored)]
        return self._fetch_ranges([w.handle for w in run])

    def _fetch_ranges(self, handles: Sequence[Handle]) -> list[pa.Buffer]:
        """Fetch blocks of one object, close ranges together, and verify each block."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted((h.offset, h.offset + h.length) for h in handles):
            if spans and start <= spans[-1][1] + GAP_BYTES:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((start, end))
        self._fetched += [end - start for start, end in spans]
        fetched = [(start, self._store.read_range(handles[0].object, start, end - start)) for start, end in spans]
        return [_verify(handle, fetched) for handle in handles]


def _verify(handle: Handle, fetched: Sequence[tuple[int, pa.Buffer]]) -> pa.Buffer:
    start, span = next((s, b) for s, b in reversed(fetched) if s <= handle.offset)
    block = span.slice(handle.offset - start, handle.length)
    found = start_hash(handle.checksum, f"object {handle.object}")
    found.update(memoryview(block))
    if found.text() != handle.checksum:
        what = f"{handle.variable}, {handle.length} bytes at {handle.offset},"
        raise CorruptObject(f"object {handle.object} was altered: {what} does not have checksum {handle.checksum}")
    return block
