"""The two-level key-value protocol, and how a value over the limit lies in it: the chunking of US 9471438.

A value of at most `value_limit_bytes` is stored under its key. A larger one is split into chunks of that size, each
keyed by the original key and the chunk number, and a header under the key itself, written last:

    key                                            the value, or the header
    \\0 key \\0 write id (8 bytes) number (4 bytes)   a chunk, numbered from 0, big-endian

    header  "SILTCHK1" | chunk size | index of the last chunk | size of the last chunk | write id | xxh3-64 of these

The write id, new for each write, keeps the chunks of two writers of one name apart, so that nothing is moved when one
of them wins. Keys hold neither \\0 nor a slash, so no key can be taken for a chunk's. A value that could be taken for a
header is stored with one. Readers go by the header: values written with other limits read alike.
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
"""what the key of a chunk begins with, and no other"""

Keys = list[bytes]
Values = list[bytes | int | None]
Chunks = list[tuple[bytes, memoryview]]


class Get(Protocol):
    """Reads values of one entry."""

    def __call__(self, keys: Keys, most: int) -> Values:
        """The values of keys, None where there is none; of one longer than `most` bytes only how long it is."""
        ...

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        """How long the value of a key is, and those of its bytes in [start, stop); None where there is none."""
        ...


class Staged(Protocol):
    """One chunked write on its way: seen by nobody before `commit`."""

    def put(self, chunks: Chunks) -> None:
        """Store the next (key, chunk) pairs, a few at a time; Unreachable if the write was discarded meanwhile.

        The same ones again, after an answer that was lost, are no error.
        """
        ...

    def commit(self, header: bytes) -> bool:
        """Let header and chunks appear, durable on return; False if the key is taken. Unreachable if discarded."""
        ...

    def discard(self) -> None:
        """Free what was staged; no error after `commit`."""
        ...


class KeyValue(Protocol):
    """A two-level key-value store: named entries of byte keys and byte values. Every call is one attempt."""

    url: str
    label: str
    value_limit_bytes: int
    """the largest value it is given"""

    def entries(self, prefix: str) -> Iterable[str]:
        """Entries, each once in no order: all whose name starts with `prefix`, and perhaps others."""
        ...

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """(key, bytes of its value) of each key that is no chunk's, in no order; nothing where there is no entry."""
        ...

    def reading(self, entry: str, key: bytes = b"") -> AbstractContextManager[Get]:
        """What reads values of `entry` as long as the block lasts; messages name `key`."""
        ...

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """Store a new key, durable on return; False if it is taken. Of many writers one wins."""
        ...

    def stage(self, entry: str, key: bytes, write_id: bytes) -> Staged | None:
        """Begin a chunked write of `key`; None if it is known to be taken."""
        ...

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """Remove keys and, where a value is a header, its chunks after it; the entry goes with its last key."""
        ...

    def unfinished(self) -> Iterable[Unfinished]:
        """Chunked writes begun and not committed."""
        ...

    def discard(self, unfinished: Unfinished) -> None:
        """Free the room of one; no error if it is gone or was committed."""
        ...

    def check(self, *, writable: bool) -> None:
        """As `Store.check`."""
        ...

    def remarks(self) -> Sequence[Remark]:
        """As `Store.remarks`."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """Stands for a value in chunks (US 9471438): their size, the index and the size of the last; sizes in bytes."""

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
        """As it is stored."""
        fields = _FIELDS.pack(MAGIC, self.chunk_bytes, self.last_chunk, self.last_chunk_bytes, self.write_id)
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def decode(cls, value: bytes, label: str) -> Self | None:
        """The header that `value` is; None if it is a plain value.

        Raises:
            CorruptObject: a header, but altered; names `label`.
        """
        if not like_header(value):
            return None
        _, chunk, last, last_bytes, write_id = _FIELDS.unpack_from(value)
        fits = chunk >= SMALLEST_LIMIT_BYTES and 0 < last_bytes <= chunk
        if xxhash.xxh3_64_digest(value[: _FIELDS.size]) != value[_FIELDS.size :] or not fits:
            raise CorruptObject(
                f"{label} was altered: the header of its chunks does not fit its checksum, or its limits"
            )
        return cls(chunk, last, last_bytes, write_id)


def like_header(value: bytes | bytearray | memoryview) -> bool:
    """Whether `value` would be read as a header."""
    return len(value) == HEADER_BYTES and bytes(value[: len(MAGIC)]) == MAGIC


def chunk_stem(key: bytes, write_id: bytes) -> bytes:
    """What the keys of all chunks of one write begin with."""
    return CHUNK + key + CHUNK + write_id


def chunk_key(key: bytes, write_id: bytes, number: int) -> bytes:
    """The key of chunk `number` of the value of `key`."""
    return chunk_stem(key, write_id) + number.to_bytes(4, "big")


def join_name(entry: str, key: bytes) -> str:
    """The name of the object that is `key` of `entry`."""
    return f"{entry}/{key.decode()}" if entry else key.decode()


def split_name(name: str) -> tuple[str, bytes]:
    """(entry, key) of the object `name`.

    Raises:
        UsageError: it is no object name.
    """
    entry, _, key = check_object_name(name).rpartition("/")
    return entry, key.encode()
