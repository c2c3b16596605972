"""Rows as JSON: columns that are converted as a whole come to the same text as value by value."""

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.state.json_rows import json_rows

NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(np.array([0, 4], np.int32)), pa.py_buffer(b"K\xf6ln")]
)


@given(st.lists(st.none() | st.text()), st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
def test_text_is_escaped_as_json_escapes_it(values: list[str | None], kind: pa.DataType) -> None:
    expected = [json.dumps({"text": value}, ensure_ascii=False) for value in values]
    assert json_rows(pa.table({"text": pa.array(values, kind)})) == expected


@given(st.lists(st.none() | st.floats()), st.integers(0, 5))
def test_numbers_keep_every_digit(values: list[float | None], cut: int) -> None:
    whole = pa.array(values, pa.float64())
    column = pa.chunked_array([whole[:cut], whole[cut:]])
    for row, value in zip(json_rows(pa.table({"n": column})), values, strict=True):
        found = json.loads(row)["n"]
        if value is None or math.isfinite(value):
            assert found == value and str(found) == str(value)
        else:
            assert found == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([2**64 - 1, None], pa.uint64()), ["18446744073709551615", "null"]),
        (pa.array([-5, 7], pa.int8()), ["-5", "7"]),
        (pa.array([True, None]), ["true", "null"]),
        (pa.array([0.1, None], pa.float32()), ["0.10000000149011612", "null"]),
        (pa.nulls(1), ["null"]),
        (pa.array([datetime(2026, 1, 31, 12), None, datetime(2026, 1, 31, 12)]), ['"2026-01-31T12:00:00"', "null"]),
        (pa.array([datetime(2026, 1, 31, 12, tzinfo=UTC)]), ['"2026-01-31T12:00:00+00:00"']),
        (pa.array([date(2026, 1, 31)]), ['"2026-01-31"']),
        (pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)), ['"1.50"', "null"]),
        (pa.array([Decimal("1.50"), None], pa.decimal256(60, 2)), ['"1.50"', "null"]),
        (pa.array([Decimal("1.50"), None], pa.decimal32(5, 2)), ['"1.50"', "null"]),
        (pa.array([Decimal("1.50"), None], pa.decimal64(12, 2)), ['"1.50"', "null"]),
        (pa.array([3_600_000_000_001, None], pa.time64("ns")), ['"01:00:00.000000001"', "null"]),
        (pa.array([3_600_000_000_000, 1000], pa.time64("ns")), ['"01:00:00"', '"00:00:00.000001"']),
        (pa.array([b"\xff", None]), ['"/w=="', "null"]),
        (pa.array([{"a": [1, None], "b": 'x"'}, None]), ['{"a": [1, null], "b": "x\\""}', "null"]),
        (pa.array([2**30], pa.date32()), ['"1073741824 days since 1970-01-01"']),
        (NOT_UTF8, ['"K\\\\xf6ln"']),
    ],
)
def test_each_type_has_its_text(column: Any, texts: list[str]) -> None:
    rows = pa.table({"first": range(len(column)), 'odd "name"': column})
    expected = [f'{{"first": {n}, "odd \\"name\\"": {texts[n % 2]}}}' for n in range(len(column))]
    assert json_rows(rows) == expected
    assert json_rows(rows[:0]) == []
