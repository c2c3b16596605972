"""Crafted table files of RocksDB: altered ones whose checksums are mended, as somebody makes them who wants them read.

A table file is blocks, each with a trailer (how it is compressed, and a checksum of both), and a footer. Where blocks
begin and end is found by their checksums. A manifest is records, each with a masked CRC-32C.
"""

import random
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import xxhash

from siltstone.state.backends.rocksdb.files import manifest_of, table_files

TRAILER_BYTES = 5
FOOTER_BYTES = 53
_HEADER = struct.Struct("<IHB")
_LAST_BYTE = 0x6B9083D9
_MASK = 0xA282EAD8
CLAIM = b"\0\xff\xff\xff\xff\7"
"""of an entry of a block: that its key is 2 GiB long; at the start of an index, it ends who reads it"""
Block = tuple[int, int]
"""where a block begins, and where its trailer does"""
_NUMBERS = (b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", b"\x80\x80\x80\x80\x04")
_PIECES = (*_NUMBERS, b"\0", b"\x7f", b"\xff", b"\x01\x00\x00\x00")


def block_checksum(data: bytes, compression: int) -> bytes:
    """Return the checksum (XXH3) of a block and its last byte."""
    low = xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF
    return struct.pack("<I", low ^ (compression * _LAST_BYTE & 0xFFFFFFFF))


def blocks_of(table: bytes) -> list[Block]:
    """Return where the blocks of a genuine table file are."""
    found, start, body = list[Block](), 0, len(table) - FOOTER_BYTES
    while start < body:
        for end in range(start, body - TRAILER_BYTES + 1):
            if table[end + 1 : end + TRAILER_BYTES] == block_checksum(table[start:end], table[end]):
                found.append((start, end))
                start = end + TRAILER_BYTES
                break
        else:
            raise AssertionError(f"no block begins at {start}")
    return found


def mend_table(table: bytes, blocks: Sequence[Block]) -> bytes:
    """Return a table file whose blocks, as far as it has them, have the checksums of what is in them."""
    data = bytearray(table)
    for start, end in (each for each in blocks if each[1] + TRAILER_BYTES <= len(data)):
        data[end + 1 : end + TRAILER_BYTES] = block_checksum(bytes(data[start:end]), data[end])
    return bytes(data)


def mend_manifest(manifest: bytes) -> bytes:
    """Return a manifest whose records have the checksums of what is in them."""
    data, at = bytearray(manifest), 0
    while at + _HEADER.size <= len(data):
        _, size, kind = _HEADER.unpack_from(data, at)
        payload = bytes([kind]) + data[at + _HEADER.size : at + _HEADER.size + size]
        crc = _crc32c(payload)
        _HEADER.pack_into(data, at, (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF, size, kind)
        at += _HEADER.size + size
    return bytes(data)


@cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [number >> 1 ^ (0x82F63B78 if number & 1 else 0) for number in table]
    return table


def _crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def craft(directory: Path, draw: random.Random, blocks_in: Callable[[bytes], Sequence[Block]] = blocks_of) -> str:
    """Alter one of the files in a directory of genuine ones, by some bytes; return what was altered."""
    tables = table_files(directory)
    what = draw.choice(["block", "block", "block", "small", "small", "footer", "compression", "manifest"])
    path = manifest_of(directory) if what == "manifest" else directory / draw.choice(tables)
    data = path.read_bytes()
    blocks = [] if what == "manifest" else blocks_in(data)
    start, end = draw.choice(blocks[-6:] if what == "small" else blocks) if blocks else (_HEADER.size, len(data) - 1)
    start, end = (len(data) - FOOTER_BYTES, len(data) - 1) if what == "footer" else (start, max(end, start + 1))
    altered = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, piece = draw.randrange(start, end), draw.choice([*_PIECES, draw.randbytes(1), draw.randbytes(4)])
        altered[at : at + len(piece)] = piece[: len(altered) - at]
    if what == "compression":
        altered[end] = draw.choice([1, 2, 4, 5, 7])
    mended = mend_manifest(bytes(altered)) if what == "manifest" else mend_table(bytes(altered), blocks)
    path.unlink()  # it may be a link
    path.write_bytes(mended)
    return f"{path.name}: {what}"
