"""Rows as Avro: fastavro, which knows only the schema, reads each value as it was; and what Avro cannot be is refused.

Most values are compared with what stands for them (integers, unscaled decimals): Python has no years beyond 9999.
"""

import json
import math
import struct
from datetime import UTC, date, datetime, time
from decimal import Decimal
from io import BytesIO
from typing import Any

import pyarrow as pa
import pytest
from fastavro import schemaless_reader
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone import extras
from siltstone.errors import StateError, UsageError
from siltstone.sinks.kafka_avro import AvroFormat, avro_schema
from siltstone.sinks.kafka_rows import check_columns, encode_records
from siltstone.state.json_rows import json_rows
from tests.examples import examples

AVRO = AvroFormat("the sink", "a-stream", "2nd")
INT64 = st.integers(-(2**63), 2**63 - 1)
DAY_S = 86_400


def read(data: bytes, schema: Any) -> Any:
    """What a reader makes of a datum, all of which it reads."""
    source = BytesIO(data)
    found = schemaless_reader(source, schema, None)
    assert not source.read()
    return found


def without_logic(schema: Any) -> Any:
    """The schema with the types below the logical ones."""
    if isinstance(schema, dict):
        return {name: without_logic(each) for name, each in schema.items() if name != "logicalType"}
    return [without_logic(each) for each in schema] if isinstance(schema, list) else schema


def encoded(rows: pa.Table, columns: Any = None) -> list[bytes | None]:
    return AVRO.encode(rows, rows.column_names if columns is None else columns, "Value")


