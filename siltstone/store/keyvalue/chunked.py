"""A `Store` over any two-level key-value driver; larger values are stored in chunks (`protocol`).

The name of an object is `<entry>/<key>`, split at its last slash; a name without a slash is in entry "".
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import groupby

import pyarrow as pa

from siltstone.errors import CorruptObject, ObjectExists, SiltstoneError, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import Remark, Unfinished
from siltstone.store.checksums import DEFAULT, Checksum, compare, start_hash
from siltstone.store.keyvalue.protocol import (
    HEADER_BYTES,
    WRITE_ID_BYTES,
    Get,
    Header,
    Keys,
    KeyValue,
    StagedWrite,
    Values,
    chunk_key,
    like_header,
    split_name,
)
from siltstone.store.paths import check_prefix
from siltstone.store.retry import RetryPolicy

_FETCH_BYTES = 4 << 20  # fewer round trips to a store that is far cost a near one nothing; more would leave the cache
_SEND_BYTES = 16 << 20
_CLAIMED_BYTES = 64 << 20
"""a value that claims to be larger gets more memory only as its chunks arrive"""
_ONCE = RetryPolicy(kind="none")

Data = bytes | bytearray | memoryview | pa.Buffer
Listing = list[tuple[str, int]]


class ChunkWriter:
    """`ObjectWriter` of one object: keeps at most one chunk in memory, and stages full chunks."""

    def __init__(self, driver: KeyValue, name: str, label: str, policy: RetryPolicy, checksums: str) -> None:
        self.stored: StoredObject | None = None
        self.closed = False
        self._driver, self._name, self._label, self._policy = driver, name, label, policy
        self._entry, self._key = split_name(name)
        self._limit = driver.value_limit_bytes
        self._held = bytearray()
        self._staged: StagedWrite | None = None
        self._write_id = os.urandom(WRITE_ID_BYTES)
        self._chunks = 0
        self._bytes = 0
        self._checksum = Checksum(checksums)

    def write(self, data: Data) -> int:
        """Append bytes; Unreachable if the store refuses them, ObjectExists if the name is taken."""
        if self.closed:
            raise ValueError(f"{self._label} is already closed")
        view = memoryview(data).cast("B")
        size = len(view)
        self._checksum.update_beside(view)
        self._bytes += size
        # A chunk is sent only when more follows, so a value that just fits has no chunks, and no chunk is empty.
        if len(self._held) + len(view) > self._limit:
            if self._held:
                room = self._limit - len(self._held)
                self._stage(memoryview(self._held + view[:room]))
                self._held = bytearray()
                view = view[room:]
            whole = (len(view) - 1) // self._limit * self._limit
            self._stage(view[:whole])
            view = view[whole:]
        self._held += view
        self._checksum.join()
        return size

    def flush(self) -> None:
        """Do nothing: data is durable only once the block ends."""

    def finish(self) -> None:
        """Make the object appear; ObjectExists if another writer was first."""
        self.closed = True
        if self._staged is None and not like_header(self._held):
            added = self._add_once(lambda: self._driver.add(self._entry, self._key, memoryview(self._held)), self._held)
        else:
            self._stage(memoryview(self._held))
            header = Header(self._limit, self._chunks - 1, len(self._held), self._write_id).encode()
            staged = self._staged
            assert staged is not None
            added = self._add_once(lambda: staged.commit(header), header)
        if not added:
            raise self._object_exists_error()
        self.stored = StoredObject(self._name, self._bytes, self._checksum.text())

    def abandon(self) -> None:
        """Discard what was staged; if the store cannot be reached, it stays among `list_unfinished`."""
        self.closed = True
        if self._staged is not None:
            with suppress(SiltstoneError):
                self._staged.discard()

    def _stage(self, data: memoryview) -> None:
        """Store the next chunks, some mebibytes at a time; all but the very last are full."""
        if self._staged is None:
            self._staged = self._policy.call(lambda: self._driver.stage(self._entry, self._key, self._write_id))
            if self._staged is None:
                raise self._object_exists_error()
        staged = self._staged
        chunks = [data[start : start + self._limit] for start in range(0, len(data), self._limit)]
        if (self._chunks + len(chunks)) >> 32:
            raise Unreachable(f"cannot write {self._label}: it has more than 2^32 chunks; raise chunk_bytes")
        step = max(1, _SEND_BYTES // self._limit)
        for start in range(0, len(chunks), step):
            some = [
                (chunk_key(self._key, self._write_id, number), chunk)
                for number, chunk in enumerate(chunks[start : start + step], self._chunks)
            ]
            self._policy.call(partial(staged.put, some))
            self._chunks += len(some)

    def _add_once(self, store: Callable[[], bool], value: bytes | bytearray) -> bool:
        """Call `store` with retries. If an attempt's answer was lost, a key that is taken then may be our own."""
        lost = False

        def attempt() -> bool:
            nonlocal lost
            try:
                return store() or (lost and self._has_value(value))
            except Unreachable as error:
                if lost and not error.transient and self._has_value(value):
                    return True  # committed, so no longer recorded as unfinished
                lost = lost or error.transient
                raise

        return self._policy.call(attempt)

    def _has_value(self, value: bytes | bytearray) -> bool:
        with self._driver.open_entry(self._entry, self._key) as get:
            return get([self._key], len(value))[0] == value

    def _object_exists_error(self) -> ObjectExists:
        return ObjectExists(f"{self._label} already exists: objects are written once")


