"""The digest of rows that come again in any order, in any parts, with columns of any type."""

import datetime
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.state.rows_digest import DigestedRows, _hash_values
from tests.arrow_strategies import tables

KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "integer": (pa.int32(), [1, 2, None]),
    "text": (pa.string(), ["a", "", None]),
    "large": (pa.large_string(), ["a", "", None]),
    "view": (pa.string_view(), ["a", "", None]),
    "fixed": (pa.binary(2), [b"ab", b"cd", None]),
    "decimal": (pa.decimal128(38, 10), [Decimal("1.5"), Decimal("-1.5"), None]),
    "nanoseconds": (pa.timestamp("ns", "UTC"), [1, 2, None]),
    "duration": (pa.duration("us"), [datetime.timedelta(1), datetime.timedelta(-1), None]),
    "time": (pa.time64("ns"), [datetime.time(1), datetime.time(2), None]),
    "seconds": (pa.time32("s"), [datetime.time(1), datetime.time(2), None]),
    "interval": (pa.month_day_nano_interval(), [(1, 2, 3), (1, 2, 4), None]),
    "list": (pa.list_(pa.duration("us")), [[1], [], None, [None]]),
    "large list": (pa.large_list(pa.int64()), [[1], [], None, [None]]),
    "struct": (pa.struct({"a": pa.int8(), "b": pa.null()}), [{"a": 1}, {"a": None}, None]),
    "nothing": (pa.struct([]), [{}, None]),
    "nothing within": (pa.list_(pa.struct([])), [[{}], [], None]),
    "map": (pa.map_(pa.string(), pa.list_(pa.int8())), [[("a", [1])], [("a", None)], [("b", [1])], [], None]),
    "struct of a map": (pa.struct({"m": pa.map_(pa.string(), pa.time64("ns"))}), [{"m": [("a", 1)]}, {"m": []}, None]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None]),
    "half": (pa.float16(), [np.float16(1), np.float16(2), None]),
}


@given(tables(), st.data())
@settings(max_examples=60, deadline=None)
def test_order_and_parts_do_not_matter(rows: pa.Table, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(rows.num_rows)))
    cut = data.draw(st.integers(0, rows.num_rows))
    other = rows.take(pa.array(order, pa.int64()))
    parts = [DigestedRows.of(other.slice(0, cut)), DigestedRows.of(other.slice(cut))]
    assert sum(parts, DigestedRows()) == DigestedRows.of(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_of_each_type_counts(kind: str) -> None:
    arrow, values = KINDS[kind]
    column = pa.array(values, arrow)
    whole = DigestedRows.of(pa.table({"c": column}))
    parts = [DigestedRows.of(pa.table({"c": column.slice(at, 1)})) for at in range(len(values))]
    assert sum(parts, DigestedRows()) == whole
    assert len({part.digest for part in parts}) == len(values)


def test_rows_with_values_in_other_columns_are_other_rows() -> None:
    one, other = pa.table({"a": ["x"], "b": ["y"]}), pa.table({"a": ["y"], "b": ["x"]})
    assert DigestedRows.of(one).differs(DigestedRows.of(other))
    assert not DigestedRows.of(one).differs(DigestedRows.of(one.select(["b", "a"])))
    twice = pa.concat_tables([one, one])
    assert DigestedRows.of(twice).differs(DigestedRows.of(pa.concat_tables([one, other])))


def test_what_cannot_be_compared_does_not_differ_but_the_number_of_rows_can() -> None:
    narrow, wide = pa.table({"a": pa.array([1, 2], pa.int32())}), pa.table({"a": pa.array([1, 2], pa.int64())})
    assert DigestedRows.of(narrow) == DigestedRows.of(wide)
    single = pa.table({"a": pa.array([0.1], pa.float32()), "d": pa.array([Decimal("1.25")], pa.decimal128(4, 2))})
    double = pa.table([single["a"].cast(pa.float64()), single["d"].cast(pa.decimal128(30, 2))], names=["a", "d"])
    assert DigestedRows.of(single) == DigestedRows.of(double)
    one, text = pa.table({"a": pa.array([1])}), pa.table({"a": pa.array(["1"])})
    assert not DigestedRows.of(one).differs(DigestedRows.of(text))
    added = narrow.append_column("b", pa.array(["x", "y"]))
    assert not DigestedRows.of(narrow).differs(DigestedRows.of(added))
    assert DigestedRows.of(narrow).differs(DigestedRows.of(added.slice(1)))


@given(st.lists(st.binary(max_size=40) | st.binary(max_size=600), unique=True, max_size=12), st.integers(0, 3))
def test_texts_are_hashed_as_documented_and_no_two_alike(values: list[bytes], offset: int) -> None:
    column = pa.array([b"before", *values, None], pa.binary())[min(offset, 1) :]
    found = _hash_values(column).to_pylist()
    assert found[-1] is None and len(set(found)) == len(found)
    for value, hashed in zip(column.to_pylist()[:-1], found, strict=False):
        h = 0x53696C7473746F6E + 0x9E3779B97F4A7C15 * len(value)
        for at in range(0, len(value) // 8 * 8 + 1, 8):
            h = (h ^ int.from_bytes(value[at : at + 8], "little")) * 0x9FB21C651E98DF25 % (1 << 64)
            h ^= h >> 32
        expected = xxhash.xxh3_64_intdigest(value) if len(value) >= 256 else h
        assert hashed % (1 << 64) == expected


def test_texts_that_are_nearly_alike_have_other_digests() -> None:
    texts = [f"user-{n:09d} at /shop/items/{n % 977}" + "\0" * (n % 9) for n in range(200_000)]
    assert len(set(_hash_values(pa.array(texts)).to_pylist())) == len(texts)
    large = pa.table({"c": pa.array(texts[:9], pa.large_string())})
    assert DigestedRows.of(large) == DigestedRows.of(pa.table({"c": texts[:9]}))


def test_what_settings_change_of_a_type_is_compared() -> None:
    times = [pa.array([5], pa.timestamp("us", zone)) for zone in (None, "UTC", "Europe/Berlin")]
    texts = [pa.array(["x"], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    lists = [pa.array([["x"]], kind) for kind in (pa.list_(pa.string()), pa.large_list(pa.large_string()))]
    for columns in (times, texts, lists):
        assert len({DigestedRows.of(pa.table({"c": column})) for column in columns}) == 1


def test_it_travels_as_json() -> None:
    for digested in (DigestedRows(), DigestedRows.of(pa.table({"a": [1]}))):
        assert DigestedRows.from_json(json.loads(json.dumps(digested.to_json()))) == digested
