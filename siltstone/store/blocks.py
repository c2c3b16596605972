"""Buffered reading of blocks: what a restore needs is fetched once, ahead of its use, and dropped after it.

    BlockReader      the blocks that handles point at, in the order in which they are used
    RangedFile       a large object as a file, of which only what is read is fetched

Only the wanted ranges of an object are fetched, each verified by its handle's checksum (promise 6): damage to what is
not wanted harms nobody. The buffered restore of US 9471438: data come in chunks, each is fetched once and dropped when
the read offset has passed it.
"""

import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import pyarrow as pa
import xxhash

from siltstone.errors import CorruptObject
from siltstone.model import Handle, StoredObject
from siltstone.store.base import Store

AHEAD_BYTES = 64 << 20
"""how much is fetched before it is used, at most, unless one block holds more"""
FETCHES = 4
"""how many fetches are under way at once"""
GAP_BYTES = 64 << 10
"""ranges of an object that lie no further apart are fetched as one"""
CHUNK_BYTES = 1 << 20
"""what a ranged file fetches at least"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to read: whole, or `in_parts`, as a file of which only what is read is fetched and nothing verified."""

    handle: Handle
    in_parts: bool = False


class BlockReader:
    """Reads blocks of objects that the manifests name.

    Args:
        objects: what the manifests say of each object that may be asked for.
    """

    def __init__(self, store: Store, objects: Iterable[StoredObject]) -> None:
        self._store = store
        self._objects = {stored.name: stored for stored in objects}
        self._fetched: list[int] = []

    @property
    def fetched_bytes(self) -> int:
        """How many bytes were fetched so far."""
        return sum(self._fetched)

    def blocks(self, wanted: Iterable[Wanted]) -> Generator[pa.Buffer | pa.NativeFile, None, None]:
        """Each block's bytes, or file if it is wanted in parts, in order.

        Blocks of one object that follow each other are fetched together.

        Raises:
            CorruptObject: when its turn comes: the object is missing, cut or altered, or named by no manifest.
            Unreachable: the store does not answer.
        """
        runs = [list(run) for _, run in groupby(wanted, key=lambda w: (w.handle.object, w.in_parts))]
        if len(runs) <= 1:
            for run in runs:
                yield from self._fetch(run)
            return
        pool = ThreadPoolExecutor(min(FETCHES, len(runs)), thread_name_prefix="fetch")
        waiting: deque[tuple[int, Future[list[pa.Buffer | pa.NativeFile]]]] = deque()
        try:
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
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, run: Sequence[Wanted]) -> list[pa.Buffer | pa.NativeFile]:
        name = run[0].handle.object
        if name not in self._objects:
            raise CorruptObject(f"{name} is named by a handle but by no manifest: restore another checkpoint")
        stored = self._objects[name]
        for wanted in run:
            if wanted.handle.offset + wanted.handle.length > stored.bytes:
                raise CorruptObject(f"{name}: {wanted.handle.variable} should lie beyond its end")
        if run[0].in_parts:
            return [
                pa.PythonFile(RangedFile(self._store, wanted.handle, self._fetched.append), mode="r") for wanted in run
            ]
        if len(run) == 1 and run[0].handle.length == stored.bytes:
            self._fetched.append(stored.bytes)
            return [self._store.read(stored)]
        return self._fetch_ranges([w.handle for w in run])

    def _fetch_ranges(self, handles: Sequence[Handle]) -> list[pa.Buffer]:
        """The blocks of one object, ranges that lie close together in one fetch, each block verified."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted((h.offset, h.offset + h.length) for h in handles):
            if spans and start <= spans[-1][1] + GAP_BYTES:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((start, end))
        self._fetched += [end - start for start, end in spans]
        fetched = [(start, self._store.read_range(handles[0].object, start, end - start)) for start, end in spans]
        return [_verified(handle, fetched) for handle in handles]


def _verified(handle: Handle, fetched: Sequence[tuple[int, pa.Buffer]]) -> pa.Buffer:
    start, span = next((s, b) for s, b in reversed(fetched) if s <= handle.offset)
    block = span.slice(handle.offset - start, handle.length)
    if xxhash.xxh3_128_hexdigest(memoryview(block)) != handle.checksum:
        what = f"{handle.variable}, {handle.length} bytes at {handle.offset},"
        raise CorruptObject(f"object {handle.object} was altered: {what} has not the checksum {handle.checksum}")
    return block


class RangedFile(io.RawIOBase):
    """A block as a file for pyarrow's readers: a read fetches at least a chunk, and the newest chunk is kept."""

    def __init__(self, store: Store, handle: Handle, fetched: Callable[[int], None] = lambda _: None) -> None:
        """`fetched` is told how many bytes each fetch brings."""
        self._fetch = partial(store.read_range, handle.object)
        self._fetched = fetched
        self._start, self._size = handle.offset, handle.length
        self._position = 0
        self._chunk: tuple[int, pa.Buffer] = (0, pa.py_buffer(b""))

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The read offset."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the read offset."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        start = min(self._position, self._size)
        end = self._size if size < 0 else min(start + size, self._size)
        at, chunk = self._chunk
        if not at <= start <= end <= at + chunk.size:
            # Parquet is read from its end: what lies before it is fetched with it.
            first = max(0, self._size - CHUNK_BYTES) if end == self._size and end - start < CHUNK_BYTES else start
            last = min(max(end, first + CHUNK_BYTES), self._size)
            self._fetched(last - first)
            at, chunk = self._chunk = (first, self._fetch(self._start + first, last - first))
        self._position = end
        return chunk.slice(start - at, end - start).to_pybytes()
