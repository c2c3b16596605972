"""The two-level key-value protocol, and the chunking of large values (US 9471438).

A value of at most `value_limit_bytes` is stored under its key. A larger one is split into chunks of that size, each
keyed by the original key and the chunk number, and a header under the key itself, written last:

    key                                            the value, or the header
    \\0 key \\0 write id (8 bytes) number (4 bytes)   a chunk, numbered from 0, big-endian

    header  "SILTCHK1" | chunk size | index of the last chunk | size of the last chunk | write id | xxh3-64 of these

The write id, new for each write, separates the chunks of two writers of one name, so that nothing is moved when one of
them wins. Keys contain neither \\0 nor a slash, so they never look like a chunk's key. A value that looks like a header
is stored with one. Readers follow the header, so values written with other limits can be read.
"""

import struct
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

import xxhash

from siltstone.errors import CorruptObject
from siltstone.store.base import Remark, Unfinished
from siltstone.store.paths import check_object_name

MAGIC = b"SILTCHK1"
WRITE_ID_BYTES = 8
_FIELDS = struct.Struct(f">{len(MAGIC)}sIII{WRITE_ID_BYTES}s")
HEADER_BYTES = _FIELDS.size + 8
WRITE_ID_OFFSET = len(MAGIC) + 12
SMALLEST_LIMIT_BYTES = 1024
CHUNK = b"\0"
"""the first byte of chunks' keys, and of no others"""

Keys = list[bytes]
Values = list[bytes | int | None]
Chunks = list[tuple[bytes, memoryview]]


class Get(Protocol):
    """Reads values of one entry."""

    def __call__(self, keys: Keys, most: int) -> Values:
        """Return the keys' values, None for a missing key; for a value longer than `most` bytes only its length."""
        ...

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        """Return the length of a key's value, and its bytes in [start, stop); None if the key is missing."""
        ...


class StagedWrite(Protocol):
    """One chunked write in progress, invisible before `commit`."""

    def put(self, chunks: Chunks) -> None:
        """Store the next (key, chunk) pairs, a few at a time; Unreachable if the write was discarded meanwhile.

        Storing the same pairs again, after a lost answer, is no error.
        """
        ...

    def commit(self, header: bytes) -> bool:
        """Make header and chunks visible, durable on return; False if the key is taken. Unreachable if discarded."""
        ...

    def discard(self) -> None:
        """Delete what was staged; no error after `commit`."""
        ...


class KeyValue(Protocol):
    """A two-level key-value store: named entries of byte keys and byte values. Every call is one attempt."""

    url: str
    label: str
    value_limit_bytes: int
    """the largest value that is stored whole"""

    def entries(self, prefix: str) -> Iterable[str]:
        """Return entries, each once, in no order: all whose name starts with `prefix`, and perhaps others."""
        ...

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """Return (key, bytes of its value) of each key except chunks', in no order; none if the entry is missing."""
        ...

    def open_entry(self, entry: str, key: bytes = b"") -> AbstractContextManager[Get]:
        """Open an entry for reading values within the block; error messages name `key`."""
        ...

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """Store a new key, durable on return; False if it is taken. Exactly one of several writers wins."""
        ...

    def stage(self, entry: str, key: bytes, write_id: bytes) -> StagedWrite | None:
        """Begin a chunked write of `key`; None if it is known to be taken."""
        ...

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """Delete keys and, if a value is a header, its chunks after it; the entry disappears with its last key."""
        ...

    def list_unfinished(self) -> Iterable[Unfinished]:
        """List chunked writes that were begun and not committed."""
        ...

    def discard(self, unfinished: Unfinished) -> None:
        """Free the space of an unfinished write; no error if it is gone or was committed."""
        ...

    def check(self, *, writable: bool) -> None:
        """Check that the store can be used (`Store.check`)."""
        ...

    def remarks(self) -> Sequence[Remark]:
        """Report how the store is configured and how full it is (`Store.remarks`)."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a chunked value (US 9471438): chunk size, index of the last chunk and its size; sizes in bytes."""

    chunk_bytes: int
    last_chunk: int
    last_chunk_bytes: int
    write_id: bytes

    @property
    def value_bytes(self) -> int:
        """Size of the whole value."""
        return self.chunk_bytes * self.last_chunk + self.last_chunk_bytes

    def bytes_of(self, chunk: int) -> int:
        """Size of one chunk."""
        return self.last_chunk_bytes if chunk == self.last_chunk else self.chunk_bytes

    def encode(self) -> bytes:
        """Return the header's stored bytes."""
        fields = _FIELDS.pack(MAGIC, self.chunk_bytes, self.last_chunk, self.last_chunk_bytes, self.write_id)
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def decode(cls, value: bytes, label: str) -> Self | None:
        """Decode a header; None if `value` is a plain value.

        Raises:
            CorruptObject: it is an altered header; the message names `label`.
        """
        if not like_header(value):
            return None
        _, chunk, last, last_bytes, write_id = _FIELDS.unpack_from(value)
        fits = chunk >= SMALLEST_LIMIT_BYTES and 0 < last_bytes <= chunk
        if xxhash.xxh3_64_digest(value[: _FIELDS.size]) != value[_FIELDS.size :] or not fits:
            raise CorruptObject(
                f"{label} was altered: the header of its chunks does not match its checksum or its limits"
            )
        return cls(chunk, last, last_bytes, write_id)


def like_header(value: bytes | bytearray | memoryview) -> bool:
    """Whether `value` would be read as a header."""
    return len(value) == HEADER_BYTES and bytes(value[: len(MAGIC)]) == MAGIC


def chunk_stem(key: bytes, write_id: bytes) -> bytes:
    """Return the prefix of the keys of all chunks of one write."""
    return CHUNK + key + CHUNK + write_id


def chunk_key(key: bytes, write_id: bytes, number: int) -> bytes:
    """Return the key of chunk `number` of the value of `key`."""
    return chunk_stem(key, write_id) + number.to_bytes(4, "big")


def join_name(entry: str, key: bytes) -> str:
    """Return the name of the object with `key` in `entry`."""
    return f"{entry}/{key.decode()}" if entry else key.decode()


def split_name(name: str) -> tuple[str, bytes]:
    """Split an object's name into (entry, key).

    Raises:
        UsageError: it is not an object name.
    """
    entry, _, key = check_object_name(name).rpartition("/")
    return entry, key.encode()
