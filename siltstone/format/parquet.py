"""Read Parquet files from a store without trusting them: Arrow allocates what a page claims before it reads the page.

The lengths that a row group's pages claim are added up before Arrow gets any of them. A text or binary column with a
dictionary keeps it in memory, since a value of a megabyte may be in each of a million rows. pyarrow does not expose the
header of a page, which is a Thrift structure, so it is read here (Parquet's `parquet.thrift`).
"""

import io
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.decoding import FREE_BYTES, RATIO, decoded_bytes_max

_ELEMENT_BYTES = 1024
"""maximum memory that Arrow takes for one element of a list in a footer, before it reads the first"""
_ENTRY_BYTES = 16
"""memory that Arrow takes for each entry of a dictionary"""
_KIND, _BECOMES, _LENGTH, _DATA, _DICTIONARY = 1, 2, 3, 5, 7
"""fields of a page's header"""
_COUNT, _ENCODING = 1, 2
"""fields of the inner header of a data or dictionary page"""
_ENCODINGS = {_DATA: {0, 2, 3, 5, 8}, _DICTIONARY: {0, 2}}
"""allowed encodings, in which a decoded value is not larger than stored: plain, dictionary, runs, differences of
integers; not those in which a text shares a prefix with the previous one"""
_OTHER = -1
"""the value of fields that are not used here"""
_VARINT_BYTES = 10
_LEVELS = 3
_WIDER_BYTES, _COLUMN_BYTES = 4, 4096
"""maximum bytes by which a value, and a column's overhead, may be larger in pages than in memory"""


class UntrustedParquet:
    """A Parquet file whose row groups are read one at a time, each once.

    Args:
        data: its bytes, or a file.

    Raises:
        pa.ArrowException, OSError: it is not a Parquet file. `decoding` translates these.
    """

    def __init__(self, data: pa.Buffer | bytes | memoryview | pa.NativeFile) -> None:
        source = data if isinstance(data, pa.NativeFile) else pa.BufferReader(data)
        self._pages = _CountedPages(source)
        self.room = self._pages.room
        """maximum bytes of a decoded row group"""
        self._limits: dict[str, Any] = {
            "thrift_container_size_limit": self.room // _ELEMENT_BYTES,
            "thrift_string_size_limit": max(1, self._pages.size),
        }
        self._file = self._open()
        self.metadata, self.schema = self._file.metadata, self._file.schema_arrow
        self._columns: dict[str, int] = {}

    def select(self, columns: list[str]) -> None:
        """Choose the columns to read, which the schema must have.

        Raises:
            ValueError, pa.ArrowException, OSError: their part of the footer is damaged.
        """
        places = {self.metadata.schema.column(i).path: i for i in range(self.metadata.num_columns)}
        self._columns = {name: places[name] for name in columns}
        row_groups = range(self.metadata.num_row_groups)
        self._check_footer(list(row_groups))
        # Arrow takes a column's type from the schema, whatever a row group says.
        texts = [name for name in columns if self.metadata.schema.column(places[name]).physical_type == "BYTE_ARRAY"]
        dictionaries = {name for name in texts for i in row_groups if self.column(i, name).has_dictionary_page}
        if dictionaries:
            self._file = self._open(metadata=self.metadata, read_dictionary=sorted(dictionaries))

    def column(self, row_group: int, name: str) -> Any:
        """Return the footer's metadata of one of the chosen columns."""
        return self.metadata.row_group(row_group).column(self._columns[name])

    def batches(self, row_group: int, rows: int) -> Any:
        """Return the rows of a row group in batches of up to `rows`, not validated; texts and binary values keep their
        dictionaries.

        Raises:
            ValueError, pa.ArrowException, OSError: damaged, or larger than its stored length allows.
        """
        self._pages.begin([_Chunk.of(self.column(row_group, name)) for name in self._columns])
        return self._file.iter_batches(rows, [row_group], list(self._columns))

    def _check_footer(self, row_groups: list[int]) -> None:
        """Let Arrow check the columns in the footer here, where an error is an exception; it would kill the process
        when pyarrow accesses them. Arrow checks all of them before it reads any."""
        self._pages.closed_to_reads = True
        try:
            next(self._file.iter_batches(1, row_groups, list(self._columns)), None)
        except _NotYet:
            pass
        finally:
            self._pages.closed_to_reads = False

    def _open(self, **options: Any) -> pq.ParquetFile:
        # `_check_footer` relies on `pre_buffer`: with it, Arrow locates all columns before it reads the first.
        return pq.ParquetFile(pa.PythonFile(self._pages, mode="r"), pre_buffer=True, **options, **self._limits)


