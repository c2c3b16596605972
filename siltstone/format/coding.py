"""Byte-level building blocks shared by blocks, indexes and segments: varints, runs, byte planes, seals.

All vectorised over NumPy arrays. Numbers are unsigned 64-bit; signed ones go through `zigzag`. What is read
back is bounds-checked: cut or altered bytes end in CorruptObject, never in a crash.

What is decoded takes memory that its length pays for (`room_for`): a decoder counts before it allocates, and an encoder
pads what compresses better, which costs a 64th of what a reader will take.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from siltstone.decoding import FREE_BYTES, RATIO, room_for
from siltstone.errors import CorruptObject, NewerFormat

Bytes = bytes | bytearray | memoryview | pa.Buffer
ZSTD_LEVEL = 1
MAX_COUNT = 1 << 31
"""no sequence is longer; what claims to be is corrupt"""
KEY_GROUPS_MAX = 1 << 16
"""a key group is a number of 16 bits"""
_TEXT_BYTES = 64
"""about what a short string takes in memory"""
_SEAL_BYTES = 8
_WORTH_COMPRESSING_BYTES = 32
_VARINT_BYTES_MAX = 10
_WORD = (1 << 64) - 1


def zigzag(values: np.ndarray) -> np.ndarray:
    """int64 to uint64, small magnitudes to small numbers: 0, -1, 1, -2 become 0, 1, 2, 3."""
    signed = values.astype(np.int64, copy=False)
    return ((signed << 1) ^ (signed >> 63)).view(np.uint64)


def unzigzag(values: np.ndarray) -> np.ndarray:
    """The inverse of `zigzag`."""
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)


def seal(payload: bytes, magic: bytes) -> bytes:
    """`payload` between a magic number and its xxh3-64 checksum."""
    return b"".join((magic, payload, xxhash.xxh3_64_digest(payload)))


def unseal(data: Bytes, magic: bytes, name: str) -> memoryview:
    """The payload that `seal` wrapped, without copying; `magic` ends in a digit, the format.

    Raises:
        CorruptObject: it is not whole; names `name`.
        NewerFormat: it is whole, but of a later format.
    """
    view = memoryview(data).cast("B")
    head = bytes(view[: len(magic)])
    if head[:-1] == magic[:-1] and head[-1:].isdigit() and head > magic:
        raise newer_format(name, head[-1:].decode())
    if head != magic:
        raise CorruptObject(f"{name} is not of the expected format: it does not begin with {magic!r}")
    if len(view) < len(magic) + _SEAL_BYTES:
        raise CorruptObject(f"{name} is cut short")
    payload = view[len(magic) : -_SEAL_BYTES]
    if xxhash.xxh3_64_digest(payload) != bytes(view[-_SEAL_BYTES:]):
        raise CorruptObject(f"{name} was cut or altered: its checksum does not match")
    return payload


def newer_format(name: str, version: object) -> NewerFormat:
    """The error for an object that a newer Siltstone wrote. Whether it is whole, its handle's checksum has shown."""
    return NewerFormat(f"{name} has format {version}, which a newer Siltstone wrote: upgrade siltstone")