class ChunkedStore:
    """A `Store` over `driver`; `policy` retries within `create` and `list`, which callers cannot retry."""

    ranged = False

    def __init__(self, driver: KeyValue, policy: RetryPolicy, checksums: str = DEFAULT) -> None:
        self.checksums = checksums
        self.driver = driver
        self.policy = policy
        self.url, self.label = driver.url, driver.label

    def __repr__(self) -> str:
        return f"ChunkedStore({self.label!r})"

    def with_policy(self, policy: RetryPolicy) -> "ChunkedStore":
        """Return the same store, with another policy for the requests within `create` and `list`."""
        return ChunkedStore(self.driver, policy, self.checksums)

    def put(self, name: str, data: Data) -> StoredObject:
        """Store a new object: atomic, durable on return (`Store.put`)."""
        with self._open_writer(name, _ONCE) as writer:
            writer.write(data)
        assert writer.stored is not None
        return writer.stored

    def create(self, name: str) -> AbstractContextManager[ChunkWriter]:
        """Write a new object piece by piece, with about one chunk in memory; it appears when the block succeeds."""
        return self._open_writer(name, self.policy)

    @contextmanager
    def _open_writer(self, name: str, policy: RetryPolicy) -> Iterator[ChunkWriter]:
        writer = ChunkWriter(self.driver, name, self._label(name), policy, self.checksums)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def read(self, stored: StoredObject) -> pa.Buffer:
        """Read a whole object and verify its size and checksum; each chunk is fetched once."""
        entry, key = split_name(stored.name)
        label = self._label(stored.name)
        found = start_hash(stored.checksum, label)
        with self.driver.open_entry(entry, key) as get:
            value, header = self._head(get, key, label, max(stored.bytes, HEADER_BYTES))
            size = header.value_bytes if header else value if isinstance(value, int) else len(value)
            if size != stored.bytes or isinstance(value, int):
                raise CorruptObject(f"{label} has {size} bytes instead of {stored.bytes}")
            if header is None:
                data = pa.py_buffer(value)
                found.update(value)
            else:
                data = _gather(get, key, header, 0, size, label, found)
        compare(found, stored.checksum, label)
        return data

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Read exactly `length` bytes at `offset`, not verified; if the driver can, only these are fetched."""
        entry, key = split_name(name)
        label = self._label(name)
        with self.driver.open_entry(entry, key) as get:
            found, header = get.part(key, offset, offset + length), None
            if found is None:
                raise CorruptObject(f"{label} is missing")
            size, part = found
            if size == HEADER_BYTES:
                header = self._head(get, key, label, HEADER_BYTES)[1]
                size = size if header is None else header.value_bytes
            if offset + length > size:
                raise CorruptObject(f"{label} has {size} bytes and should have {offset + length}")
            if header is None:
                return pa.py_buffer(part)
            return _gather(get, key, header, offset, length, label)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every object whose name starts with `prefix`, in name order, entry by entry."""
        check_prefix(prefix)
        parent = prefix.rpartition("/")[0]  # a name in another entry matches only if that entry's name does
        found = self.policy.call(lambda: list(self.driver.entries(prefix)))
        folders = {entry + "/" if entry else "" for entry in (parent, *found)}
        waiting: list[tuple[str, int]] = []
        for folder in sorted(folders):
            # Names that sort before the folder sort before all names in it and in later folders.
            yield from (each for each in waiting if each[0] < folder)
            waiting = [each for each in waiting if each[0] >= folder]
            waiting = sorted(waiting + [each for each in self._sizes(folder) if each[0].startswith(prefix)])
        yield from waiting

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """Return none: key-value stores keep no times."""
        for name in names:
            split_name(name)
        return {}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and entries left empty; a missing object is no error."""
        places = sorted(split_name(name) for name in names)
        for entry, group in groupby(places, key=lambda place: place[0]):
            self.driver.delete(entry, [key for _, key in group])

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """List chunked writes that were begun and not committed; those of unknown name are always included."""
        check_prefix(prefix)
        for write in self.policy.call(lambda: list(self.driver.list_unfinished())):
            if write.name is None or write.name.startswith(prefix):
                yield write

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Free the space of unfinished writes; a write still in progress fails."""
        for write in unfinished:
            self.driver.discard(write)

    def check(self, *, writable: bool) -> None:
        """Check that the store can be used (`Store.check`)."""
        self.driver.check(writable=writable)

    def remarks(self) -> Sequence[Remark]:
        """Report how the store is configured and how full it is (`Store.remarks`)."""
        return self.driver.remarks()

    def _label(self, name: str) -> str:
        return f"object {name} in {self.label}"

    def _head(self, get: Get, key: bytes, label: str, most: int) -> tuple[bytes | int, Header | None]:
        """Return the value under the key, or its length if it is longer than `most`; and the header, if it is one."""
        [value] = get([key], most)
        if value is None:
            raise CorruptObject(f"{label} is missing")
        return value, None if isinstance(value, int) else Header.decode(value, label)

    def _sizes(self, folder: str) -> Listing:
        """Return (name, bytes) of all objects of one entry."""
        entry = folder.removesuffix("/")
        sizes = self.policy.call(lambda: dict(self.driver.sizes(entry)))
        headed = [key for key, size in sizes.items() if size == HEADER_BYTES]
        if headed:
            values = self.policy.call(lambda: self._values(entry, headed))
            for key, value in zip(headed, values, strict=True):
                name = folder + key.decode()
                header = Header.decode(value, self._label(name)) if isinstance(value, bytes) else None
                sizes[key] = header.value_bytes if header else HEADER_BYTES
        return [(folder + key.decode(), size) for key, size in sizes.items()]

    def _values(self, entry: str, keys: Keys) -> Values:
        with self.driver.open_entry(entry) as get:
            return get(keys, HEADER_BYTES)


