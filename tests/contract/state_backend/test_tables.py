"""Every state backend: what is put is got, whatever its types."""

import random

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import UsageError
from siltstone.state.backend import StateTable, SubtaskState
from siltstone.state.backends.named import backend
from siltstone.state.schema import TableSchema
from tests.arrow_strategies import TYPES, random_array
from tests.state_model import ALL, MAX_PARALLELISM, batch_of, changed, contents, rows_of
from tests.state_tables import TEXT, Open, longs, now, put, told, values


def test_an_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="'papyrus' is not a state backend: use one of heap, rocksdb"):
        backend("papyrus")


def test_a_new_directory_holds_nothing_at_version_0(reopen: Open):
    state = reopen()
    assert (state.version, state.groups, state.max_parallelism) == (0, ALL, MAX_PARALLELISM)
    assert isinstance(state, SubtaskState)
    assert isinstance(state.tables["t"], StateTable)
    assert contents(state.tables["t"]) == {}
    assert state.opaque == {"model": {}}
    found = state.tables["t"].get(longs(1, 2))
    assert found.found.tolist() == [False, False]
    assert found.values.equals(values(None, None))


def test_put_get_delete_and_put_again(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=10, k2=None, k3=30)
    table.delete(longs(3, 99))
    found = table.get(longs(3, 2, 1, 4))
    assert found.found.tolist() == [False, True, True, False]
    assert found.values.equals(values(None, None, 10, None))
    assert table.rows == 2
    put(state, k3=33)
    put(state, k1=11)
    assert now(table) == {1: 11, 2: None, 3: 33}


