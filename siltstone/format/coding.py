"""Byte-level codings shared by blocks, indexes and segments: varints, runs, byte planes, seals.

All are vectorised over NumPy arrays. Numbers are unsigned 64-bit; signed ones go through `zigzag`. Decoding checks
all bounds: cut or altered bytes raise CorruptObject and never crash.

The memory of decoded data is limited by its stored length (`decoded_bytes_max`): a decoder counts before it allocates,
and an encoder pads data that compresses better, which costs a 64th of the decoded size.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from siltstone.decoding import FREE_BYTES, RATIO, decoded_bytes_max
from siltstone.errors import CorruptObject, NewerFormat

Bytes = bytes | bytearray | memoryview | pa.Buffer
ZSTD_LEVEL = 1
MAX_COUNT = 1 << 31
"""maximum length of a sequence; a larger claim is corrupt"""
KEY_GROUPS_MAX = 1 << 16
"""a key group has 16 bits"""
_TEXT_BYTES = 64
"""approximate memory of a short string"""
_SEAL_BYTES = 8
_WORTH_COMPRESSING_BYTES = 32
_VARINT_BYTES_MAX = 10
_WORD = (1 << 64) - 1


def zigzag(values: np.ndarray) -> np.ndarray:
    """Map int64 to uint64 so that small magnitudes become small numbers: 0, -1, 1, -2 become 0, 1, 2, 3."""
    signed = values.astype(np.int64, copy=False)
    return ((signed << 1) ^ (signed >> 63)).view(np.uint64)


def unzigzag(values: np.ndarray) -> np.ndarray:
    """Invert `zigzag`."""
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)


def seal(payload: bytes, magic: bytes) -> bytes:
    """Wrap `payload` in a magic number and its xxh3-64 checksum."""
    return b"".join((magic, payload, xxhash.xxh3_64_digest(payload)))


def unseal(data: Bytes, magic: bytes, name: str) -> memoryview:
    """Return the payload that `seal` wrapped, without copying; `magic` ends with a digit, the format.

    Raises:
        CorruptObject: it is damaged; the message contains `name`.
        NewerFormat: it has a later format.
    """
    view = memoryview(data).cast("B")
    head = bytes(view[: len(magic)])
    if head[:-1] == magic[:-1] and head[-1:].isdigit() and head > magic:
        raise newer_format_error(name, head[-1:].decode())
    if head != magic:
        raise CorruptObject(f"{name} does not have the expected format: it does not begin with {magic!r}")
    if len(view) < len(magic) + _SEAL_BYTES:
        raise CorruptObject(f"{name} is cut short")
    payload = view[len(magic) : -_SEAL_BYTES]
    if xxhash.xxh3_64_digest(payload) != bytes(view[-_SEAL_BYTES:]):
        raise CorruptObject(f"{name} was cut or altered: its checksum does not match")
    return payload


def newer_format_error(name: str, version: object) -> NewerFormat:
    """Make the error for an object that a newer Siltstone wrote; its handle's checksum was verified before."""
    return NewerFormat(f"{name} has format {version}, which a newer Siltstone wrote: upgrade siltstone")