class Encoder:
    """Appends coded values to a growing byte string; without `compression` every buffer stays as it is."""

    def __init__(self, *, compression: bool = True) -> None:
        self._parts: list[bytes | memoryview] = []
        self._worth_bytes = _WORTH_COMPRESSING_BYTES if compression else MAX_COUNT
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        self._decoded_bytes = 0

    def finish(self) -> bytes:
        """All that was appended, and zeros after it if a decoder would else not trust how much that becomes."""
        data = b"".join(self._parts)
        return data.ljust(-(-(self._decoded_bytes - FREE_BYTES) // RATIO), b"\0")

    def claim(self, size: int) -> None:
        """Count bytes that a decoder will allocate at this point; of what is written here that is done already."""
        self._decoded_bytes += size

    def raw(self, data: Bytes) -> None:
        """Bytes as they are; their number must be known to the reader."""
        self._parts.append(memoryview(data).cast("B"))

    def varints(self, values: np.ndarray | Iterable[int]) -> None:
        """LEB128, seven bits a byte, least significant first; their number must be known to the reader."""
        self._parts.append(_varint_bytes(np.asarray(values, dtype=np.uint64)))

    def varint(self, value: int) -> None:
        """One LEB128 number."""
        self.varints([value])

    def runs(self, values: np.ndarray) -> None:
        """Run-length coded numbers below 2**63: a lone value costs one varint, a run of any length two.

        The low bit of a value's varint says whether a run length (less two) follows.
        """
        values = np.asarray(values, dtype=np.uint64)
        self.claim(8 * len(values))
        starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else []
        lengths = np.diff(np.append(starts, len(values))).astype(np.uint64)
        tokens = np.empty((len(lengths), 2), dtype=np.uint64)
        tokens[:, 0] = (values[starts] << np.uint64(1)) | (lengths > 1) if len(values) else 0
        tokens[:, 1] = lengths - np.uint64(2)
        self.varints(tokens[np.column_stack((np.ones(len(lengths), bool), lengths > 1))])

    def blob(self, data: Bytes) -> None:
        """Bytes with their length, compressed where that pays."""
        self.claim(len(data))
        self.varint(len(data))
        self._compressed(data)

    def integers(self, values: np.ndarray) -> None:
        """uint64 numbers: the least, how many bytes the others need above it, and so many compressed planes.

        A plane holds one byte of every number, which lets the entropy coder see each byte's own distribution.
        A constant sequence costs two bytes or so. The number of values must be known to the reader.
        """
        least = values.min() if len(values) else np.uint64(0)
        self.planes(values - least, int(least))

    def planes(self, values: np.ndarray, least: int) -> None:
        """`integers`, with the least number already subtracted."""
        self.claim(8 * len(values))
        width = (int(values.max()).bit_length() + 7) // 8 if len(values) else 0
        self.varints(np.concatenate((zigzag(np.array([least], np.uint64).view(np.int64)), [np.uint64(width)])))
        narrow = _narrowest(width)
        octets = values.astype(narrow, copy=False).view(np.uint8).reshape(len(values), narrow.itemsize)
        for i in range(width):
            self._compressed(np.ascontiguousarray(octets[:, i]).data)

    def constant(self, value: int, count: int) -> None:
        """`integers` of `count` equal numbers."""
        self.claim(8 * count)
        self.planes(np.zeros(0, np.uint64), value)

    def texts(self, values: list[str]) -> None:
        """UTF-8 strings; their number must be known to the reader."""
        coded = [value.encode() for value in values]
        self.claim(_TEXT_BYTES * len(values))
        self.runs(np.array([len(value) for value in coded], dtype=np.uint64))
        self.blob(b"".join(coded))

    def _compressed(self, data: Bytes) -> None:
        """Stored length, then the bytes: zstd where that is smaller, else as they are."""
        packed = self._compressor.compress(data) if len(data) > self._worth_bytes else data
        if len(packed) >= len(data):
            packed = data
        self.varint(len(packed))
        self.raw(packed)


class Decoder:
    """Reads what `Encoder` wrote, in the same order; CorruptObject naming `name` where it cannot be."""

    def __init__(self, data: Bytes, name: str) -> None:
        self.position = 0
        self._view = memoryview(data).cast("B")
        self._name = name
        self._room_bytes = room_for(len(self._view))
        self._decompressor = zstandard.ZstdDecompressor()

    def fail(self, why: str) -> CorruptObject:
        """The error to raise."""
        return CorruptObject(f"{self._name} cannot be read: {why}")

    def claim(self, size: int) -> None:
        """Count bytes that are about to be allocated.

        Raises:
            CorruptObject: all together they are more than the length of what is decoded pays for.
        """
        self._room_bytes -= size
        if self._room_bytes < 0:
            raise self.fail(f"it would take far more memory than its {len(self._view)} bytes pay for")

    def raw(self, count: int) -> memoryview:
        """`count` bytes, not copied."""
        if not 0 <= count <= len(self._view) - self.position:
            raise self.fail(f"{count} bytes wanted at {self.position}, {len(self._view)} in all")
        self.position += count
        return self._view[self.position - count : self.position]

    def varints(self, count: int) -> np.ndarray:
        """uint64[count]."""
        octets = np.frombuffer(self._view[self.position : self.position + 10 * count], dtype=np.uint8)
        ends = np.flatnonzero(octets < 0x80)[:count] + 1
        if len(ends) < count:
            raise self.fail("it ends within its numbers")
        if count == 0:
            return np.zeros(0, dtype=np.uint64)
        starts = np.concatenate(([0], ends[:-1]))
        places = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
        if places.max() > 9:
            raise self.fail("a number is too long")
        self.position += int(ends[-1])
        bits = (octets[: ends[-1]] & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
        return np.add.reduceat(bits, starts)

    def varint(self) -> int:
        """One number: what `varints(1)` holds, in a tenth of the time."""
        value = 0
        for place in range(_VARINT_BYTES_MAX):
            if self.position >= len(self._view):
                raise self.fail("it ends within its numbers")
            octet = self._view[self.position]
            self.position += 1
            value |= (octet & 0x7F) << (7 * place)
            if octet < 0x80:
                return value & _WORD
        raise self.fail("a number is too long")

    def count(self) -> int:
        """One number that says how many of something follow."""
        count = self.varint()
        if count > MAX_COUNT:
            raise self.fail(f"it claims {count} values")
        return count

    def runs(self, count: int) -> np.ndarray:
        """uint64[count] that `Encoder.runs` wrote."""
        self.claim(8 * count)
        values, lengths, got = [], [], 0
        while got < count:
            token = self.varint()
            length = self.varint() + 2 if token & 1 else 1
            values.append(token >> 1)
            lengths.append(length)
            got += length
            if got > count:
                raise self.fail(f"a run of {length} is longer than the {count} values there are")
        return np.repeat(np.array(values, dtype=np.uint64), lengths)

    def blob(self) -> memoryview:
        """Bytes that `Encoder.blob` wrote."""
        size = self.count()
        self.claim(size)
        return self._decompressed(size)

    def integers(self, count: int) -> np.ndarray:
        """uint64[count] that `Encoder.integers` wrote."""
        values, least = self.planes(count)
        return values + np.uint64(least)

    def planes(self, count: int) -> tuple[np.ndarray, int]:
        """What `Encoder.planes` wrote: (uint64[count], the least number that was subtracted)."""
        self.claim(8 * count)
        folded, width = self.varint(), self.varint()
        least = ((folded >> 1) ^ -(folded & 1)) & _WORD
        if width > 8:
            raise self.fail(f"a number of {width} bytes")
        narrow = _narrowest(width)
        octets = np.zeros((count, narrow.itemsize), dtype=np.uint8)
        for i in range(width):
            octets[:, i] = np.frombuffer(self._decompressed(count), dtype=np.uint8)
        return octets.view(narrow).reshape(count).astype(np.uint64, copy=False), least

    def texts(self, count: int) -> list[str]:
        """Strings that `Encoder.texts` wrote."""
        self.claim(_TEXT_BYTES * count)
        lengths = self.runs(count)
        data = bytes(self.blob())
        # Each by itself too, since the sum of large numbers begins again at 0.
        if count and (lengths.max() > len(data) or int(lengths.sum()) != len(data)):
            raise self.fail("its strings do not add up")
        ends = np.cumsum(lengths).tolist()
        try:
            return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def _decompressed(self, size: int) -> memoryview:
        stored = self.raw(self.count())
        if len(stored) == size:
            return stored
        try:
            if zstandard.frame_content_size(stored) != size:
                raise self.fail(f"a buffer does not hold {size} bytes")
            return memoryview(self._decompressor.decompress(stored))
        except zstandard.ZstdError as error:
            raise self.fail(f"a buffer does not decompress ({error})") from None


def _narrowest(width: int) -> np.dtype:
    """The smallest unsigned little-endian type of at least `width` bytes."""
    return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if size >= width))


def _varint_bytes(values: np.ndarray) -> bytes:
    """LEB128 of many numbers at once."""
    if len(values) == 1 and values[0] < 0x80:
        return bytes([values[0]])
    places = np.arange(10, dtype=np.uint64)
    groups = values[:, None] >> (np.uint64(7) * places)
    used = groups != 0
    used[:, 0] = True
    octets = (groups & np.uint64(0x7F)).astype(np.uint8)
    octets[:, :-1] |= used[:, 1:].astype(np.uint8) << 7
    return octets[used].tobytes()
