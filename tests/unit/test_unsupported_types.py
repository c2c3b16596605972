"""A column of a type that state cannot have is refused by name, with the type to use instead."""

import pyarrow as pa
import pytest

from siltstone.errors import UsageError
from siltstone.state.schema import TableSchema
from siltstone.state.types import type_of

CASES = [
    (pa.decimal256(20, 2), r"use decimal128\(20, 2\)"),
    (pa.decimal256(38, 0), r"use decimal128\(38, 0\)"),
    (pa.decimal256(39, 2), "use decimal128, which has up to 38 digits"),
    (pa.map_(pa.string(), pa.int64()), "use a MapState"),
    (pa.large_string(), "use string"),
    (pa.string_view(), "use string"),
    (pa.large_binary(), "use binary"),
    (pa.binary_view(), "use binary"),
    (pa.binary(16), "use binary"),
    (pa.float16(), "use float32"),
    (pa.date64(), "use date32"),
    (pa.timestamp("ns", "UTC"), r"use timestamp\[us\]"),
    (pa.timestamp("s"), r"use timestamp\[us\]"),
    (pa.time64("us"), "use int64, such as microseconds since midnight"),
    (pa.time32("s"), "use int64, such as microseconds since midnight"),
    (pa.duration("us"), "use int64, such as microseconds"),
    (pa.dictionary(pa.int8(), pa.string()), "use its values' type: string"),
    (pa.dictionary(pa.int8(), pa.decimal256(40, 0)), "use its values' type: an integer, float, decimal128"),
    (pa.null(), "use an integer, float, decimal128"),
    (pa.month_day_nano_interval(), "use an integer, float, decimal128"),
]


NESTED = [
    pa.struct([("a", pa.int64())]),
    pa.list_(pa.int64()),
    pa.large_list(pa.int64()),
    pa.list_(pa.int64(), 3),
    pa.list_view(pa.int64()),
]
FLAT = "a key is flat: use one column per field or element"


@pytest.mark.parametrize(
    ("kind", "advice", "part"),
    [
        *((kind, advice, part) for kind, advice in CASES for part in ("key", "subkey", "value")),
        *((kind, FLAT, part) for kind in NESTED for part in ("key", "subkey")),
        *((kind, "use list", "value") for kind in NESTED[2:]),
    ],
    ids=str,
)
def test_a_column_is_refused_by_name_with_the_type_to_use(kind: pa.DataType, advice: str, part: str) -> None:
    parts = {name: pa.schema([(name, pa.int64())]) for name in ("key", "subkey", "value")}
    parts[part] = pa.schema([("total", kind)])
    with pytest.raises(UsageError, match=f"column total has type .*: {advice}") as refused:
        TableSchema(**parts)
    assert f"has type {kind}: " in str(refused.value)


@pytest.mark.parametrize("text", ["decimal256(40, 2)", "decimal256(20, 2)", "struct<a: int64>", "list<item: int64>"])
def test_a_recorded_type_that_is_not_supported_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a column type that Siltstone supports: use an integer") as refused:
        type_of(text)
    assert repr(text) in str(refused.value)
