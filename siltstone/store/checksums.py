"""Checksums of stored bytes: the algorithms, the text format, and verification.

A checksum is a text that names its algorithm:

    sha-256:<64 hex digits>       written by default (the warehouse URL's option `?checksums=NAME` chooses another)
    blake2b-256:<64 hex digits>   as strong, and faster on processors without instructions for SHA-256
    xxh3-128:<32 hex digits>      the fastest, against faults only

The first two prove that bytes were not altered by anyone; xxh3-128 does not, since other bytes with the same checksum
are easily found. All are verified by their own algorithm, whatever the option: the text comes from the catalog, or from
a manifest whose checksum is in the catalog, so a writer to the store alone cannot choose a weaker one
(docs/threat-model.md).
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa
import xxhash

from siltstone.errors import CorruptObject, UsageError

Algorithm = Literal["sha-256", "blake2b-256", "xxh3-128"]
"""the algorithms that a warehouse may use"""
DEFAULT = "sha-256"
"""the default algorithm"""
OPTION = "checksums"
"""the option of a warehouse's or store's URL that chooses the algorithm"""

Data = bytes | bytearray | memoryview | pa.Buffer


class Hash(Protocol):
    """A hash object of hashlib, or a similar one."""

    def update(self, data: Any, /) -> None:
        """Append bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all that was appended."""
        ...


def _blake2b() -> Hash:
    return hashlib.blake2b(digest_size=32)


_HASHES: dict[str, tuple[Callable[[], Hash], int, int]] = {
    "sha-256": (lambda: hashlib.sha256(usedforsecurity=True), 32, 1),
    "blake2b-256": (_blake2b, 32, 2),
    "xxh3-128": (xxhash.xxh3_128, 16, 3),
}
"""algorithm -> its constructor, bytes of a digest, and its tag byte in a packed checksum"""
_TAGGED = {tag: name for name, (_, _, tag) in _HASHES.items()}
_TEXT = re.compile(r"([a-z0-9-]{1,32}):((?:[0-9a-f]{2}){1,64})")
PACKED_BYTES_MIN = 1 + 16
PACKED_BYTES_MAX = 1 + 32
_LARGE_BYTES = 1 << 20
"""bytes whose hash takes so long that a thread pays"""


class Checksum:
    """A checksum computed piece by piece."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        self.algorithm = algorithm
        self._hash = _HASHES[algorithm][0]()
        self._beside: Future[None] | None = None

    def update(self, data: Any) -> None:
        """Append bytes."""
        self.join()
        self._hash.update(data)

    def update_beside(self, data: Data) -> None:
        """Append bytes; large ones in a thread, while the caller writes or reads: hashing lets other threads run.

        The bytes must not change until `join`, `update`, `update_beside` or `text` returns.
        """
        view = memoryview(data)
        self.join()
        if view.nbytes >= _LARGE_BYTES:
            try:
                self._beside = self._thread.submit(self._hash.update, view)
            except RuntimeError:  # no thread can start: at the limit of their number, or at the process's end
                self._hash.update(view)
        else:
            self._hash.update(view)

    def join(self) -> None:
        """Wait until all bytes so far are in the checksum."""
        if self._beside is not None:
            self._beside.result()
            self._beside = None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "siltstone-checksum")  # ends with this object

    def text(self) -> str:
        """Return the checksum of all bytes so far."""
        self.join()
        return f"{self.algorithm}:{self._hash.digest().hex()}"


def check_algorithm(name: str) -> str:
    """Return `name` if it is a known algorithm.

    Raises:
        UsageError: it is not.
    """
    if name not in _HASHES:
        raise UsageError(f"{name!r} is not a checksum algorithm: use {', '.join(get_args(Algorithm))}")
    return name


def checksum_of(data: Data, algorithm: str = DEFAULT) -> str:
    """Compute the checksum of some bytes."""
    checksum = Checksum(algorithm)
    checksum.update(memoryview(data))
    return checksum.text()


def algorithm_of(checksum: str) -> str:
    """Return the algorithm of a recorded checksum.

    Raises:
        ValueError: it is not a checksum, or of an unknown algorithm.
    """
    found = _TEXT.fullmatch(checksum)
    if found is None or found[1] not in _HASHES or len(found[2]) != 2 * _HASHES[found[1]][1]:
        raise ValueError(f"{checksum[:100]!r} is not a checksum")
    return found[1]


def start_hash(checksum: str, what: str) -> Checksum:
    """Start a checksum with the algorithm of a recorded one, to compare with it.

    Raises:
        CorruptObject: the recorded text is not a checksum; the message names `what`.
    """
    try:
        return Checksum(algorithm_of(checksum))
    except ValueError as error:
        raise CorruptObject(f"{what} cannot be verified: {error}") from None


def verify(data: Data, checksum: str, what: str) -> None:
    """Compare bytes with their recorded checksum.

    Raises:
        CorruptObject: they differ from what was written; the message names `what`.
    """
    found = start_hash(checksum, what)
    found.update(memoryview(data))
    compare(found, checksum, what)


def compare(found: Checksum, checksum: str, what: str) -> None:
    """Compare a computed checksum with the recorded one.

    Raises:
        CorruptObject: they differ; the message names `what`.
    """
    if found.text() != checksum:
        raise CorruptObject(f"{what} was altered: its checksum is not {checksum}")


def pack(checksum: str) -> bytes:
    """Encode a checksum in binary: a tag byte and the digest."""
    _, _, tag = _HASHES[algorithm_of(checksum)]
    return bytes([tag]) + bytes.fromhex(checksum.rpartition(":")[2])


def unpack(packed: bytes) -> str:
    """Decode a checksum that `pack` encoded.

    Raises:
        ValueError: the bytes are not a checksum.
    """
    algorithm = _TAGGED.get(packed[0]) if packed else None
    if algorithm is None or len(packed) != 1 + _HASHES[algorithm][1]:
        raise ValueError(f"{len(packed)} bytes are not a checksum")
    return f"{algorithm}:{packed[1:].hex()}"


def range_hash(algorithm: str) -> Hash:
    """Make the hash of one range; KeyError if the algorithm is not known."""
    return _HASHES[algorithm][0]()


def range_digest_bytes(algorithm: str) -> int | None:
    """Return the bytes of a range's digest; None if the algorithm is not known."""
    return _HASHES[algorithm][1] if algorithm in _HASHES else None