class Encoder:
    """Appends coded values to a growing byte string; without `compression`, buffers are stored unchanged."""

    def __init__(self, *, compression: bool = True) -> None:
        self._parts: list[bytes | memoryview] = []
        self._worth_bytes = _WORTH_COMPRESSING_BYTES if compression else MAX_COUNT
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        self._decoded_bytes = 0

    def finish(self) -> bytes:
        """Return all that was appended, padded with zeros if a decoder would otherwise refuse its decoded size."""
        data = b"".join(self._parts)
        return data.ljust(-(-(self._decoded_bytes - FREE_BYTES) // RATIO), b"\0")

    def claim(self, size: int) -> None:
        """Count bytes that a decoder will allocate here; the other methods count what they write."""
        self._decoded_bytes += size

    def raw(self, data: Bytes) -> None:
        """Append bytes unchanged; the reader must know their number."""
        self._parts.append(memoryview(data).cast("B"))

    def varints(self, values: np.ndarray | Iterable[int]) -> None:
        """Append LEB128 numbers (seven bits per byte, least significant first); the reader must know their number."""
        self._parts.append(_varint_bytes(np.asarray(values, dtype=np.uint64)))

    def varint(self, value: int) -> None:
        """Append one LEB128 number."""
        self.varints([value])

    def runs(self, values: np.ndarray) -> None:
        """Append run-length coded numbers below 2**63: a single value costs one varint, a run of any length two.

        The low bit of a value's varint says whether a run length (minus two) follows.
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
        """Append bytes with their length, compressed if that is smaller."""
        self.claim(len(data))
        self.varint(len(data))
        self._compress(data)

    def integers(self, values: np.ndarray) -> None:
        """Append uint64 numbers: the least, the bytes that the differences to it need, and as many compressed planes.

        A plane has one byte of every number, so that the entropy coder sees each byte's own distribution. A constant
        sequence costs about two bytes. The reader must know the number of values.
        """
        least = values.min() if len(values) else np.uint64(0)
        self.planes(values - least, int(least))

    def planes(self, values: np.ndarray, least: int) -> None:
        """Append like `integers`, with the least number already subtracted."""
        self.claim(8 * len(values))
        width = (int(values.max()).bit_length() + 7) // 8 if len(values) else 0
        self.varints(np.concatenate((zigzag(np.array([least], np.uint64).view(np.int64)), [np.uint64(width)])))
        narrow = _narrowest_type(width)
        octets = values.astype(narrow, copy=False).view(np.uint8).reshape(len(values), narrow.itemsize)
        for i in range(width):
            self._compress(np.ascontiguousarray(octets[:, i]).data)

    def constant(self, value: int, count: int) -> None:
        """Append like `integers`, for `count` equal numbers."""
        self.claim(8 * count)
        self.planes(np.zeros(0, np.uint64), value)

    def texts(self, values: list[str]) -> None:
        """Append UTF-8 strings; the reader must know their number."""
        coded = [value.encode() for value in values]
        self.claim(_TEXT_BYTES * len(values))
        self.runs(np.array([len(value) for value in coded], dtype=np.uint64))
        self.blob(b"".join(coded))

    def _compress(self, data: Bytes) -> None:
        """Append the stored length, then the bytes: zstd if that is smaller, else unchanged."""
        packed = self._compressor.compress(data) if len(data) > self._worth_bytes else data
        if len(packed) >= len(data):
            packed = data
        self.varint(len(packed))
        self.raw(packed)


class Decoder:
    """Reads what `Encoder` wrote, in the same order; raises CorruptObject with `name` if it cannot."""

    def __init__(self, data: Bytes, name: str) -> None:
        self.position = 0
        self._view = memoryview(data).cast("B")
        self._name = name
        self._room_bytes = decoded_bytes_max(len(self._view))
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def ended(self) -> bool:
        """Whether everything has been read."""
        return self.position >= len(self._view)

    def damage_error(self, why: str) -> CorruptObject:
        """Make the error to raise."""
        return CorruptObject(f"{self._name} cannot be read: {why}")

    def claim(self, size: int) -> None:
        """Count bytes that are about to be allocated.

        Raises:
            CorruptObject: the total is more than the stored length allows.
        """
        self._room_bytes -= size
        if self._room_bytes < 0:
            raise self.damage_error(f"it would take far more memory than its {len(self._view)} bytes allow")

    def raw(self, count: int) -> memoryview:
        """Return `count` bytes, not copied."""
        if not 0 <= count <= len(self._view) - self.position:
            raise self.damage_error(f"{count} bytes wanted at {self.position}, {len(self._view)} in all")
        self.position += count
        return self._view[self.position - count : self.position]

    def varints(self, count: int) -> np.ndarray:
        """Read LEB128 numbers: uint64[count]."""
        octets = np.frombuffer(self._view[self.position : self.position + 10 * count], dtype=np.uint8)
        ends = np.flatnonzero(octets < 0x80)[:count] + 1
        if len(ends) < count:
            raise self.damage_error("it ends within its numbers")
        if count == 0:
            return np.zeros(0, dtype=np.uint64)
        starts = np.concatenate(([0], ends[:-1]))
        places = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
        if places.max() > 9:
            raise self.damage_error("a number is too long")
        self.position += int(ends[-1])
        bits = (octets[: ends[-1]] & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
        return np.add.reduceat(bits, starts)

    def varint(self) -> int:
        """Read one number, like `varints(1)` in a tenth of the time."""
        value = 0
        for place in range(_VARINT_BYTES_MAX):
            if self.position >= len(self._view):
                raise self.damage_error("it ends within its numbers")
            octet = self._view[self.position]
            self.position += 1
            value |= (octet & 0x7F) << (7 * place)
            if octet < 0x80:
                return value & _WORD
        raise self.damage_error("a number is too long")

    def count(self) -> int:
        """Read one number that counts what follows."""
        count = self.varint()
        if count > MAX_COUNT:
            raise self.damage_error(f"it claims {count} values")
        return count

    def runs(self, count: int) -> np.ndarray:
        """Read what `Encoder.runs` wrote: uint64[count]."""
        self.claim(8 * count)
        values, lengths, got = [], [], 0
        while got < count:
            token = self.varint()
            length = self.varint() + 2 if token & 1 else 1
            values.append(token >> 1)
            lengths.append(length)
            got += length
            if got > count:
                raise self.damage_error(f"a run of {length} is longer than the {count} values there are")
        return np.repeat(np.array(values, dtype=np.uint64), lengths)

    def blob(self) -> memoryview:
        """Read bytes that `Encoder.blob` wrote."""
        size = self.count()
        self.claim(size)
        return self._decompress(size)

    def integers(self, count: int) -> np.ndarray:
        """Read what `Encoder.integers` wrote: uint64[count]."""
        values, least = self.planes(count)
        return values + np.uint64(least)

    def planes(self, count: int) -> tuple[np.ndarray, int]:
        """Read what `Encoder.planes` wrote: (uint64[count], the least number that was subtracted)."""
        self.claim(8 * count)
        least, width = self._planes_head()
        narrow = _narrowest_type(width)
        octets = np.zeros((count, narrow.itemsize), dtype=np.uint8)
        for i in range(width):
            octets[:, i] = np.frombuffer(self._decompress(count), dtype=np.uint8)
        return octets.view(narrow).reshape(count).astype(np.uint64, copy=False), least

    def skip_integers(self) -> None:
        """Step over what `integers` or `planes` would read, without decompressing it."""
        _, width = self._planes_head()
        for _ in range(width):
            self.raw(self.count())

    def skip_blob(self) -> None:
        """Step over what `blob` would read, without decompressing it."""
        self.count()
        self.raw(self.count())

    def texts(self, count: int) -> list[str]:
        """Read strings that `Encoder.texts` wrote."""
        self.claim(_TEXT_BYTES * count)
        lengths = self.runs(count)
        data = bytes(self.blob())
        # Each length is also checked by itself, since the sum of large numbers overflows.
        if count and (lengths.max() > len(data) or int(lengths.sum()) != len(data)):
            raise self.damage_error("its strings do not add up")
        ends = np.cumsum(lengths).tolist()
        try:
            return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
        except UnicodeDecodeError:
            raise self.damage_error("a string is not UTF-8") from None

    def _planes_head(self) -> tuple[int, int]:
        """Read what planes begin with: the least number, and the number of planes."""
        folded, width = self.varint(), self.varint()
        if width > 8:
            raise self.damage_error(f"a number of {width} bytes")
        return ((folded >> 1) ^ -(folded & 1)) & _WORD, width

    def _decompress(self, size: int) -> memoryview:
        stored = self.raw(self.count())
        if len(stored) == size:
            return stored
        try:
            if zstandard.frame_content_size(stored) != size:
                raise self.damage_error(f"a buffer does not hold {size} bytes")
            return memoryview(self._decompressor.decompress(stored))
        except zstandard.ZstdError as error:
            raise self.damage_error(f"a buffer does not decompress ({error})") from None


def _narrowest_type(width: int) -> np.dtype:
    """Return the smallest unsigned little-endian type of at least `width` bytes."""
    return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if size >= width))


def _varint_bytes(values: np.ndarray) -> bytes:
    """Encode many numbers as LEB128 at once."""
    if len(values) == 1 and values[0] < 0x80:
        return bytes([values[0]])
    places = np.arange(10, dtype=np.uint64)
    groups = values[:, None] >> (np.uint64(7) * places)
    used = groups != 0
    used[:, 0] = True
    octets = (groups & np.uint64(0x7F)).astype(np.uint8)
    octets[:, :-1] |= used[:, 1:].astype(np.uint8) << 7
    return octets[used].tobytes()
