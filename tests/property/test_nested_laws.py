"""The bytes of nested values depend on the values alone, and bring them back; other bytes are refused."""

import datetime
import decimal
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from siltstone.errors import CorruptObject, UsageError
from siltstone.state.digest import row_digests
from siltstone.state.nested import decode_nested, encode_nested, has_more_fields, nested_columns, stored_columns
from siltstone.state.schema import TableSchema
from siltstone.state.types import DEPTH_MAX, LEAVES_MAX, checked_type, type_text, value_type_of
from tests.examples import examples

LAWS = settings(
    max_examples=examples(100),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
UTC = datetime.UTC
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint8(): st.integers(0, 255),
    pa.float32(): st.floats(width=32) | st.just(-0.0),
    pa.float64(): st.floats() | st.just(-0.0),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.decimal128(30, 2): st.integers(-(10**30) + 1, 10**30 - 1).map(
        lambda n: decimal.Decimal(n).scaleb(-2, decimal.Context(prec=40))
    ),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.timestamp("us"): st.datetimes(),
}
NAMES = st.text(min_size=1, max_size=3) | st.sampled_from(['"', ">", ", ", "a: int64"])


def _types(depth: int) -> st.SearchStrategy[pa.DataType]:
    leaf = st.sampled_from(list(LEAVES))
    inner = leaf if depth == 0 else leaf | _types(depth - 1)
    structs = st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(lambda fields: pa.struct(list(fields.items())))
    return structs | inner.map(pa.list_)


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({each.name: st.none() | _values(each.type) for each in kind})
    if pa.types.is_list(kind):
        return st.lists(st.none() | _values(kind.value_type), max_size=3)
    return LEAVES[kind]


CASES = _types(2).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(st.none() | _values(kind), min_size=1, max_size=5))
)


def _array(kind: pa.DataType, values: list[Any]) -> pa.Array:
    return pa.array(values, checked_type(kind, "v", nested=True))


def _relaid(array: pa.Array, draw: np.random.Generator) -> pa.Array:
    """The same values in other memory: a slice, with other values below nulls, other NaNs, and dictionaries' values."""
    kind, size = array.type, len(array)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    some = np.flatnonzero(valid)
    if not len(some):
        return pa.concat_arrays([array, array])[size:]
    # Where it is null, some other value of the array lies below.
    filled = array.take(pa.array(np.where(valid, np.arange(size), draw.choice(some, size))))
    mask = pa.array(~valid)
    if pa.types.is_struct(kind):
        children = [_relaid(child, draw) for child in filled.flatten()]
        made = pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    elif pa.types.is_list(kind):
        made = pa.ListArray.from_arrays(filled.offsets, _relaid(filled.values, draw), type=kind, mask=mask)
    elif pa.types.is_float64(kind):
        numbers = filled.to_numpy()
        bits = np.where(np.isnan(numbers), np.uint64(0xFFF8000000000000) + np.uint64(draw.integers(1 << 20)), 0)
        numbers = np.where(np.isnan(numbers), bits.view(np.float64), numbers)
        made = pa.array(numbers, kind, mask=~valid)
    elif pa.types.is_string(kind):
        made = array.dictionary_encode().dictionary_decode()
    else:
        made = array
    return pa.concat_arrays([made, made])[size:]


def _text(values: list[Any]) -> list[str]:
    """What tells values apart: of floats, the sign of zero, but not which of the NaNs."""
    return [repr(value) for value in values]


@LAWS
@given(CASES)
def test_bytes_bring_the_values_back(case: tuple[pa.DataType, list[Any]]) -> None:
    array = _array(*case)
    stored = encode_nested(array)
    again = decode_nested(stored, array.type)
    assert again.type == array.type and _text(again.to_pylist()) == _text(array.to_pylist())
    assert encode_nested(again).equals(stored)
    assert [each is None for each in stored.to_pylist()] == [each is None for each in array.to_pylist()]


