"""xxhash64, distinct keys and digests at their edges; the fixed vectors keep both functions as they are."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from siltstone.state import hashing
from siltstone.state.digest import checkpoint_digest, group_sums, opaque_digest, row_digests

# From `select xxhash64(...)` of Spark 4.3.
SPARK = [
    (pa.array([1], pa.int32()), -6698625589789238999),
    (pa.array([1], pa.int64()), -7001672635703045582),
    (pa.array(["Spark"]), -4294468057691064905),
]


@pytest.mark.parametrize(("array", "expected"), SPARK, ids=lambda x: str(getattr(x, "type", "")))
def test_known_values_of_spark(array, expected):
    assert hashing.xxhash64([array]).view(np.int64).tolist() == [expected]


def test_chained_columns_and_nulls():
    a, b = pa.array([1, None, 3, None]), pa.array(["x", "y", None, None])
    together = hashing.xxhash64([a, b])
    assert together.tolist() == hashing.xxhash64([b], hashing.xxhash64([a])).tolist()
    assert together[2] == hashing.xxhash64([a])[2]
    assert together[1] == hashing.xxhash64([b])[1]
    assert together[3] == 42


def test_every_length_of_bytes_is_hashed_like_the_reference():
    rng = np.random.default_rng(7)
    values = [rng.bytes(n) for n in [*range(140), 4095, 4096, 4097, 70_000]]
    array = pa.array(values, pa.binary())
    assert hashing.xxhash64([array]).tolist() == [xxhash.xxh64_intdigest(v, 42) for v in values]
    cut = array.slice(50, 60)
    assert hashing.xxhash64([cut]).tolist() == [xxhash.xxh64_intdigest(v, 42) for v in values[50:110]]


def test_sliced_chunked_and_encoded_columns_hash_as_their_values():
    plain = pa.array([5, None, 7, 8, 9], pa.int16())
    pieces = pa.chunked_array([plain.slice(1, 2), plain.slice(3, 0), plain.slice(3)])
    assert hashing.xxhash64([pieces]).tolist() == hashing.xxhash64([plain]).tolist()[1:]
    text = pa.array(["a", "b", "a", None])
    assert hashing.xxhash64([text.dictionary_encode()]).tolist() == hashing.xxhash64([text]).tolist()
    assert hashing.xxhash64([text.cast(pa.large_string())]).tolist() == hashing.xxhash64([text]).tolist()
    bools = pa.array([True, False, True, None, True]).slice(1)
    assert hashing.xxhash64([bools]).tolist() == hashing.xxhash64([pa.array([0, 1, None, 1], pa.int8())]).tolist()


def test_big_decimals_hash_the_shortest_twos_complement():
    numbers = [0, 1, -1, 127, 128, -128, -129, 255, 256, 2**63, -(2**63), 2**64, 10**37, -(10**37)]
    array = pa.array([Decimal(n) for n in numbers], pa.decimal128(38, 0))
    expected = [
        xxhash.xxh64_intdigest(n.to_bytes(((n if n >= 0 else ~n).bit_length() // 8) + 1, "big", signed=True), 42)
        for n in numbers
    ]
    assert hashing.xxhash64([array]).tolist() == expected
    unsigned = [n for n in numbers if 0 <= n < 2**64]
    assert (
        hashing.xxhash64([pa.array(unsigned, pa.uint64())]).tolist()
        == hashing.xxhash64([pa.array([Decimal(n) for n in unsigned], pa.decimal128(20, 0))]).tolist()
    )


def test_unknown_types_are_refused():
    for function in (lambda a: hashing.xxhash64([a]), lambda a: row_digests(pa.table({"a": a}))):
        with pytest.raises(TypeError, match="list"):
            function(pa.array([[1]]))
    with pytest.raises(TypeError, match="column"):
        hashing.xxhash64([])


def test_no_rows():
    empty = pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())})
    assert hashing.xxhash64(empty.columns).tolist() == []
    assert row_digests(empty).tolist() == []
    first, group = hashing.find_distinct(np.empty(0, np.uint64), empty.columns)
    assert len(first) == len(group) == 0


@pytest.mark.parametrize("parallelism", [1, 100, 128, 32768])
def test_key_groups_are_pmod_of_the_signed_hash(parallelism):
    hashes = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    expected = [(h - 2**64 if h >= 2**63 else h) % parallelism for h in hashes.tolist()]
    groups = hashing.key_groups(hashes, parallelism)
    assert groups.dtype == np.uint16
    assert groups.tolist() == expected


def test_float_keys_are_normalised():
    odd_nan = np.array([0x7FF8000000000001, 0xFFF0000000000001], np.uint64).view(np.float64)
    table = pa.table(
        {
            "k": pa.array([-0.0, 0.0, odd_nan[0], odd_nan[1], 1.5]),
            "f": pa.array([-0.0, None, 1, 2, 3], pa.float32()),
        }
    )
    done = hashing.normalise_keys(table)
    assert done.schema == table.schema
    bits = done["k"].to_numpy().view(np.uint64).tolist()
    assert bits[0] == bits[1] == 0
    assert bits[2] == bits[3] == 0x7FF8000000000000
    assert done["f"].to_pylist() == [0.0, None, 1.0, 2.0, 3.0]
    assert not np.signbit(done["f"][0].as_py())
    hashes = hashing.xxhash64([table["k"]])
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert len(hashing.find_distinct(hashes, [done["k"]])[0]) == 3


def test_distinct_keys_in_spite_of_equal_hashes():
    a = pa.array([1, 2, 1, 1, 2, 1])
    b = pa.array(["x", "x", "y", "x", "x", "y"])
    for hashes in (np.zeros(6, np.uint64), np.array([5, 5, 9, 5, 5, 9], np.uint64), hashing.xxhash64([a, b])):
        first, group = hashing.find_distinct(hashes, [a, b])
        assert sorted(first.tolist()) == [0, 1, 2]
        assert first[group].tolist() == [0, 1, 2, 0, 1, 2]
    nan = pa.array([float("nan"), 1.0, float("nan")])
    assert len(hashing.find_distinct(np.zeros(3, np.uint64), [nan])[0]) == 2


ROW = pa.table(
    {
        "i": pa.array([-1], pa.int32()),
        "u": pa.array([2**64 - 1], pa.uint64()),
        "f": pa.array([1.5], pa.float32()),
        "g": pa.array([-2.25], pa.float64()),
        "d": pa.array([Decimal("-12.34")], pa.decimal128(10, 2)),
        "e": pa.array([Decimal(10) ** 30], pa.decimal128(38, 0)),
        "b": pa.array([True]),
        "s": pa.array(["Siltstone, a sedimentary rock of fine grain"]),
        "y": pa.array([b"\x00\xff"]),
        "t": pa.array([dt.date(2013, 1, 1)]),
        "z": pa.array([dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)], pa.timestamp("us", "UTC")),
        "n": pa.array([None], pa.int64()),
    }
)
VECTORS = {
    "i": 0x6921B4A894CB59BB,
    "u": 0x4E761BA9510D6FB4,
    "f": 0xF08FF20FF2478581,
    "g": 0x278BE0139D850D96,
    "d": 0xCEB13DB2BBFC89C0,
    "e": 0x9D174956F9EDFD7F,
    "b": 0x6C23AB6285AD4401,
    "s": 0x887924AF81EA6FC4,
    "y": 0xFE702B311417C9DE,
    "t": 0x1537945BAB5D8AAA,
    "z": 0x1702FE079549FBDD,
    "n": 0xB1A348E47D24CBC1,
}
ALL = 0x5271A8DA29855BFB
OPAQUE = 0xFACA9911FE99EDCF
CHECKPOINT = "9a4587db8823d24193e87797aeb5b7b3"


def test_vectors_of_the_row_digest():
    assert {name: int(row_digests(ROW.select([name]))[0]) for name in ROW.column_names} == VECTORS
    assert int(row_digests(ROW)[0]) == ALL


def test_a_row_of_nulls_alone_counts():
    rows = pa.table({"k": pa.array([None, None, 1], pa.int64()), "v": pa.array([None, 1, None], pa.int64())})
    digests = row_digests(rows).tolist()
    assert digests[0] == VECTORS["n"] and len({0, *digests}) == 4


def test_vectors_of_the_other_digests():
    assert opaque_digest(b"") == 0x2D06800538D394C2
    assert opaque_digest(b"sketch") == OPAQUE
    groups = np.arange(4, dtype=np.uint64)
    assert checkpoint_digest({}) == xxhash.xxh3_128_hexdigest(b"")
    assert checkpoint_digest({"b": {"y": groups}, "a": {"x": groups, "é": groups}}) == CHECKPOINT


def test_mix_is_the_documented_one():
    def mix(x, m):
        x ^= x >> 32
        x = x * m % 2**64
        x ^= x >> 29
        x = x * 0x9E3779B97F4A7C15 % 2**64
        return x ^ x >> 32

    total = 0
    for name, word in (("k", 2**64 - 7), ("v", 0x3FF8000000000000)):
        seeds = [xxhash.xxh3_64_intdigest(name.encode(), seed=i) for i in (0, 1)]
        total += mix((word + seeds[0]) % 2**64, seeds[1] | 1)
    expected = mix(total % 2**64, 0xBF58476D1CE4E5B9)
    table = pa.table({"k": pa.array([-7], pa.int8()), "v": [1.5], "w": pa.array([None], pa.string())})
    assert row_digests(table).tolist() == [expected]


def test_what_does_not_change_a_row_digest_and_what_does():
    one = pa.table({"a": pa.array([3], pa.int8()), "b": ["x"]})
    same = pa.table({"b": pa.array(["x"]), "n": pa.array([None], pa.date32()), "a": pa.array([3], pa.uint32())})
    assert row_digests(one).tolist() == row_digests(same).tolist()
    others = [
        {"a": [4], "b": ["x"]},
        {"a": [3], "b": ["y"]},
        {"a": [3], "c": ["x"]},
        {"b": ["x"]},
        {"a": [None], "b": ["z"]},
    ]
    others += [{"a": [3], "b": [None]}, {"a": [3], "b": [""]}]
    types = {"a": pa.int64(), "b": pa.string(), "c": pa.string()}
    tables = [pa.table({n: pa.array(v, types[n]) for n, v in other.items()}) for other in others]
    digests = {int(row_digests(table)[0]) for table in tables}
    assert len(digests | {int(row_digests(one)[0])}) == 8
    zeros = row_digests(pa.table({"f": [0.0, -0.0]}))
    assert zeros[0] != zeros[1]


def test_group_sums_wrap():
    sums = group_sums(np.array([2**64 - 1, 5, 7], np.uint64), np.array([1, 1, 3], np.uint16), 4)
    assert sums.tolist() == [0, 4, 0, 7]


def test_checkpoint_digests_differ_by_place_of_the_same_numbers():
    a, b = np.arange(4, dtype=np.uint64), np.zeros(4, np.uint64)
    shapes = [
        {"o": {"v": a}},
        {"o": {"w": a}},
        {"p": {"v": a}},
        {"o": {"v": b}},
        {"o": {"v": a, "w": b}},
        {"o": {}},
    ]
    assert len({checkpoint_digest(shape) for shape in shapes}) == len(shapes)
    assert checkpoint_digest({"a": {"v": a, "w": b}, "b": {}}) == checkpoint_digest({"b": {}, "a": {"w": b, "v": a}})
