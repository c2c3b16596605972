"""What every working-state backend must do, whatever its technique."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import BadRow, StateError, UsageError
from siltstone.model import KeyGroupRange
from siltstone.restore.restore import digests_of
from siltstone.run.task import identity
from siltstone.state.backend import Backend, Keys, StateTable, SubtaskState
from siltstone.state.backends.named import BACKENDS, backend
from siltstone.state.schema import TableSchema
from tests.arrow_strategies import TYPES, random_array
from tests.state_model import ALL, MAX_PARALLELISM, batch_of, changed, contents, rows_of

LONG = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", pa.int64())]))
TEXT = TableSchema(
    pa.schema([("k", pa.string()), ("year", pa.int16())]),
    pa.schema([("position", pa.int64())]),
    pa.schema([("note", pa.string()), ("blob", pa.binary()), ("flag", pa.bool_())]),
)
Open = Callable[..., SubtaskState]


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> Backend:
    return backend(request.param)


@pytest.fixture
def reopen(kind: Backend, tmp_path: Path) -> Open:
    def opener(schema: TableSchema = LONG, opaque: tuple[str, ...] = ("model",), groups: KeyGroupRange = ALL):
        return kind.open(tmp_path / "state", {"t": schema}, opaque, groups, MAX_PARALLELISM)

    return opener


def longs(*keys: int) -> Keys:
    return batch_of(LONG, pa.table({"k": pa.array(keys, pa.int64())}))


def values(*numbers: int | None) -> pa.Table:
    return pa.table({"v": pa.array(numbers, pa.int64())}, schema=LONG.value)


def put(state: SubtaskState, **rows: int | None) -> None:
    """Put rows named k<number>."""
    state.tables["t"].put(longs(*(int(name[1:]) for name in rows)), values(*rows.values()))


def now(table: StateTable) -> dict[int, int | None]:
    return {int(key[0]): None if row[0] == "None" else int(row[0]) for key, row in contents(table).items()}


def told(table: StateTable) -> dict[int, int | None]:
    return {int(key[0]): None if row is None else int(row[0]) for key, row in changed(table).items()}


def test_an_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="no state backend 'papyrus': use one of heap"):
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
    raw = random_array(rng, key_type, 300).drop_null()
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


def test_rollback_undoes_steps_newest_first(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    versions = [(now(table), table.digests.tolist())]
    for step, rows in ((1, {"k1": 1, "k2": 2}), (2, {"k1": 11, "k3": 3}), (5, {"k2": 22, "k4": 4})):
        state.begin(step, tracking=True)
        put(state, **rows)
        table.delete(longs(3 if step == 5 else 9))
        table.put(longs(1), values(step))
        state.commit()
        versions.append((now(table), table.digests.tolist()))
    assert state.version == 5
    state.begin(6, tracking=True)
    put(state, k7=7)
    for version, wanted in ((5, 3), (2, 2), (1, 1), (0, 0)):
        state.rollback()
        assert state.version == version
        assert (now(table), table.digests.tolist()) == versions[wanted]
        state.close()
        state = reopen()
        table = state.tables["t"]
        assert (now(table), table.digests.tolist()) == versions[wanted]
    with pytest.raises(StateError, match="step 0 are gone"):
        state.rollback()


def test_release_lets_before_images_go(reopen: Open):
    state = reopen()
    for step in (1, 2, 3):
        state.begin(step, tracking=True)
        put(state, k1=step)
        state.commit()
    state.release(2)
    state.close()
    state = reopen()
    state.rollback()
    assert (state.version, now(state.tables["t"])) == (2, {1: 2})
    with pytest.raises(StateError, match="step 2 are gone"):
        state.rollback()
    assert (state.version, now(state.tables["t"])) == (2, {1: 2})


def test_a_step_that_was_not_committed_is_gone_at_open(reopen: Open):
    state = reopen()
    state.begin(1, tracking=True)
    put(state, k1=1)
    state.set_opaque("model", {3: b"one"})
    state.commit()
    state.begin(2, tracking=True)
    put(state, k1=2, k2=2)
    state.set_opaque("model", {3: b"two"})
    state.close()
    state = reopen()
    assert (state.version, now(state.tables["t"])) == (1, {1: 1})
    assert state.opaque == {"model": {3: b"one"}}
    assert told(state.tables["t"]) == {1: 1}


def test_a_step_run_again_yields_the_same(reopen: Open):
    state = reopen()
    outcomes = []
    for _ in range(3):
        state.begin(1, tracking=True)
        put(state, k1=1, k2=2)
        state.tables["t"].delete(longs(2))
        outcomes.append((told(state.tables["t"]), state.tables["t"].digests.tolist()))
        state.commit()
        state.rollback()
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_changes_tell_each_key_once_and_newest(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2, k3=3)
    put(state, k1=11, k4=4)
    assert told(table) == {1: 11, 2: 2, 3: 3, 4: 4}
    table.mark()
    assert told(table) == {}
    state.commit()
    state.begin(2, tracking=True)
    put(state, k1=12)
    table.delete(longs(2, 77))
    state.commit()
    state.release(2)
    state.close()
    state = reopen()
    table = state.tables["t"]
    state.begin(3, tracking=True)
    put(state, k1=13, k5=5)
    assert told(table) == {1: 13, 2: None, 5: 5}
    state.rollback()
    assert told(table) == {1: 12, 2: None}


def test_a_mark_is_undone_with_its_step(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1)
    state.commit()
    for how in ("open", "committed", "torn"):
        state.begin(2, tracking=True)
        put(state, k2=2)
        table.mark()
        put(state, k3=3)
        assert told(table) == {3: 3}
        if how == "committed":
            state.commit()
        if how == "torn":
            state.close()
            state = reopen()
            table = state.tables["t"]
        else:
            state.rollback()
        assert told(table) == {1: 1}


def test_changes_made_untracked_are_not_known(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=False)
    put(state, k1=1)
    for ask in (table.changes, table.changed):
        with pytest.raises(StateError, match="take a base"):
            ask()
    state.commit()
    state.begin(2, tracking=True)
    put(state, k2=2)
    with pytest.raises(StateError, match="take a base"):
        table.changes()
    table.mark()
    put(state, k3=3)
    assert told(table) == {3: 3}
    state.commit()
    state.begin(3, tracking=False)
    put(state, k4=4)
    # A base is taken at the end of the step, and the next interval is tracked from its first change on.
    table.mark()
    state.commit()
    state.begin(4, tracking=True)
    put(state, k5=5)
    assert told(table) == {5: 5}
    state.rollback()
    state.rollback()
    assert told(table) == {3: 3}


def test_scan_is_in_order_and_of_the_groups_asked_for(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=False)
    keys = np.random.default_rng(1).permutation(300_000)[:200_000] - 150_000
    table.put(longs(*keys), values(*keys))
    table.delete(longs(*keys[:1000]))
    state.commit()
    everything = []
    for part, groups in table.scan(ALL):
        assert len(part) <= 1 << 17
        everything += list(zip(groups.tolist(), part.column("k").to_pylist(), strict=True))
    assert everything == sorted(everything)
    assert sorted(key for _, key in everything) == sorted(keys[1000:].tolist())
    middle = KeyGroupRange(3, 6)
    some = [k for part, _ in table.scan(middle) for k in part.column("k").to_pylist()]
    assert some == [key for group, key in everything if group in middle]
    assert list(table.scan(KeyGroupRange(5, 5))) == []


def test_opaque_values_belong_to_the_step(reopen: Open):
    state = reopen()
    state.begin(1, tracking=True)
    state.set_opaque("model", {1: b"a", 2: b"b"})
    state.commit()
    state.begin(2, tracking=True)
    state.set_opaque("model", {2: b"B", 3: b""})
    assert state.opaque["model"] == {1: b"a", 2: b"B", 3: b""}
    state.commit()
    state.close()
    state = reopen()
    assert state.opaque["model"] == {1: b"a", 2: b"B", 3: b""}
    state.rollback()
    assert state.opaque["model"] == {1: b"a", 2: b"b"}
    state.begin(2, tracking=True)
    with pytest.raises(UsageError, match="no opaque variable 'other'"):
        state.set_opaque("other", {1: b""})
    with pytest.raises(UsageError, match="key group 16 belongs to another subtask"):
        state.set_opaque("model", {MAX_PARALLELISM: b""})
    state.rollback()
    state.rollback()
    assert state.opaque["model"] == {}


def test_changes_need_a_step_and_steps_follow_one_another(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    for change in (
        lambda: put(state, k1=1),
        table.mark,
        lambda: state.set_opaque("model", {1: b""}),
        state.commit,
    ):
        with pytest.raises(StateError, match="call begin first"):
            change()
    state.begin(3, tracking=True)
    with pytest.raises(StateError, match="step 3 is still open"):
        state.begin(4, tracking=True)
    put(state, k1=1)
    state.commit()
    with pytest.raises(StateError, match="step 3 is not after version 3"):
        state.begin(3, tracking=True)
    assert now(table) == {1: 1}


def test_bad_input_is_refused_and_changes_nothing(reopen: Open):
    state = reopen(groups=KeyGroupRange(0, 8))
    table = state.tables["t"]
    everyone = [longs(key) for key in range(200)]
    mine = [key for key, batch in enumerate(everyone) if batch.key_groups[0] < 8]
    foreign = next(key for key in range(200) if key not in mine)
    state.begin(1, tracking=True)
    table.put(longs(*mine[:3]), values(1, 2, 3))
    before = (now(table), told(table), table.digests.tolist())
    null = Keys(pa.table({"k": pa.array([None], pa.int64())}), np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    narrow = pa.table({"k": pa.array([1], pa.int32())})
    other = Keys(narrow, np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    uneven = Keys(pa.table({"k": [1, 2]}), np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    for batch, rows, error, text in (
        (longs(foreign), values(1), UsageError, "another subtask"),
        (null, values(1), BadRow, "key column k is null in 1 rows"),
        (other, values(1), UsageError, "k int32: this table has k int64"),
        (uneven, values(1), UsageError, "equally many"),
        (longs(mine[0]), values(1, 2), UsageError, "2 rows of values for 1 keys"),
        (longs(mine[0]), pa.table({"w": [1]}), UsageError, "w int64: this table has v int64"),
    ):
        with pytest.raises(error, match=text):
            table.put(batch, rows)
    for batch in (longs(foreign), null, other, uneven):
        with pytest.raises(UsageError):
            table.get(batch)
        with pytest.raises(UsageError):
            table.delete(batch)
    assert (now(table), told(table), table.digests.tolist()) == before


@pytest.mark.parametrize("what", ["column", "opaque", "groups", "parallelism"])
def test_state_of_another_shape_is_not_opened(reopen: Open, kind: Backend, tmp_path: Path, what: str):
    reopen().close()
    wider = TableSchema(LONG.key, LONG.subkey, pa.schema([*LONG.value, pa.field("w", pa.int64())]))
    with pytest.raises(StateError, match="delete this working state and restore it"):
        kind.open(
            tmp_path / "state",
            {"t": wider if what == "column" else LONG},
            ("other",) if what == "opaque" else ("model",),
            KeyGroupRange(0, 8) if what == "groups" else ALL,
            MAX_PARALLELISM * 2 if what == "parallelism" else MAX_PARALLELISM,
        )


def test_an_empty_batch_is_no_error(reopen: Open):
    state = reopen(TEXT)
    table = state.tables["t"]
    batch = batch_of(TEXT, TEXT.primary_key.empty_table())
    state.begin(1, tracking=True)
    table.put(batch, TEXT.value.empty_table())
    table.delete(batch)
    assert table.get(batch).values.equals(TEXT.value.empty_table())
    assert changed(table) == {}
    assert json.dumps(table.digests.tolist()) == json.dumps([0] * MAX_PARALLELISM)
    state.commit()
    assert state.version == 1


def test_attempts_at_one_version_have_an_identity_each_that_lasts(reopen: Open):
    """It is of what the version holds, opaque values included: a rollback brings the one before back, so does a
    reopening, and an attempt that comes to the same has the same."""

    def attempt(state: SubtaskState, value: int, model: bytes) -> str:
        state.begin(2, tracking=True)
        put(state, k1=value)
        state.set_opaque("model", {0: model})
        state.commit()
        return identity("op", digests_of(state))

    state = reopen()
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2)
    state.commit()
    first = identity("op", digests_of(state))
    found = []
    for value, model in ((5, b"a"), (6, b"a"), (5, b"b"), (5, b"a")):
        found.append(attempt(state, value, model))
        state.close()
        state = reopen()
        assert (state.version, identity("op", digests_of(state))) == (2, found[-1])
        state.rollback()
        assert (state.version, identity("op", digests_of(state))) == (1, first)
    assert found[0] == found[3]
    assert len({first, *found}) == 4
    state.close()