def stands_for(scalar: Any) -> Any:
    """What a value is without logical types; floats as their bits."""
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.MapScalar):
        return {str(entry[0]): stands_for(entry[1]) for entry in scalar.values}
    if isinstance(scalar, pa.ListScalar):
        return [stands_for(each) for each in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {kind.field(i).name: stands_for(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_decimal(kind):
        sign, digits, _ = scalar.as_py().as_tuple()
        return unscaled((-1) ** sign * int("".join(map(str, digits))))
    if pa.types.is_uint64(kind):
        return unscaled(scalar.as_py())
    if pa.types.is_temporal(kind):
        return scalar.value * (1000 if getattr(kind, "unit", None) == "s" else 1)
    return comparable(scalar.as_py())


def unscaled(n: int) -> bytes:
    """The shortest two's complement, by counting up."""
    size = next(size for size in range(1, 40) if -(1 << 8 * size - 1) <= n < 1 << 8 * size - 1)
    return n.to_bytes(size, "big", signed=True)


def comparable(value: Any) -> Any:
    """The value with floats as bits, so that zeros have signs and NaN is equal to itself."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    return [comparable(each) for each in value] if isinstance(value, list) else value


def bits(kind: pa.DataType) -> st.SearchStrategy[int]:
    low = 0 if pa.types.is_unsigned_integer(kind) else -(1 << kind.bit_width - 1)
    return st.integers(low, low + (1 << kind.bit_width) - 1)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(lambda n: Decimal(f"{n}E{-scale}"))


INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    **{kind: bits(kind) for kind in INTEGERS},
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), st.text(max_size=20)),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), st.binary(max_size=20)),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.decimal128(18, 2): decimals(18, 2),
    pa.decimal128(38, 38): decimals(38, 38),
    pa.decimal256(76, 10): decimals(76, 10),
    pa.date32(): bits(pa.int32()),
    pa.time32("s"): st.integers(0, DAY_S - 1),
    pa.time32("ms"): st.integers(0, DAY_S * 10**3 - 1),
    pa.time64("us"): st.integers(0, DAY_S * 10**6 - 1),
    **{pa.timestamp("s", zone): st.integers(-(2**53), 2**53) for zone in (None, "UTC")},
    **{pa.timestamp(unit, zone): INT64 for unit in ("ms", "us") for zone in (None, "Europe/Berlin")},
}


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 3) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, and values of it or null."""
    nested = draw(st.sampled_from(("leaf", "leaf", "struct", "list", "map"))) if depth else "leaf"
    if nested == "leaf":
        kind = draw(st.sampled_from(list(LEAVES)))
        return kind, st.none() | LEAVES[kind]
    if nested == "struct":
        fields = [draw(typed_values(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
        names = ["a", "a_b", "b"][: len(fields)]
        values = st.fixed_dictionaries({name: each for name, (_, each) in zip(names, fields, strict=True)})
        return pa.struct([(n, kind) for n, (kind, _) in zip(names, fields, strict=True)]), st.none() | values
    kind, inner = draw(typed_values(depth=depth - 1))
    if nested == "list":
        list_of = draw(st.sampled_from((pa.list_, pa.large_list)))
        return list_of(kind), st.none() | st.lists(inner, max_size=3)
    entries = st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda each: list(each.items()))
    return pa.map_(pa.string(), kind), st.none() | entries


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Up to five rows of up to four columns, which may be a part of longer ones."""
    count, start = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    columns = {}
    for name in ("a", "b_c", "b", "_4")[: draw(st.integers(1, 4))]:
        kind, values = draw(typed_values())
        columns[name] = pa.array(draw(st.lists(values, min_size=count + start, max_size=count + start)), kind)
    return pa.table(columns)[start:]


@settings(max_examples=examples(400))
@given(tables())
def test_a_reader_with_the_schema_gets_each_value(rows: pa.Table) -> None:
    schema = without_logic(avro_schema(rows.schema))
    found = [comparable(read(data or b"", schema)) for data in encoded(rows)]
    wanted = [{name: stands_for(rows[name][i]) for name in rows.column_names} for i in range(rows.num_rows)]
    assert found == wanted


@settings(max_examples=examples(200))
@given(st.data())
def test_one_column_is_text_and_bytes_as_they_are_and_else_a_datum_or_none(data: st.DataObject) -> None:
    kind, values = data.draw(typed_values())
    column = pa.array(data.draw(st.lists(values, min_size=1, max_size=3)), kind)
    batch = pa.record_batch({"not a name of Avro": column})
    [records] = encode_records(batch, "not a name of Avro", "not a name of Avro", None, AVRO)
    schema = without_logic(avro_schema(pa.schema({"it": kind}))["fields"][0]["type"][1])
    for (key, value, _), scalar in zip(records, column, strict=True):
        assert key == value
        if not scalar.is_valid:
            assert value is None
        elif schema in ("string", "bytes") or pa.types.is_fixed_size_binary(kind):
            assert value == (scalar.as_py().encode() if schema == "string" else scalar.as_py())
        else:
            assert comparable(read(value, schema)) == stands_for(scalar)


def test_a_reader_of_logical_types_gets_numbers_dates_and_times() -> None:
    at = datetime(2026, 1, 31, 12, 30, 0, 123456)
    whole = at.replace(microsecond=123000)
    values = {
        "zoned": (pa.timestamp("us", "Europe/Berlin"), at.replace(tzinfo=UTC)),
        "zoned_ms": (pa.timestamp("ms", "UTC"), whole.replace(tzinfo=UTC)),
        "local": (pa.timestamp("us"), at),
        "local_s": (pa.timestamp("s"), at.replace(microsecond=0)),
        "before": (pa.timestamp("ms"), datetime(1, 1, 1)),
        "day": (pa.date32(), date(9999, 12, 31)),
        "second": (pa.time32("s"), time(23, 59, 59)),
        "micro": (pa.time64("us"), time(0, 0, 0, 1)),
        "cents": (pa.decimal128(9, 2), Decimal("-0.01")),
        "many": (pa.uint64(), Decimal(2**64 - 1)),
        "long": (pa.decimal256(50, 49), Decimal("-9." + "9" * 49)),
    }
    rows = pa.table({name: pa.array([value], kind) for name, (kind, value) in values.items()})
    [data] = encoded(rows)
    assert read(data or b"", avro_schema(rows.schema)) == {name: value for name, (_, value) in values.items()}


@pytest.mark.parametrize("kind", [pa.list_view(pa.int32()), pa.large_list_view(pa.int32()), pa.list_(pa.int32(), 2)])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_lists_of_all_layouts(kind: pa.DataType, start: int) -> None:
    lists = [[1, 2], None, [3, None], [-4, 5]]
    rows = pa.table({"them": pa.array(lists, kind)})[start:]
    assert [read(each or b"", avro_schema(rows.schema))["them"] for each in encoded(rows)] == lists[start:]


def test_a_dictionary_is_its_values() -> None:
    texts = pa.array(["a", None, "b", "a"]).dictionary_encode()
    rows = pa.table({"d": texts, "of": pa.ListArray.from_arrays([0, 1, 3, 3, 4], texts)})
    assert [read(each or b"", avro_schema(rows.schema)) for each in encoded(rows)] == rows.to_pylist()


def test_the_schema_is_json_with_names_after_the_path() -> None:
    point = pa.struct({"x": pa.float32(), "id": pa.binary(4)})
    rows = pa.schema({"k": pa.int16(), "a": pa.list_(pa.struct({"b": point})), "a_b": pa.map_(pa.string(), point)})
    assert json.loads(json.dumps(avro_schema(rows, "n.s.Value"))) == {
        "type": "record",
        "name": "n.s.Value",
        "fields": [
            {"name": "k", "type": ["null", "int"], "default": None},
            {
                "name": "a",
                "type": ["null", {"type": "array", "items": ["null", a_record("n.s.Value_a", b=point_named("_a_b"))]}],
                "default": None,
            },
            {
                "name": "a_b",
                "type": ["null", {"type": "map", "values": ["null", point_named("_a_b_2", "_a_b_id_2")]}],
                "default": None,
            },
        ],
    }


def a_record(name: str, **types: Any) -> dict[str, Any]:
    fields = [{"name": each, "type": ["null", kind], "default": None} for each, kind in types.items()]
    return {"type": "record", "name": name, "fields": fields}


def point_named(name: str, id: str = "_a_b_id") -> dict[str, Any]:
    return a_record(f"n.s.Value{name}", x="float", id={"type": "fixed", "name": f"n.s.Value{id}", "size": 4})


def test_the_names_of_the_stream_and_the_operator_become_names_of_avro() -> None:
    rows = pa.schema({"of": pa.struct({"x": pa.int64()})})
    assert AVRO.make_schema(rows, ["of"], "Key") == avro_schema(rows, "siltstone.a_stream._2nd.Key")


# What is refused

STRUCT = pa.struct({"at": pa.timestamp("ns")})


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ("t", pa.timestamp("ns", "UTC"), r"column t has type timestamp\[ns, tz=UTC\], .*: declare timestamp\[us\]"),
        ("t", pa.list_(STRUCT), r"column t.at has type timestamp\[ns\], .*: declare timestamp\[us\]"),
        ("t", pa.time64("ns"), r"column t has type time64\[ns\], .*: declare time64\[us\]"),
        ("t", pa.date64(), "declare date32"),
        ("t", pa.duration("us"), "declare int64"),
        ("t", pa.map_(pa.int64(), pa.string()), "declare a map with keys of text"),
        ("t", pa.decimal128(5, -2), "declare a decimal whose scale"),
        ("t", pa.decimal128(5, 7), "declare a decimal whose scale"),
        ("t", pa.null(), "declare another type"),
        ("a b", pa.int64(), "column a b has a name that Avro does not have: rename it"),
        ("", pa.int64(), "column  has a name"),
        ("2nd", pa.int64(), "not beginning with a digit"),
        ("t", pa.struct({"straße": pa.int64()}), "column t.straße has a name"),
        ("t", pa.struct([("x", pa.int64()), ("x", pa.int8())]), r"column t.x is there twice: rename one"),
    ],
)
def test_what_avro_does_not_have_is_refused_by_name(column: str, kind: pa.DataType, said: str) -> None:
    schema = pa.schema([("k", pa.int64()), (column, kind)])
    with pytest.raises(UsageError, match=said):
        avro_schema(schema)
    for key, value in (([column], "k"), (None, None)):
        with pytest.raises(UsageError, match=f"^the sink: .*{said}"):
            check_columns(schema, key, value, "the sink", AVRO)
        check_columns(schema, key, value, "the sink")


def test_the_column_of_a_single_value_is_named_too() -> None:
    with pytest.raises(UsageError, match=r"column a b\.at has type timestamp"):
        check_columns(pa.schema({"a b": STRUCT, "k": pa.string()}), "k", "a b", "the sink", AVRO)
    check_columns(pa.schema({"a b": pa.int64(), "c d": pa.string()}), "c d", "a b", "the sink", AVRO)


@pytest.mark.parametrize("name", ["", "a..b", "a-b", "1", "a.b."])
def test_a_name_that_is_none_of_avro(name: str) -> None:
    with pytest.raises(UsageError, match="is not one of Avro: use letters"):
        avro_schema(pa.schema({"k": pa.int64()}), name)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"format='avro' needs the package fastavro: pip install 'siltstone\[kafka\]'"):
        AVRO.check(pa.schema({"k": pa.int64()}), ["k"], "Value")


def latin(kind: pa.DataType) -> pa.Array:
    """Text that is not UTF-8, of a type of text."""
    large = pa.array([b"fine", b"K\xf6ln"], pa.large_binary())
    return pa.Array.from_buffers(pa.large_string(), 2, large.buffers()).cast(kind)


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_not_utf_8_is_an_error_that_names_the_column(nested: bool) -> None:
    text = latin(pa.string())
    column = pa.StructArray.from_arrays([text], ["x"]) if nested else text
    with pytest.raises(StateError, match=r"the sink: column city has .*text that is not UTF-8.*K\\\\xf6ln") as caught:
        encoded(pa.table({"city": column}))
    assert "declare it as binary" in caught.value.full_text
    [records] = encode_records(pa.record_batch({"city": text}), "city", "city", None, AVRO)
    assert [value for _, value, _ in records] == [b"fine", b"K\xf6ln"], "as it is"


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([2**62], pa.timestamp("s")), "out of bounds|overflow"),
        (pa.array([None, [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())), "a map with a key twice"),
    ],
)
def test_a_value_that_avro_has_no_room_for_is_an_error_that_names_the_column(column: pa.Array, said: str) -> None:
    with pytest.raises(StateError, match=f"the sink: column it has a value that Avro does not have: .*({said})"):
        encoded(pa.table({"it": column}))


def test_deep_values_take_no_longer_at_each_level() -> None:
    """fastavro tries the branches of a union by reading all that is in a value, unless it is told the branch."""
    kind, value = pa.int64(), 7
    for _ in range(12):
        kind, value = pa.list_(pa.struct({"x": kind})), [{"x": value}] * 2
    rows = pa.table({"deep": pa.array([value], kind)})
    assert len(encoded(rows)[0] or b"") > 2**12 and json_rows(rows)
