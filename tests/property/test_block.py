"""A block holds exactly the changes it was given, whatever their types, and refuses what is no block."""

import math
import struct
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import CorruptObject, UsageError
from siltstone.format.block import Block, decode_block, encode_block
from tests.examples import examples

VALUES = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9),
    pa.uint8(): st.integers(0, 2**8 - 1),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1) | st.integers(2**63 - 2, 2**63 + 2),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(9, 2): st.decimals(-9_999_999, 9_999_999, places=2),
    pa.decimal128(38, 0): st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=12),
    pa.binary(): st.binary(max_size=12),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", tz="Europe/Berlin"): st.datetimes(timezones=st.just(UTC)),
}


def _bits(value: object) -> object:
    """A value that compares equal only to the very same bits."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def _multiset(table: pa.Table, groups: np.ndarray) -> list[str]:
    columns = [column.to_pylist() for column in table.columns]
    return sorted(repr([int(g), *map(_bits, row)]) for g, *row in zip(groups, *columns, strict=True))


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, np.ndarray]:
    rows = draw(st.integers(0, 40))
    columns, fields = [], []
    for i, kind in enumerate(draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=5))):
        nullable = draw(st.booleans())
        values = VALUES[kind] | st.none() if nullable else VALUES[kind]
        columns.append(pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind))
        fields.append(pa.field(f"c{i}", kind, nullable))
    groups = draw(st.lists(st.integers(0, 65535) | st.integers(3, 6), min_size=rows, max_size=rows))
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    cut = draw(st.integers(0, rows))
    table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    skip = draw(st.integers(0, rows))
    return table.slice(skip), np.array(groups, dtype=np.uint16)[skip:]


@pytest.mark.slow
@given(tables())
@settings(max_examples=examples(200), deadline=None)
def test_round_trip(case: tuple[pa.Table, np.ndarray]) -> None:
    changes, groups = case
    block = encode_block(changes, groups)
    table, decoded = decode_block(block.data)
    table.validate(full=True)
    assert table.schema == changes.schema
    assert _multiset(table, decoded) == _multiset(changes, groups)
    assert decoded.dtype == np.uint16 and (np.diff(decoded.astype(int)) >= 0).all()
    assert block.rows == len(changes)
    counts = np.diff(block.key_group_offsets)
    assert np.array_equal(np.repeat(block.first_key_group + np.arange(len(counts)), counts), decoded)


@given(tables())
@settings(max_examples=examples(30), deadline=None)
def test_what_was_decoded_encodes_the_same(case: tuple[pa.Table, np.ndarray]) -> None:
    data = encode_block(*case).data
    again = encode_block(*decode_block(data)).data
    assert _multiset(*decode_block(again)) == _multiset(*decode_block(data))


@pytest.mark.slow
@given(tables())
@settings(max_examples=examples(50), deadline=None)
def test_an_uncompressed_block_reads_the_same(case: tuple[pa.Table, np.ndarray]) -> None:
    plain, groups = decode_block(encode_block(*case, compression=False).data)
    packed, same_groups = decode_block(encode_block(*case).data)
    assert plain.equals(packed) or _multiset(plain, groups) == _multiset(packed, same_groups)
    assert np.array_equal(groups, same_groups)


def test_without_compression_the_planes_lie_in_the_block_as_they_are() -> None:
    text = "the same words again and again; " * 100
    table, groups = pa.table({"k": [1], "s": [text]}), np.zeros(1, np.uint16)
    assert text.encode() in encode_block(table, groups, compression=False).data
    assert len(encode_block(table, groups).data) < len(text) / 5


def test_every_type_with_values_one_by_one() -> None:
    table = pa.table(
        {
            "k": pa.array([3, 1, 2], pa.int64()),
            "d": pa.array([date(1, 1, 1), None, date(9999, 12, 31)]),
            "t": pa.array([datetime(2013, 1, 1, tzinfo=UTC)] * 3, pa.timestamp("us", tz="America/New_York")),
            "m": pa.array([Decimal("-0.01"), Decimal("99999.99"), None], pa.decimal128(7, 2)),
            "s": ["", None, "é"],
            "b": [True, None, False],
        }
    )
    decoded, groups = decode_block(encode_block(table, np.array([9, 9, 9], np.uint16)).data)
    assert decoded.equals(table.take([1, 2, 0]))
    assert groups.tolist() == [9, 9, 9]


def test_nan_payloads_and_signed_zero_keep_their_bits() -> None:
    bits = np.array([0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x7FF0000000000001, 1 << 63, 0], np.uint64)
    table = pa.table({"k": range(5), "v": pa.array(bits.view(np.float64))})
    decoded, _ = decode_block(encode_block(table, np.zeros(5, np.uint16)).data)
    assert decoded["v"].to_numpy().view(np.uint64).tolist() == bits.tolist()
    assert math.copysign(1, decoded["v"][3].as_py()) == -1


def _workload(rows: int) -> tuple[pa.Table, np.ndarray]:
    rng = np.random.default_rng(7)
    values = rng.integers(0, 1001, (rows, 2))
    columns = {
        "key": rng.choice(3_000_000, rows, replace=False),
        "count": 2 + rng.poisson(0.3, rows),
        "sum": values.sum(axis=1),
        "min": values.min(axis=1),
        "max": values.max(axis=1),
        "__deleted": np.zeros(rows, bool),
    }
    return pa.table(columns), np.sort(rng.integers(0, 64, rows)).astype(np.uint16)


def test_an_aggregate_delta_takes_few_bytes() -> None:
    assert len(encode_block(*_workload(50_000)).data) <= 6.2 * 50_000
    assert len(encode_block(*_workload(100)).data) <= 14 * 100


@pytest.fixture(scope="module")
def block() -> Block:
    return encode_block(*_workload(200))


def test_every_altered_or_missing_byte_is_noticed(block: Block) -> None:
    for position in range(len(block.data)):
        altered = bytearray(block.data)
        altered[position] ^= 0x10
        for bad in (bytes(altered), block.data[:position]):
            with pytest.raises(CorruptObject, match="flights/x "):
                decode_block(bad, "flights/x")


@given(st.binary(max_size=200))
def test_garbage_is_no_block(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        decode_block(data)


def test_what_no_block_can_hold() -> None:
    with pytest.raises(UsageError, match="2 changes cannot have 1"):
        encode_block(pa.table({"k": [1, 2]}), np.zeros(1, np.uint16))
    with pytest.raises(UsageError, match="list"):
        encode_block(pa.table({"k": [[1], [2]]}), np.zeros(2, np.uint16))
