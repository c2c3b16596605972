"""Parquet of a few kilobytes that would become hundreds of megabytes; each is a whole file but for its one lie."""

import io
import struct
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.format.base import KEY_GROUP

_MEGABYTE = 1 << 20
_LARGEST = (1 << 31) - 1


def _varint(number: int, width: int = 0) -> bytes:
    """A number, in more bytes than it needs where `width` says so."""
    octets = bytearray()
    while number >= 0x80 or len(octets) < width - 1:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def _file(table: pa.Table, **options: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", write_page_checksum=True, store_schema=False, **options)
    return file.getvalue()


def _texts(schema: pa.Schema, texts: pa.Array) -> pa.Table:
    """A table of `schema` with these texts, and zeros or nulls beside them; that of a base has key groups too."""
    columns = {}
    for field in schema if "key_group" in schema.names else [pa.field(KEY_GROUP, pa.uint16(), False), *schema]:
        if field.name in ("s", "value"):
            columns[field.name] = texts
        elif field.nullable and field.name != "key_group":
            columns[field.name] = pa.nulls(len(texts), field.type)
        else:
            columns[field.name] = pa.array(np.zeros(len(texts), np.int64)).cast(field.type)
    return pa.table(columns)


def with_page_header(data: bytes, at: int, *, becomes: int | None = None, entries: int | None = None) -> bytes:
    """The file with another claim in the header of the page at `at`: the checksum there makes room for it."""

    def number(place: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            value |= (data[place] & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if data[place - 1] < 0x80:
                return value, place

    values, place = [], at
    for _ in range(4):  # kind, what it becomes, length, checksum
        assert data[place] == 0x15
        value, place = number(place + 1)
        values.append(value)
    kind, size, length, _ = values
    head = data[place]
    rest_from, counted = place + 1, b""
    if entries is not None:
        assert data[place + 1] == 0x15
        _, rest_from = number(place + 2)
        counted = b"\x15" + _varint(2 * entries)
    size = size if becomes is None else 2 * becomes
    middle = b"\x15" + _varint(size) + b"\x15" + _varint(length) + bytes([head + 0x10]) + counted
    room = rest_from - at - len(middle) - 1
    assert room > 0, "there is too little room"
    return data[:at] + b"\x15" + _varint(kind, room) + middle + data[rest_from:]


def _long_list() -> bytes:
    footer = b"\x15\x04\x19\xfc" + _varint(60_000_000)  # the version, and then a schema of so many columns
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def crafted(schema: pa.Schema) -> Mapping[str, bytes]:
    """What it claims -> a file with the columns `schema`."""
    kind = next(field.type for field in schema if field.name in ("s", "value"))
    short, one = (pa.array(texts, pa.binary()).cast(kind) for texts in ([b"a", b"b", b"a"], [b"A" * _MEGABYTE]))
    small = _texts(schema, short)
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(60_000, np.int32)), one)
    plain, listed = _file(small, use_dictionary=False), _file(small)
    texts = small.schema.get_field_index("s") if "s" in schema.names else 1
    data_page = pq.read_metadata(pa.BufferReader(plain)).row_group(0).column(texts).data_page_offset
    dictionary_page = pq.read_metadata(pa.BufferReader(listed)).row_group(0).column(texts).dictionary_page_offset
    pages = pa.concat_arrays([one] * 300)
    return {
        "page-of-2-gib": with_page_header(plain, data_page, becomes=_LARGEST),
        "dictionary-of-2-31-entries": with_page_header(listed, dictionary_page, entries=_LARGEST),
        "one-text-in-each-row": _file(_texts(schema, many), dictionary_pagesize_limit=2 * _MEGABYTE),
        "pages-of-equal-texts": _file(_texts(schema, pages), use_dictionary=False),
        "list-of-60-million": _long_list(),
    }
