"""Operator keys from text: every type there and back, and what is refused."""

import json
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.restore.keys import parse_key_groups, parse_keys, rows_of_keys
from siltstone.state.hashing import normalise_keys, xxhash64
from tests.arrow_strategies import TYPES, random_array


def as_json(value: Any, kind: pa.DataType) -> Any:
    """A value of a column as a person would write it."""
    if pa.types.is_binary(kind):
        return value.hex()
    if pa.types.is_temporal(kind):
        return value.isoformat()
    return str(value) if pa.types.is_decimal(kind) else value


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type_comes_back_and_finds_its_rows(kind: pa.DataType) -> None:
    column = random_array(Random(2), kind, 40)
    schema = pa.schema([("k", kind)])
    rows = normalise_keys(pa.table([column], schema=schema))
    written = [{"k": None if value is None else as_json(value, kind)} for value in rows["k"].to_pylist()]
    assert {"k": None} in written
    keys = parse_keys(json.dumps(written), schema)
    assert keys.schema == schema
    assert xxhash64(keys.columns).tolist() == xxhash64(rows.columns).tolist()
    assert repr(keys.to_pylist()) == repr(rows.to_pylist())
    hashes = xxhash64(rows.columns)
    found = rows_of_keys(rows, keys.slice(3, 1))
    assert len(found) == (hashes == hashes[3]).sum()
    assert repr(found["k"][0].as_py()) == repr(rows["k"][3].as_py())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), '"5"'),
        (pa.int64(), "1.0"),
        (pa.int64(), "true"),
        (pa.uint8(), "256"),
        (pa.string(), "5"),
        (pa.string(), "1.5"),
        (pa.bool_(), "1"),
        (pa.float64(), '"x"'),
        (pa.decimal128(4, 2), '"1.234"'),
        (pa.decimal128(4, 2), '"x"'),
        (pa.binary(), '"0g"'),
        (pa.date32(), '"tomorrow"'),
        (pa.date32(), "7"),
        (pa.timestamp("us", "UTC"), '"noon"'),
        (pa.timestamp("us"), "7"),
        (pa.int64(), "null"),
        (pa.int64(), "[1]"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(kind: pa.DataType, value: str) -> None:
    with pytest.raises(UsageError):
        parse_keys(f'[{{"k": {value}}}]', pa.schema([pa.field("k", kind, nullable=False)]))


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", '["a"]', '[{"k": 1, "more": 2}]', "[{}]"])
def test_keys_of_another_shape_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r'write \[\{"k": \.\.\.\}\]'):
        parse_keys(text, pa.schema([("k", pa.int64())]))


def test_key_groups() -> None:
    assert parse_key_groups("0-7", 8) == (KeyGroupRange(0, 8),)
    assert parse_key_groups(" 3 ", 8) == (KeyGroupRange(3, 4),)
    for text in ("", "-", "3-", "-3", "5-4", "0-8", "a", "1-2-3", "٣", "1" * 5000):
        with pytest.raises(UsageError, match="from 0 to 7"):
            parse_key_groups(text, 8)
