"""Checksums of stored bytes: which algorithms there are, how a checksum is written, how bytes are compared with it.

A checksum is a text that says by itself what it is:

    sha-256:<64 hex digits>       what is written, unless the warehouse's URL says otherwise (`?checksums=NAME`)
    blake2b-256:<64 hex digits>   as good, and faster on processors without instructions for SHA-256
    <32 hex digits>               xxh3-128, as version 0.1 wrote it

The first two show that bytes are what was written, whoever could alter them since; xxh3-128 guards against faults, not
against people, who find other bytes of the same checksum at once. All are verified whatever the option says, each by
its own algorithm: the text comes from the catalog, or from a manifest whose own checksum the catalog has, so nobody who
can only write to the store can choose a weaker one (docs/threat-model.md).
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa
import xxhash

from siltstone.errors import CorruptObject, UsageError

Algorithm = Literal["sha-256", "blake2b-256", "xxh3-128"]
"""what a warehouse may choose from"""
DEFAULT = "sha-256"
"""the algorithm of what is written where no other was chosen"""
BARE = "xxh3-128"
"""the algorithm whose checksums are hex digits alone"""
OPTION = "checksums"
"""the option of a warehouse's or store's URL that chooses the algorithm"""

Data = bytes | bytearray | memoryview | pa.Buffer


class Hash(Protocol):
    """An object of hashlib, or one like it."""

    def update(self, data: Any, /) -> None:
        """Append bytes."""
        ...

    def digest(self) -> bytes:
        """The digest of all that was appended."""
        ...


def _blake2b() -> Hash:
    return hashlib.blake2b(digest_size=32)


_HASHES: dict[str, tuple[Callable[[], Hash], int, int]] = {
    "sha-256": (lambda: hashlib.sha256(usedforsecurity=True), 32, 1),
    "blake2b-256": (_blake2b, 32, 2),
    BARE: (xxhash.xxh3_128, 16, 0),
}
"""algorithm -> what makes its hash, bytes of a digest, and the byte that stands for it in a packed checksum"""
_TAGGED = {tag: name for name, (_, _, tag) in _HASHES.items() if tag}
_RANGES = {name: _HASHES[name][:2] for name in get_args(Algorithm) if name != BARE} | {"xxh3-64": (xxhash.xxh3_64, 8)}
"""the algorithms of the ranges of an object: those of version 0.1 are shorter"""
_TEXT = re.compile(r"(?:([a-z0-9-]{1,32}):)?((?:[0-9a-f]{2}){1,64})")
PACKED_BYTES_MAX = 1 + 32


class Checksum:
    """The checksum of what comes piece by piece."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        self.algorithm = algorithm
        self._hash = _HASHES[algorithm][0]()
        self.update = self._hash.update

    def text(self) -> str:
        """That of all that came so far."""
        digest = self._hash.digest().hex()
        return digest if self.algorithm == BARE else f"{self.algorithm}:{digest}"


def check_algorithm(name: str) -> str:
    """Return `name` if a warehouse can have it.

    Raises:
        UsageError: it is not known.
    """
    if name not in _HASHES:
        raise UsageError(f"there are no checksums {name!r}: use {', '.join(get_args(Algorithm))}")
    return name


def checksum_of(data: Data, algorithm: str = DEFAULT) -> str:
    """The checksum of some bytes."""
    checksum = Checksum(algorithm)
    checksum.update(memoryview(data))
    return checksum.text()


def algorithm_of(checksum: str) -> str:
    """The algorithm that a recorded checksum was made with.

    Raises:
        ValueError: it is no checksum, or of an algorithm that is not known here.
    """
    found = _TEXT.fullmatch(checksum)
    name = (found[1] or BARE) if found else ""
    if found is None or name not in _HASHES or len(found[2]) != 2 * _HASHES[name][1] or found[1] == BARE:
        raise ValueError(f"{checksum[:100]!r} is not a checksum")
    return name


def recorded(checksum: str, what: str) -> Checksum:
    """A checksum of nothing yet, by the algorithm of a recorded one, to compare with it.

    Raises:
        CorruptObject: what is recorded is no checksum; names `what`.
    """
    try:
        return Checksum(algorithm_of(checksum))
    except ValueError as error:
        raise CorruptObject(f"{what} cannot be verified: {error}") from None


def verify(data: Data, checksum: str, what: str) -> None:
    """Compare bytes with their recorded checksum.

    Raises:
        CorruptObject: they are not what was written; names `what`.
    """
    found = recorded(checksum, what)
    found.update(memoryview(data))
    compare(found, checksum, what)


def compare(found: Checksum, checksum: str, what: str) -> None:
    """Compare the checksum of what came with the recorded one.

    Raises:
        CorruptObject: they differ; names `what`.
    """
    if found.text() != checksum:
        raise CorruptObject(f"{what} was altered: its checksum is not {checksum}")


def pack(checksum: str) -> bytes:
    """A checksum in binary: of xxh3-128 the 16 bytes alone, of others a byte for the algorithm before their digest."""
    algorithm = algorithm_of(checksum)
    digest = bytes.fromhex(checksum.rpartition(":")[2])
    return digest if algorithm == BARE else bytes([_HASHES[algorithm][2]]) + digest


def unpack(packed: bytes) -> str:
    """The checksum that `pack` was given.

    Raises:
        ValueError: it is none.
    """
    if len(packed) == _HASHES[BARE][1]:
        return packed.hex()
    algorithm = _TAGGED.get(packed[0]) if packed else None
    if algorithm is None or len(packed) != 1 + _HASHES[algorithm][1]:
        raise ValueError(f"{len(packed)} bytes are not a checksum")
    return f"{algorithm}:{packed[1:].hex()}"


def is_bare(checksum: str) -> bool:
    """Whether version 0.1 could have written it."""
    return ":" not in checksum


def range_algorithm(algorithm: str) -> str:
    """The algorithm of an object's ranges in a store that writes checksums of `algorithm`."""
    return "xxh3-64" if algorithm == BARE else algorithm


def range_hash(algorithm: str) -> Hash:
    """What hashes one range; KeyError where the algorithm is not known."""
    return _RANGES[algorithm][0]()


def range_digest_bytes(algorithm: str) -> int | None:
    """Bytes of the digest of one range; None where the algorithm is not known."""
    return _RANGES[algorithm][1] if algorithm in _RANGES else None