@LAWS
@given(CASES, st.integers(0, 1 << 30))
def test_equal_values_have_equal_bytes_whatever_their_memory(case: tuple[pa.DataType, list[Any]], seed: int) -> None:
    array = _array(*case)
    relaid = _relaid(array, np.random.default_rng(seed))
    assert _text(relaid.to_pylist()) == _text(array.to_pylist())
    assert encode_nested(relaid).equals(encode_nested(array))
    for i in range(len(array)):
        assert encode_nested(relaid[i : i + 1]).equals(encode_nested(array)[i : i + 1]), "each value by itself"


@LAWS
@given(CASES)
def test_other_values_have_other_bytes(case: tuple[pa.DataType, list[Any]]) -> None:
    array = _array(*case)
    texts, stored = _text(array.to_pylist()), encode_nested(array).to_pylist()
    for i in range(len(texts)):
        for j in range(i):
            assert (texts[i] == texts[j]) == (stored[i] == stored[j])


@LAWS
@given(CASES, st.data())
def test_other_bytes_are_refused_or_are_those_of_a_value(
    case: tuple[pa.DataType, list[Any]], data: st.DataObject
) -> None:
    array = _array(*case)
    whole = [each for each in encode_nested(array).to_pylist() if each is not None]
    crafted = bytearray(data.draw(st.sampled_from(whole) if whole else st.just(b"")))
    for at in data.draw(st.lists(st.integers(0, max(len(crafted) - 1, 0)), max_size=3)) if crafted else ():
        crafted[at] = data.draw(st.integers(0, 255))
    cut = bytes(crafted[: data.draw(st.integers(0, len(crafted)))]) + data.draw(st.binary(max_size=2))
    try:
        found = decode_nested(pa.array([cut], pa.binary()), array.type)
    except CorruptObject:
        return
    stored = encode_nested(found).to_pylist()[0]
    assert len(stored) == len(cut)
    assert decode_nested(pa.array([stored], pa.binary()), array.type).type == array.type


@LAWS
@given(st.lists(_types(1), min_size=1, max_size=3), st.lists(_types(1), min_size=1, max_size=3), st.data())
def test_a_struct_gets_more_fields_with_the_same_bytes(
    first: list[pa.DataType], more: list[pa.DataType], data: st.DataObject
) -> None:
    fields = [*((f"f{n}", each) for n, each in enumerate(first)), *((f"new{n}", each) for n, each in enumerate(more))]
    kind, wider = (checked_type(pa.struct(some), "v", nested=True) for some in (fields[: len(first)], fields))
    values = data.draw(st.lists(st.none() | _values(kind), min_size=1, max_size=5))
    before = encode_nested(pa.array(values, kind))
    assert has_more_fields(wider, kind) and not has_more_fields(kind, wider) and not has_more_fields(kind, kind)
    after = decode_nested(before, wider)
    assert encode_nested(after).equals(before)
    assert _text([each and {name: each[name] for name in kind.names} for each in after.to_pylist()]) == _text(
        pa.array(values, kind).to_pylist()
    )
    assert all(each is None or each["new0"] is None for each in after.to_pylist())


def test_a_struct_with_a_wide_one_within_keeps_its_fields() -> None:
    """A null of the inner one takes more memory than bytes, so that its values are padded."""
    wide = pa.struct([(f"f{i}", pa.int64()) for i in range(10)])
    kind = pa.struct([("a", pa.int64()), ("w", wide)])
    assert not has_more_fields(pa.struct([*kind, ("b", pa.int64())]), kind)
    assert not has_more_fields(pa.struct([("a", pa.int64()), ("l", pa.list_(wide))]), pa.struct([("a", pa.int64())]))
    assert not has_more_fields(pa.list_(kind), pa.list_(pa.struct([("a", pa.int64())])))
    array = pa.array([{"a": 1, "w": None}, {"a": None, "w": None}], kind)
    assert [len(each) for each in encode_nested(array).to_pylist()] == [10, 2]
    assert decode_nested(encode_nested(array), kind).equals(array)


@LAWS
@given(_types(2))
def test_the_text_of_a_type_brings_it_back(kind: pa.DataType) -> None:
    kind = checked_type(kind, "v", nested=True)
    assert value_type_of(type_text(kind)) == kind
    schema = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", kind), ("n", pa.int64())]))
    assert TableSchema.from_json(schema.to_json()) == schema
    assert schema.shown_value.field("v").type == kind and schema.value.field("v").type == pa.binary()