def padding(largest: int, stored_bytes: int) -> int:
    """Return how many more bytes a file of `stored_bytes` needs for a reader to accept its largest row group."""
    return max(0, -(-(largest - FREE_BYTES) // RATIO) - stored_bytes)


def claim(rows: pa.Table) -> int:
    """Return the maximum bytes that the pages of a row group of plain columns claim."""
    return rows.nbytes + rows.num_columns * (_COLUMN_BYTES + len(rows) * (_WIDER_BYTES + _ENTRY_BYTES))


class _NotYet(Exception):
    """Stops Arrow after it has checked the footer."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The byte range of the pages of one column in a row group."""

    start: int
    end: int
    has_dictionary: bool

    @classmethod
    def of(cls, column: Any) -> "_Chunk":
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        return cls(start, start + column.total_compressed_size, column.has_dictionary_page)


class _CountedPages(io.RawIOBase):
    """A file for Arrow that counts the claims of each page in a row group before Arrow gets it."""

    def __init__(self, source: pa.NativeFile) -> None:
        self.size = source.size()
        self._source = source
        self.room = decoded_bytes_max(self.size)
        self._chunks: list[_Chunk] = []
        self._claimed = 0
        self.closed_to_reads = False

    def begin(self, chunks: list[_Chunk]) -> None:
        """Begin to read the pages of `chunks`, of one row group."""
        self._chunks = chunks
        self._claimed = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the read offset."""
        return self._source.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the read offset."""
        return self._source.seek(offset, whence)

    def read_buffer(self, size: int) -> pa.Buffer:
        """Read up to `size` bytes; fewer only at the end.

        Raises:
            ValueError: a page in them claims more than the file's length allows, or is not a page.
        """
        if self.closed_to_reads:
            raise _NotYet
        start = self._source.tell()
        data = self._source.read_buffer(size)
        end = start + data.size
        for chunk in self._chunks:
            if start < chunk.end and chunk.start < end:
                if not start <= chunk.start < chunk.end <= end:
                    raise ValueError("its columns are not one after the other")
                self._count(memoryview(data).cast("B")[chunk.start - start : chunk.end - start], chunk.has_dictionary)
        return data

    def _count(self, pages: memoryview, has_dictionary: bool) -> None:
        at = 0
        while at < len(pages):
            header, begin = _struct(pages, at, _LEVELS)
            kind = {0: _DATA, 2: _DICTIONARY}.get(header.get(_KIND, -1), 0)
            becomes, length = header.get(_BECOMES, -1), header.get(_LENGTH, -1)
            what = header.get(kind)
            if not isinstance(what, dict) or what.get(_ENCODING) not in _ENCODINGS[kind]:
                raise ValueError("it has a page of a kind that bases do not have")
            if min(becomes, length, what.get(_COUNT, -1)) < 0 or begin + length > len(pages):
                raise ValueError("a page has an impossible length")
            self._claimed += becomes
            if kind == _DICTIONARY:
                if at or not has_dictionary or what[_COUNT] > becomes:
                    raise ValueError("it has a dictionary that it should not have")
                self._claimed += what[_COUNT] * _ENTRY_BYTES
            if self._claimed > self.room:
                raise ValueError(f"a row group of a file of {self.size} bytes would become {self._claimed} or more")
            at = begin + length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a number, and where it ends."""
    number = 0
    for i in range(_VARINT_BYTES):
        octet = data[at + i]
        number |= (octet & 0x7F) << (7 * i)
        if octet < 0x80:
            return number, at + i + 1
    raise ValueError("a number in the header of a page has no end")


def _struct(data: memoryview, at: int, levels: int) -> tuple[dict[int, Any], int]:
    """Read the fields of a structure in Thrift's compact protocol, and where it ends; lists, which pages' headers do
    not have, are refused.

    Raises:
        ValueError, IndexError: it is not such a structure, or it is ambiguous.
    """
    if not levels:
        raise ValueError("the header of a page is nested too deeply")
    fields: dict[int, Any] = {}
    last = 0
    while octet := data[at]:
        kind, step = octet & 0x0F, octet >> 4
        at += 1
        last += step
        if not step or last in fields:
            raise ValueError("the header of a page has fields in no order")
        if kind in (1, 2):  # true, false
            fields[last] = kind == 1
        elif kind in (5, 6):  # integers of 32 and 64 bits
            number, at = _varint(data, at)
            if number >> (32 if kind == 5 else 64):
                raise ValueError("a number in the header of a page is too large")
            fields[last] = (number >> 1) ^ -(number & 1) if kind == 5 else _OTHER
        elif kind == 8:  # bytes
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("the header of a page is cut")
            fields[last], at = _OTHER, at + size
        elif kind == 12:
            fields[last], at = _struct(data, at, levels - 1)
        else:
            raise ValueError(f"the header of a page has a field of type {kind}")
    return fields, at + 1
