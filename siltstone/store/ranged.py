"""Read parts of an object, each verified before it is decoded (objects are verified at every read: promise 6).

    create_ranged(store, name) writes an object and keeps a checksum of each of its ranges of `RANGE_BYTES`
    with_ranges                computes the range checksums of an object stored without any, by reading all of it once
    RangedFile                 a large object as a file: reads fetch and verify whole ranges

A decoder of damaged bytes may return wrong rows, fail in any way, or kill the process; Parquet's own page checksums do
not cover its footer and page headers. So no byte reaches a decoder before it matches a checksum from a manifest.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from siltstone.errors import CorruptObject
from siltstone.model import RangeChecksums, StoredObject
from siltstone.store.base import ObjectWriter, Store
from siltstone.store.checksums import (
    compare,
    range_digest_bytes,
    range_hash,
    start_hash,
)

RANGE_BYTES = 256 << 10
"""bytes per range checksum"""
CHUNK_BYTES = 1 << 20
"""minimum bytes that a ranged file fetches"""
MEASURED_BYTES = 8 << 20
"""bytes fetched at once of an object without range checksums"""


class _RangeHasher:
    """Computes range checksums piece by piece."""

    def __init__(self, range_bytes: int, algorithm: str) -> None:
        self._range_bytes = self._room = range_bytes
        self._algorithm = algorithm
        self._hash = range_hash(algorithm)
        self._done = bytearray()

    def update(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._hash.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_range()

    def checksums(self) -> RangeChecksums:
        """Return the checksums of all bytes; no more may follow."""
        if self._room < self._range_bytes:
            self._end_range()
        return RangeChecksums(self._algorithm, self._range_bytes, self._done.hex())

    def _end_range(self) -> None:
        self._done += self._hash.digest()
        self._hash = range_hash(self._algorithm)
        self._room = self._range_bytes


class ChecksummedWriter:
    """An `ObjectWriter` around another; `stored`, with range checksums, is set once `create_ranged` has ended."""

    def __init__(self, writer: ObjectWriter, algorithm: str) -> None:
        self._writer = writer
        self.hasher = _RangeHasher(RANGE_BYTES, algorithm)
        self.stored: StoredObject | None = None
        self.closed = False

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes."""
        self.hasher.update(memoryview(data).cast("B"))
        return self._writer.write(data)

    def flush(self) -> None:
        """Flush the inner writer; data is durable only once the `with` block ends."""
        self._writer.flush()


class Creates(Protocol):
    """What writes objects: a store, or an uploader."""

    checksums: str

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write a new object piece by piece (`Store.create`)."""
        ...


@contextmanager
def create_ranged(store: Creates, name: str) -> Iterator[ChecksummedWriter]:
    """Create an object with range checksums, so that it can be read in parts.

    Raises:
        ObjectExists: the name is taken.
        Unreachable: the store cannot be written.
    """
    with store.create(name) as out:
        writer = ChecksummedWriter(out, store.checksums)
        yield writer
        writer.closed = True
    assert out.stored is not None
    writer.stored = replace(out.stored, ranges=writer.hasher.checksums())


def with_ranges(store: Store, stored: StoredObject, fetched: Callable[[int], None] = lambda _: None) -> StoredObject:
    """Return the object with usable range checksums: its own, or else those computed by a verified read of all of it.

    Objects written without range checksums, or with an unknown algorithm, are read once per `BlockReader`,
    `MEASURED_BYTES` at a time.

    Raises:
        CorruptObject: missing, cut or altered; the message names the object.
        Unreachable: the store does not answer.
    """
    if stored.ranges is not None and _is_usable(stored.ranges, stored.bytes):
        return stored
    whole = start_hash(stored.checksum, f"object {stored.name}")
    hasher = _RangeHasher(RANGE_BYTES, whole.algorithm)
    for start in range(0, stored.bytes, MEASURED_BYTES):
        size = min(MEASURED_BYTES, stored.bytes - start)
        part = memoryview(store.read_range(stored.name, start, size))
        fetched(size)
        whole.update(part)
        hasher.update(part)
    compare(whole, stored.checksum, f"object {stored.name}")
    return replace(stored, ranges=hasher.checksums())


def read_verified(store: Store, stored: StoredObject) -> pa.Buffer | pa.NativeFile:
    """Read a whole object, verified: return its bytes, or, if it is large, a file that is read in parts.

    Raises:
        CorruptObject: missing, cut or altered; the message names the object.
        Unreachable: the store does not answer.
    """
    if stored.bytes <= MEASURED_BYTES:
        return store.read(stored)
    return pa.PythonFile(RangedFile(store, with_ranges(store, stored)), mode="r")


def _is_usable(ranges: RangeChecksums, size: int) -> bool:
    """Whether the algorithm is known, and every range of an object of `size` bytes has a checksum."""
    digest_bytes = range_digest_bytes(ranges.algorithm)
    if digest_bytes is None or ranges.range_bytes <= 0:
        return False
    return len(ranges.checksums) == -(-size // ranges.range_bytes) * digest_bytes * 2


class RangedFile(io.RawIOBase):
    """An object as a file for pyarrow's readers: a read fetches and verifies whole ranges, at least one chunk, and
    keeps the newest chunk.

    Args:
        stored: the result of `with_ranges`.
        fetched: called with the bytes of each fetch.
    """

    def __init__(self, store: Store, stored: StoredObject, fetched: Callable[[int], None] = lambda _: None) -> None:
        assert stored.ranges is not None, "call with_ranges first"
        self._name, self._size = stored.name, stored.bytes
        self._fetch = partial(store.read_range, stored.name)
        self._fetched = fetched
        self._range_bytes = stored.ranges.range_bytes
        self._algorithm = stored.ranges.algorithm
        self._checksums = bytes.fromhex(stored.ranges.checksums)
        self._position = 0
        self._chunk: tuple[int, pa.Buffer] = (0, pa.py_buffer(b""))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the read offset."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the read offset."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; fewer only at the end.

        Raises:
            CorruptObject: missing, cut or altered; the message names the object.
            Unreachable: the store does not answer.
        """
        start = min(self._position, self._size)
        end = self._size if size < 0 else min(start + size, self._size)
        at, chunk = self._chunk
        if not at <= start <= end <= at + chunk.size:
            at, chunk = self._chunk = self._fetch_verified(start, end)
        self._position = end
        return chunk.slice(start - at, end - start).to_pybytes()

    def _fetch_verified(self, start: int, end: int) -> tuple[int, pa.Buffer]:
        """Fetch and verify the ranges around `start` to `end`; return their offset and bytes."""
        # Parquet is read from its end, so the bytes before it are fetched with it.
        if end == self._size and end - start < CHUNK_BYTES:
            start = max(0, end - CHUNK_BYTES)
        first = start // self._range_bytes
        last = -(-max(end, start + CHUNK_BYTES) // self._range_bytes)
        begin, stop = first * self._range_bytes, min(last * self._range_bytes, self._size)
        self._fetched(stop - begin)
        data = self._fetch(begin, stop - begin)
        view = memoryview(data)
        for number, at in enumerate(range(0, len(view), self._range_bytes), first):
            found = range_hash(self._algorithm)
            found.update(view[at : at + self._range_bytes])
            digest = found.digest()
            wanted = self._checksums[number * len(digest) : (number + 1) * len(digest)]
            if digest != wanted:
                where = f"the {self._range_bytes} bytes at {begin + at} do not have checksum {wanted.hex()}"
                raise CorruptObject(f"object {self._name} was altered: {where}")
        return begin, data