@pytest.mark.parametrize(
    "text",
    [
        "struct<>",
        "struct<a: int64>",
        'struct<"a": int64',
        'struct<"a": int64>>',
        'struct<"a": int64, "a": int64>',
        'struct<"": int64>',
        "struct<1: int64>",
        'struct<"a" int64>',
        "list<item: int64>",
        "list<>",
        "list<map<string, int64>>",
        "list<" * 20 + "int64" + ">" * 20,
        "list<" * 100_000,
        "list<decimal256(40, 2)>",
        "struct<" + ", ".join(f'"{i}": int64' for i in range(LEAVES_MAX + 1)) + ">",
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_text_of_a_type_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        value_type_of(text)


def test_digests_are_those_of_the_bytes() -> None:
    """A vector: recorded digests depend on the bytes of nested values."""
    kind = pa.struct([("a", pa.int64()), ("l", pa.list_(pa.string()))])
    table = pa.table({"v": pa.array([{"a": 1, "l": ["x", None]}, None, {"a": None, "l": None}], kind)})
    stored = stored_columns(table, [("v", kind)])
    expected = [struct.pack("<BqBIBBI", 1, 1, 1, 2, 1, 0, 1) + b"x", None, b""]
    assert stored.column("v").to_pylist() == expected
    assert row_digests(stored).tolist() == row_digests(pa.table({"v": pa.array(expected, pa.binary())})).tolist()
    assert nested_columns(stored, [("v", kind)]).equals(table)


def test_a_list_of_null_structs_pays_for_its_memory() -> None:
    kind = pa.list_(pa.struct([(f"f{i}", pa.int64()) for i in range(200)]))
    array = pa.array([[None] * 1000, [None], [], [{f"f{i}": i for i in range(200)}]], kind)
    stored = encode_nested(array)
    assert decode_nested(stored, kind).equals(array)
    assert 64 * len(stored[0].as_py()) >= decode_nested(stored[:1], kind).nbytes
    with pytest.raises(CorruptObject, match="far more memory"):
        decode_nested(pa.array([struct.pack("<I", 1 << 20) + bytes(1 << 20)], pa.binary()), kind)


def test_values_in_many_pieces_and_long_ones_come_back() -> None:
    kind = pa.list_(pa.binary())
    values = [[b"x" * 1000] * 3, None, [], [bytes(100_000), None]] * 200
    table = pa.table({"v": pa.chunked_array([pa.array(values, kind), pa.array(values[:5], kind)])})
    stored = stored_columns(table, [("v", kind)])
    assert nested_columns(stored, [("v", kind)]).equals(table)
    encoded = stored.column("v").combine_chunks().dictionary_encode()
    assert nested_columns(pa.table({"v": encoded}), [("v", kind)]).column("v").to_pylist() == values + values[:5]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (pa.map_(pa.string(), pa.int64()), "use a MapState, with one row per entry, or a list of structs"),
        (pa.list_(pa.map_(pa.string(), pa.int64())), "has map<string, int64> within it: use a MapState"),
        (pa.struct([("a", pa.list_(pa.decimal256(40, 2)))]), "within it: use decimal128"),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), "within it: use its values' type: string"),
        (pa.struct([]), "a struct needs fields with distinct names"),
        (pa.struct([("a", pa.int64()), ("a", pa.int8())]), "a struct needs fields with distinct names"),
        (pa.struct([(f"f{i}", pa.int8()) for i in range(LEAVES_MAX + 1)]), "use several columns"),
    ],
    ids=str,
)
def test_what_cannot_be_nested_is_refused_by_name(kind: pa.DataType, why: str) -> None:
    with pytest.raises(UsageError, match=f"column tags .*{why}"):
        TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("tags", kind)]))


def test_a_type_that_is_nested_too_deep_is_refused() -> None:
    kind = pa.int64()
    for _ in range(DEPTH_MAX):
        kind = pa.list_(kind)
    deep = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", kind)]))
    assert TableSchema.from_json(deep.to_json()) == deep
    with pytest.raises(UsageError, match="nested more than 16 deep"):
        TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", pa.list_(kind))]))
