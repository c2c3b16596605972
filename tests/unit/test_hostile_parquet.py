"""Parquet that somebody crafted: an error that names the object, before Arrow takes what a page or a list claims.

Issue 11, item 3. What each of these files takes in memory is measured with `tests/fuzz`, whose corpus has them too.
"""

import io
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.decoding import FREE_BYTES, RATIO
from siltstone.errors import CorruptObject
from siltstone.format.base import KEY_GROUP, read_base, read_snapshot_values, write_base
from siltstone.restore.export import opaque_rows
from siltstone.state.schema import OPAQUE_SCHEMA, TableSchema
from tests.fuzz.crafted import crafted, with_page_header

TEXTS = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("s", pa.string())]))
NAME = "s/00000001/000000000001/crafted.parquet"
SAYS = {
    "page-of-2-gib": "would become 2147483",
    "dictionary-of-2-31-entries": "a dictionary that it should not have",
    "one-text-in-each-row": "the rows of a row group would become",
    "pages-of-equal-texts": "would become",
    "list-of-60-million": "[Ee]xceeded size limit",
}


def _base(data: bytes | pa.NativeFile) -> pa.Table:
    return pa.concat_tables([rows for rows, _ in read_base(data, TEXTS, name=NAME)])


def _written(texts: list[str]) -> bytes:
    rows = pa.table([np.arange(len(texts)), texts], schema=TEXTS.rows)
    out = io.BytesIO()
    write_base(out, TEXTS, [(rows, np.zeros(len(texts), np.uint16))])
    return out.getvalue()


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.slow
def test_a_crafted_base_is_refused_before_it_is_decoded(what: str) -> None:
    data = crafted(TEXTS.rows)[what]
    assert len(data) < 20_000
    with pytest.raises(CorruptObject, match=f"{NAME}.*{SAYS[what]}"):
        _base(data)
    with pytest.raises(CorruptObject, match=f"{NAME}.*{SAYS[what]}"):
        _base(pa.PythonFile(io.BytesIO(data), mode="r"))


@pytest.mark.parametrize("what", [what for what in SAYS if what != "one-text-in-each-row"])
def test_crafted_opaque_values_are_refused_before_they_are_decoded(what: str) -> None:
    with pytest.raises(CorruptObject, match=f"{NAME}.*{SAYS[what]}"):
        read_snapshot_values(crafted(OPAQUE_SCHEMA)[what], OPAQUE_SCHEMA, name=NAME)


def test_an_opaque_value_that_repeats_itself_is_in_memory_once() -> None:
    values = {group: b"x" * 1000 for group in range(300)}
    out = io.BytesIO()
    pq.write_table(opaque_rows(values), out)
    found = read_snapshot_values(out.getvalue(), OPAQUE_SCHEMA, name=NAME)
    assert found == values and len({id(value) for value in found.values()}) == 1


def test_texts_that_begin_as_the_one_before_are_no_base() -> None:
    """One byte of such a page may stand for any number of them."""
    keys = {KEY_GROUP: pa.array([0, 0], pa.uint16()), "k": [1, 2], "s": ["ab", "ac"]}
    out = io.BytesIO()
    pq.write_table(pa.table(keys), out, use_dictionary=False, column_encoding={"s": "DELTA_BYTE_ARRAY"})
    with pytest.raises(CorruptObject, match="a page of a kind that bases do not have"):
        _base(out.getvalue())


def test_a_dictionary_that_the_footer_hides_is_refused() -> None:
    """Its column would be read as plain texts, one copy in each row."""
    out = io.BytesIO()
    keys = {KEY_GROUP: pa.array([0, 0], pa.uint16()), "k": [1, 2], "s": ["a", "a"]}
    pq.write_table(pa.table(keys), out, compression="none", store_schema=False)
    data = bytearray(out.getvalue())
    column = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(2)
    first, dictionary = (_zigzag(at) for at in (column.data_page_offset, column.dictionary_page_offset))
    # Fields of the footer: 9, the first page of data; 11, the dictionary; 12, statistics. 11 becomes 10, never read.
    place = b"\x26" + first + b"\x26" + dictionary + b"\x1c"
    assert data.count(place) == 1 and len(first) == len(dictionary)
    data = data.replace(place, b"\x26" + dictionary + b"\x16" + first + b"\x2c")
    assert not pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0).column(2).has_dictionary_page
    assert pq.read_table(pa.BufferReader(bytes(data)))["s"].to_pylist() == ["a", "a"], "Arrow takes it"
    with pytest.raises(CorruptObject, match="a dictionary that it should not have"):
        _base(bytes(data))


def _zigzag(number: int) -> bytes:
    number, octets = 2 * number, bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


@pytest.mark.parametrize(
    "texts",
    [lambda: ["x" * (FREE_BYTES + (20 << 20))], lambda: ["y" * 1500] * 100_000],
    ids=["one text", "a text in each row"],
)
@pytest.mark.slow
def test_a_base_that_compresses_well_pays_for_what_it_becomes(texts: Callable[[], list[str]]) -> None:
    """Equal texts are real: the writer adds bytes until a reader may take the memory."""
    written = texts()
    size = sum(map(len, written))
    data = _written(written)
    assert size - FREE_BYTES <= RATIO * len(data) < size
    assert _base(data).column("s").to_pylist() == written
    assert pq.read_table(pa.BufferReader(data)).num_rows == len(written)


def test_equal_rows_beyond_what_a_file_pays_for_are_refused() -> None:
    """Equal rows take hardly a bit in a page each: a file of 80 KB holds eight million."""
    rows, out = 8_000_000, io.BytesIO()
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), ["a"])
    table = pa.table({KEY_GROUP: pa.array(np.zeros(rows), pa.uint16()), "k": np.zeros(rows, np.int64), "s": texts})
    pq.write_table(table, out, row_group_size=rows, compression="zstd", store_schema=False)
    batches = read_base(out.getvalue(), TEXTS, name=NAME)
    seen = 0
    with pytest.raises(CorruptObject, match="the rows of a row group would become"):
        for each, _ in batches:
            seen += len(each)
    assert seen * 11 <= FREE_BYTES + RATIO * len(out.getvalue())


def test_a_claim_in_a_page_is_counted_over_all_columns_of_a_row_group() -> None:
    data = _written(["a", "b", "c"])
    group = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    for column in (1, 2):  # neither is too much by itself
        at = group.column(column).dictionary_page_offset or group.column(column).data_page_offset
        data = with_page_header(data, at, becomes=FREE_BYTES - (1 << 20))
    with pytest.raises(CorruptObject, match="would become 13"):
        _base(data)