def _gather(
    get: Get, key: bytes, header: Header, offset: int, length: int, label: str, found: Checksum | None = None
) -> pa.Buffer:
    """Read `length` bytes at `offset` of a chunked value, a few chunks at a time, and add them to `found`."""
    data, done = pa.allocate_buffer(min(length, _CLAIMED_BYTES), resizable=True), 0
    if length == 0:
        return data
    first, last = offset // header.chunk_bytes, (offset + length - 1) // header.chunk_bytes
    step = max(1, _FETCH_BYTES // header.chunk_bytes)
    for start in range(first, last + 1, step):
        numbers = range(start, min(start + step, last + 1))
        for piece in _pieces(get, key, header, numbers, (offset, offset + length), label):
            if done + len(piece) > data.size:
                data.resize(min(length, max(2 * data.size, done + len(piece))))
            with memoryview(data) as view:
                view.cast("B")[done : done + len(piece)] = piece
            done += len(piece)
            if found is not None:
                found.update_beside(piece)
    return data


def _pieces(
    get: Get, key: bytes, header: Header, numbers: range, wanted: tuple[int, int], label: str
) -> Iterator[bytes]:
    """Yield the bytes of chunks that are within `wanted`, in order; chunks wanted in full are read in one call."""

    def check(number: int, size: int | None) -> None:
        if size is None:
            raise CorruptObject(f"{label} is cut: its chunk {number} of {header.last_chunk + 1} is missing")
        if size != header.bytes_of(number):
            text = f"its chunk {number} has {size} bytes, not {header.bytes_of(number)}"
            raise CorruptObject(f"{label} was altered: {text}")

    def cut(number: int) -> tuple[int, int] | None:
        begin, size = number * header.chunk_bytes, header.bytes_of(number)
        span = max(0, wanted[0] - begin), min(size, wanted[1] - begin)
        return None if span == (0, size) else span

    def part(number: int, span: tuple[int, int]) -> bytes:
        size, found = get.part(chunk_key(key, header.write_id, number), *span) or (None, b"")
        check(number, size)
        return found

    ends = {number: span for number in {numbers[0], numbers[-1]} if (span := cut(number))}
    whole = [number for number in numbers if number not in ends]
    if numbers[0] in ends:
        yield part(numbers[0], ends[numbers[0]])
    if whole:
        values = get([chunk_key(key, header.write_id, number) for number in whole], header.chunk_bytes)
        for number, value in zip(whole, values, strict=True):
            check(number, len(value) if isinstance(value, bytes) else value)
        chunks = [value for value in values if isinstance(value, bytes)]
        yield b"".join(chunks) if len(chunks) > 1 else chunks[0]
    if len(numbers) > 1 and numbers[-1] in ends:
        yield part(numbers[-1], ends[numbers[-1]])