def test_changes_that_are_expected_may_come_or_not(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    table.put(longs(*range(5000)), values(*range(5000)))
    state.commit()
    state.begin(2, tracking=True)
    table.expect_changes(5000)
    table.put(longs(1), values(11))
    table.expect_changes(1)
    table.expect_changes(5000)
    table.reserve(100_000)
    table.put(longs(2), values(22))
    expected = {**dict(zip(range(5000), range(5000), strict=True)), 1: 11, 2: 22}
    assert now(table) == expected
    state.commit()
    state.begin(3, tracking=True)
    table.expect_changes(5000)
    state.rollback()
    state.close()
    assert now(reopen().tables["t"]) == expected


def test_room_for_what_is_to_come_changes_nothing_else(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    table.put(longs(1, 2), values(10, 20))
    table.reserve(100_000)
    table.put(longs(2, 3), values(22, 30))
    assert now(table) == told(table) == {1: 10, 2: 22, 3: 30}
    assert table.rows == 3
    state.commit()
    state = reopen()
    assert now(state.tables["t"]) == {1: 10, 2: 22, 3: 30}
    state.rollback()
    assert now(reopen().tables["t"]) == {}


@pytest.mark.parametrize("key_type", TYPES, ids=str)
def test_every_type_as_key_and_as_value(reopen: Open, key_type: pa.DataType):
    """Every type beside every other, at an offset, with nulls, replaced, and read again when reopened."""
    rng = random.Random(str(key_type))
    columns = {f"v{i}": kind for i, kind in enumerate(TYPES)}
    schema = TableSchema(pa.schema([("k", key_type)]), pa.schema([("s", pa.int32())]), pa.schema(list(columns.items())))
    raw = random_array(rng, key_type, 300)
    assert raw.null_count
    keys = pa.table({"k": raw, "s": pa.array(range(len(raw)), pa.int32())}, schema=schema.primary_key)
    state = reopen(schema)
    table = state.tables["t"]
    expected = {}
    for step, start in ((1, 0), (2, 100)):
        state.begin(step, tracking=True)
        part = keys.slice(start)
        rows = pa.table({n: random_array(rng, t, len(part)) for n, t in columns.items()}, schema=schema.value)
        batch = batch_of(schema, part)
        table.put(batch, rows)
        state.commit()
        got = table.get(batch_of(schema, part))
        assert got.found.all()
        assert rows_of(batch.columns, got.values) == rows_of(batch.columns, rows)
        normal = [[0.0 if v == 0 else v for v in column.to_pylist()] for column in part.columns]
        normal_keys = pa.Table.from_arrays(
            [pa.array(c, f.type) for c, f in zip(normal, schema.primary_key, strict=True)]
            if pa.types.is_floating(key_type)
            else part.columns,
            schema=schema.primary_key,
        )
        expected |= rows_of(normal_keys, rows)
    assert contents(table) == expected
    assert changed(table) == expected
    state.close()
    assert contents(reopen(schema).tables["t"]) == expected


def test_null_is_a_key_and_which_column_is_null_tells_keys_apart(reopen: Open):
    """Their hashes are equal, since a null does not change Spark's; a row of nulls alone is a row all the same."""
    names, value = [(n, pa.string()) for n in "abc"], pa.schema([("v", pa.int64())])
    schema = TableSchema(pa.schema(names[:2]), pa.schema(names[2:]), value)
    keys = [(None, None, None), ("x", None, None), (None, "x", None), (None, None, "x"), ("", None, ""), (None, "", "")]
    named = pa.table([list(column) for column in zip(*keys, strict=True)], schema=schema.primary_key)
    everything = {tuple(map(repr, key)): ("None",) for key in keys}
    batch = batch_of(schema, named)
    assert len(set(batch.hashes.tolist())) < len(keys)
    state = reopen(schema)
    for step in (1, 2):
        state.begin(step, tracking=True)
        batch = batch_of(schema, named)
        assert state.tables["t"].get(batch).found.tolist() == [step == 2] * len(keys)
        state.tables["t"].put(batch, pa.table([pa.nulls(len(keys), pa.int64())], schema=schema.value))
        assert contents(state.tables["t"]) == changed(state.tables["t"]) == everything
        state.commit()
        state = reopen(schema)
    before = state.tables["t"].digests.tolist()
    assert contents(state.tables["t"]) == everything
    state.begin(3, tracking=True)
    state.tables["t"].delete(batch_of(schema, named.slice(0, 1)))
    assert contents(state.tables["t"]) == {key: row for key, row in everything.items() if set(key) != {"None"}}
    assert state.tables["t"].digests.tolist() != before
    state.tables["t"].put(batch_of(schema, named.slice(0, 1)), pa.table([pa.array([7])], schema=schema.value))
    assert contents(state.tables["t"]) == everything | {("None",) * 3: ("7",)}
    state.rollback()
    assert contents(state.tables["t"]) == everything and state.tables["t"].digests.tolist() == before


def test_nan_is_one_key_and_so_is_zero(reopen: Open):
    schema = TableSchema(pa.schema([("k", pa.float64())]), pa.schema([]), pa.schema([("v", pa.float64())]))
    odd_nan = float(np.uint64(0xFFF8000000000123).view(np.float64))
    state = reopen(schema)
    table = state.tables["t"]
    for step, keys in enumerate(([float("nan"), 0.0], [odd_nan, -0.0]), start=1):
        state.begin(step, tracking=True)
        batch = batch_of(schema, pa.table({"k": keys}))
        table.put(batch, pa.table({"v": pa.array([-0.0, float(step)])}))
        state.commit()
    assert contents(table) == {("nan",): ("-0.0",), ("0.0",): ("2.0",)}


def test_composite_keys_with_strings(reopen: Open):
    state = reopen(TEXT)
    table = state.tables["t"]
    keys = pa.table({"k": ["a", "ab", "a", "", "ä"], "year": [1, 1, 1, 1, 2], "position": [1, 1, 2, 0, 5]})
    batch = batch_of(TEXT, keys)
    rows = pa.table(
        {
            "note": ["x", None, "", "long" * 50, "y"],
            "blob": [b"\0", b"", None, b"1", b"2"],
            "flag": [True] * 5,
        },
        schema=TEXT.value,
    )
    state.begin(1, tracking=True)
    table.put(batch, rows)
    shorter = rows.slice(1, 2)
    table.put(batch_of(TEXT, keys.slice(0, 2)), shorter)
    state.commit()
    expected = rows_of(batch.columns, rows) | rows_of(batch.columns.slice(0, 2), shorter)
    assert contents(table) == expected
    state.begin(2, tracking=True)
    table.delete(batch_of(TEXT, keys.slice(1, 3)))
    assert contents(table) == {key: expected[key] for key in list(expected)[:1] + list(expected)[4:]}
    state.rollback()
    assert contents(table) == expected


def test_a_table_may_have_no_values(reopen: Open):
    schema = TableSchema(pa.schema([("k", pa.string())]), pa.schema([]), pa.schema([]))
    state = reopen(schema)
    batch = batch_of(schema, pa.table({"k": ["x", "y"]}))
    state.begin(1, tracking=True)
    nothing = pa.table({"none": pa.nulls(2)}).select([])
    state.tables["t"].put(batch, nothing)
    found = state.tables["t"].get(batch)
    assert found.found.all()
    assert found.values.num_rows == 2
    assert contents(state.tables["t"]) == {("'x'",): (), ("'y'",): ()}


def test_a_large_put_may_have_no_values(reopen: Open):
    schema = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([]))
    state = reopen(schema)
    state.begin(1, tracking=True)
    count = 150_000
    state.tables["t"].put(
        batch_of(schema, pa.table({"k": np.arange(count)})), pa.table({"n": pa.nulls(count)}).select([])
    )
    assert state.tables["t"].rows == count == sum(len(part) for part, _ in state.tables["t"].scan(ALL))


def test_keys_of_equal_hash_are_different_keys(reopen: Open):
    """Collisions are forced: one hash for all, inserted in one batch and in several."""
    state = reopen(TEXT)
    table = state.tables["t"]
    keys = pa.table({"k": [f"k{i // 3}" for i in range(120)], "year": [7] * 120, "position": range(120)})
    rows = pa.table(
        {"note": [str(i) for i in range(120)], "blob": [b""] * 120, "flag": [None] * 120}, schema=TEXT.value
    )
    state.begin(1, tracking=True)
    for start, count in ((0, 40), (20, 60), (60, 60)):
        table.put(batch_of(TEXT, keys.slice(start, count), buckets=1), rows.slice(start, count))
    everything = batch_of(TEXT, keys, buckets=1)
    assert table.get(everything).values.equals(rows)
    state.commit()
    state.begin(2, tracking=True)
    table.delete(batch_of(TEXT, keys.slice(0, 60), buckets=1))
    assert table.get(everything).found.tolist() == [False] * 60 + [True] * 60
    state.rollback()
    assert contents(table) == rows_of(everything.columns, rows)
    state.rollback()
    assert contents(table) == {}
    assert not table.get(everything).found.any()


def test_growth_keeps_every_row(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    rng = np.random.default_rng(5)
    model: dict[int, int] = {}
    for step in range(1, 7):
        state.begin(step, tracking=step % 2 == 0)
        keys = rng.choice(60_000, 12_000, replace=False)
        numbers = rng.integers(0, 2**60, len(keys))
        table.put(longs(*keys), values(*numbers))
        model |= dict(zip(keys.tolist(), numbers.tolist(), strict=True))
        state.commit()
        if step == 4:
            state.rollback()
            state.begin(step, tracking=True)
            table.put(longs(*keys), values(*numbers))
            state.commit()
        if step % 2:
            state.release(step)
            state.close()
            state = reopen()
            table = state.tables["t"]
    assert now(table) == model
    assert table.get(longs(*range(60_000))).found.sum() == len(model)


def test_a_put_after_a_get_of_the_same_batch_sees_what_came_between(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2)
    mine = longs(1, 2, 3)
    assert table.get(mine).found.tolist() == [True, True, False]
    table.delete(longs(1))
    put(state, k3=3)
    assert table.get(mine).found.tolist() == [False, True, True]
    table.put(mine, values(10, 20, 30))
    assert table.get(mine).values.equals(values(10, 20, 30))
    assert now(table) == {1: 10, 2: 20, 3: 30}
    state.commit()
    state.begin(2, tracking=True)
    table.put(mine, values(11, 21, 31))
    state.rollback()
    assert table.get(mine).values.equals(values(10, 20, 30))


@pytest.mark.parametrize("count", [1, 2])
def test_what_get_returned_does_not_change_later(reopen: Open, count: int):
    """One record alone is contiguous in memory, so that a careless copy of it is none."""
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    batch = longs(*range(count))
    table.put(batch, values(*range(1, count + 1)))
    before = table.get(batch).values
    table.put(batch, values(*range(11, count + 11)))
    table.delete(batch)
    assert before.equals(values(*range(1, count + 1)))


def test_an_empty_batch_of_every_type_is_no_error(reopen: Open):
    schema = TableSchema(
        pa.schema([(f"k{i}", kind) for i, kind in enumerate(TYPES)]),
        pa.schema([]),
        pa.schema([(f"v{i}", kind) for i, kind in enumerate(TYPES)]),
    )
    table = (state := reopen(schema)).tables["t"]
    batch = batch_of(schema, schema.primary_key.empty_table())
    state.begin(1, tracking=True)
    table.put(batch, schema.value.empty_table())
    table.delete(batch)
    assert table.get(batch).values.equals(schema.value.empty_table())
    assert (contents(table), changed(table)) == ({}, {})


def test_more_rows_than_are_written_at_once(reopen: Open):
    """Put them without a get and after one, when some exist already, and roll the step back."""
    state = reopen()
    table = state.tables["t"]
    keys = np.random.default_rng(3).permutation(80_000)
    state.begin(1, tracking=True)
    table.put(longs(*keys[:40_000]), values(*keys[:40_000]))
    state.commit()
    state.begin(2, tracking=True)
    table.mark()
    table.put(longs(*keys), values(*(keys + 1)))
    batch = longs(*keys[::2])
    assert table.get(batch).values.equals(values(*(keys[::2] + 1)))
    table.put(batch, values(*(keys[::2] + 2)))
    assert table.get(batch).values.equals(values(*(keys[::2] + 2)))
    wanted = dict(zip(keys.tolist(), (keys + 1 + (np.arange(80_000) % 2 == 0)).tolist(), strict=True))
    assert now(table) == told(table) == wanted
    state.rollback()
    assert now(table) == told(table) == dict(zip(keys[:40_000].tolist(), keys[:40_000].tolist(), strict=True))
