"""What a user writes: declarations and their checks, rows and keys, and each kind of variable on the heap."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import BadRow, StateError, UsageError
from siltstone.model import KeyGroupRange
from siltstone.operator import (
    ListState,
    MapState,
    OpaqueState,
    Operator,
    Rows,
    State,
    ValueState,
    WindowState,
)
from siltstone.state.backends.heap import HeapBackend
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.protocol import apply_delta, get_delta, get_state, set_state
from tests.subtask import subtask

MOMENT = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)


class Everything(Operator):
    name = "everything"
    key = {"plane": pa.string(), "year": pa.int16()}  # noqa: RUF012
    totals = ValueState(value={"flights": pa.int64(), "note": pa.string()})
    routes = MapState(key={"route": pa.float64()}, value=pa.schema([("flown", pa.int64())]))
    log = ListState(value={"event": pa.string()})
    week = WindowState(value={"at": pa.timestamp("us", "UTC"), "delay": pa.int32()}, order="at")
    seen = OpaqueState(create=list, serialize=bytes, deserialize=list)


def keys_of(task, *planes):
    """Keys in the order given; the engine's own order is by hash."""
    rows = task.rows({"plane": list(planes), "year": [2013] * len(planes)})
    where = [int(np.flatnonzero(np.array(rows.keys.columns["plane"].to_pylist()) == p)[0]) for p in planes]
    return type(rows.keys)(
        rows.keys.columns.take(pa.array(where)), rows.keys.hashes[where], rows.keys.key_groups[where]
    )


def entries(planes, routes):
    """Entries of the map `routes`, by the letters of planes."""
    return {"plane": list(planes), "year": [2013] * len(planes), "route": routes}


def lists(keys, at, table):
    """plane -> rows as tuples."""
    found = {plane: [] for plane in keys.columns["plane"].to_pylist()}
    for i, row in zip(at.tolist(), table.to_pylist(), strict=True):
        found[keys.columns["plane"][i].as_py()].append(tuple(row.values()))
    return found


@pytest.fixture
def task():
    with subtask(Everything()) as opened:
        yield opened


# Declarations


def test_variables_and_their_tables():
    operator = Everything()
    assert list(operator.variables()) == ["totals", "routes", "log", "week", "seen"]
    tables = operator.tables()
    assert list(tables) == ["totals", "routes", "log", "log.bounds", "week", "week.bounds"]
    assert tables["log"].primary_key.names == ["plane", "year", "position"]
    assert tables["log.bounds"].value.names == ["head", "tail"]
    assert tables["routes"].subkey.names == ["route"]
    assert operator.opaque_variables() == ("seen",)
    never_null = [pa.field("plane", pa.string(), nullable=False), pa.field("year", pa.int16(), nullable=False)]
    assert operator.key == pa.schema(never_null)
    assert operator.definition()["key"] == [["plane", "string"], ["year", "int16"]]
    assert operator.definition()["variables"]["seen"] == {"kind": "OpaqueState", "tables": {}}
    assert operator.definition()["variables"]["week"]["tables"].keys() == {"week", "week.bounds"}


def test_fields_may_be_given_to_the_constructor_and_variables_inherited():
    class More(Everything):
        extra = ValueState(value={"x": pa.int64()})
        log = ListState(value={"other": pa.int64()})

    operator = More(name="more", reads="everything", order_by=["at"], inputs=("at",), output={"x": pa.int64()})
    assert list(operator.variables()) == ["totals", "routes", "log", "week", "seen", "extra"]
    assert operator.tables()["log"].value.names == ["other"]
    assert (operator.name, operator.reads, operator.order_by) == ("more", "everything", ("at",))
    assert operator.output == pa.schema([("x", pa.int64())])
    assert Everything().output is None


@pytest.mark.parametrize(
    ("fields", "variables", "message"),
    [
        ({"name": "Bad"}, {}, "'Bad' is not a operator name"),
        ({"reads": "no such"}, {}, "'no such' is not a source or operator name"),
        ({"key": {}}, {}, "at least one key column"),
        ({"key": ["plane"]}, {}, "the key of operator o must be a pyarrow schema"),
        ({"key": {"k": pa.list_(pa.int64())}}, {}, "operator o: column k has type list"),
        ({"order_by": "at"}, {}, "order_by of operator o must be a tuple"),
        ({"colour": "red"}, {}, "no field colour"),
        ({}, {"V": ValueState({"x": pa.int64()})}, "'V' is not a variable name"),
        ({}, {"flush": ValueState({"x": pa.int64()})}, "'flush' cannot be the name"),
        ({}, {"close": ValueState({"x": pa.int64()})}, "'close' cannot be the name"),
        ({"combined": ["k"]}, {}, "the combined columns of operator o must be a pyarrow schema"),
        ({"combined": {"n": pa.int64()}, "order_by": ("t",)}, {}, "operator o: combined lacks k, t, a column of"),
        ({"combined": {"k": pa.int64()}}, {}, "operator o has combined columns, so it needs a method combine"),
        ({}, {"v": ValueState({"k": pa.int64()})}, "operator o: column names must be distinct"),
        ({}, {"v": ValueState({"x": "int64"})}, "the value of v must be a pyarrow schema"),
        ({}, {"v": MapState(key={}, value={"x": pa.int64()})}, "at least one map key column"),
        ({}, {"v": WindowState({"x": pa.int64()}, order="t")}, "ordered by 't'"),
        ({}, {"v": WindowState({"x": pa.string()}, order="x")}, "cannot be ordered by x of type string"),
        (
            {"key": {"position": pa.int64()}},
            {"v": ListState({"x": pa.int64()})},
            "distinct: position, position",
        ),
    ],
)
def test_a_wrong_definition_is_refused(fields, variables, message):
    body = variables or {"v": ValueState({"x": pa.int64()})}
    kind = type("Wrong", (Operator,), {"name": "o", "key": {"k": pa.int64()}, **body})
    with pytest.raises(UsageError, match=message):
        kind(**fields)


# Rows


def test_rows_know_their_keys(task):
    rows = task.rows({"plane": ["b", "a", "b"], "year": [1, 1, 1], "delay": [5, 6, 7]})
    assert len(rows) == 3
    assert rows.table.schema.field("year").type == pa.int16()
    assert rows.keys.columns["plane"].take(pa.array(rows.key_index)).to_pylist() == ["b", "a", "b"]
    assert rows.keys.hashes[rows.key_index].tolist() == rows.hashes.tolist()
    assert rows.hashes.tolist() == xxhash64(rows.table.select(["plane", "year"]).columns).tolist()
    assert rows.key_groups.tolist() == key_groups(rows.hashes, 8).tolist()
    assert rows.keys.key_groups[rows.key_index].tolist() == rows.key_groups.tolist()


def test_float_keys_are_normalised_in_the_rows():
    operator = type("O", (Operator,), {"name": "o", "key": {"k": pa.float32()}, "v": ValueState({"x": pa.int8()})})()
    rows = Rows.make(operator, pa.table({"k": [0.0, -0.0, float("nan"), -float("nan")]}), None, 4)
    assert rows.table["k"].to_numpy().view(np.uint32).tolist() == [0, 0, 0x7FC00000, 0x7FC00000]
    assert len(rows.keys) == 2


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"plane": ["a", None, None], "year": [1, 1, 1]}, BadRow, "key column plane is null in 2 of 3 rows"),
        ({"year": [1]}, UsageError, "key column plane is missing in source"),
        ({"plane": ["a"], "year": [70_000]}, UsageError, "key column year is not int16"),
    ],
)
def test_rows_without_a_good_key_are_refused(task, columns, error, message):
    with pytest.raises(error, match=message):
        task.rows(columns)


# Variables


def test_value_state(task):
    keys = keys_of(task, "a", "b", "c")
    task.run(lambda s: s.totals.put(keys, {"note": ["x", None, "z"], "flights": np.array([1, 2, 3])}))
    task.run(lambda s: s.totals.delete(keys_of(task, "b", "q")))
    task.run(lambda s: s.totals.put(keys_of(task, "c"), {"flights": [9], "note": pa.array(["n"])}))
    keys = keys_of(task, "c", "q", "b", "a")
    got, found = task.run(lambda s: (s.totals.get(keys), s.totals.contains(keys)))
    assert got.to_pydict() == {"flights": [9, None, None, 1], "note": ["n", None, None, "x"]}
    assert found.tolist() == [True, False, False, True]


def test_values_that_do_not_fit_are_refused_and_change_nothing(task):
    keys = keys_of(task, "a", "b")
    for columns, message in [
        ({"flights": [1, 2]}, "totals: column note is missing"),
        ({"flights": [1], "note": ["x"]}, "totals: 1 rows were given for 2 keys"),
        ({"flights": ["x", "y"], "note": ["x", "y"]}, "totals: column flights does not fit int64"),
        ({"flights": [1.5, 2.0], "note": ["x", "y"]}, "totals: column flights does not fit int64"),
    ]:
        with pytest.raises(UsageError, match=message):
            State(task.operator, task.state).totals.put(keys, columns)
    assert task.dump("totals") == []


def test_map_state_newest_of_several_wins(task):
    routes = entries("abaa", [0.0, 1.0, -0.0, 2.0])
    task.run(lambda s: s.routes.put({**routes, "flown": [1, 2, 3, 4], "left alone": [None] * 4}))
    got = task.run(lambda s: s.routes.get(entries("baaba", [0.0, 0.0, 2.0, 1.0, 0.0])))
    assert got["flown"].to_pylist() == [None, 3, 4, 2, 3]
    task.run(lambda s: s.routes.delete(pa.record_batch(entries("aab", [0.0, 0.0, 5.0]))))
    found = task.run(lambda s: s.routes.contains(routes))
    assert found.tolist() == [False, True, False, True]
    assert {(r["plane"], r["route"], r["flown"]) for r in task.dump("routes")} == {
        ("b", 1.0, 2),
        ("a", 2.0, 4),
    }


def test_a_null_map_key_is_refused(task):
    with pytest.raises(BadRow, match="routes: map key route is null in 1 rows"):
        task.run(lambda s: s.routes.put({**entries("a", [None]), "flown": [1]}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plane": None}, "routes: column plane is missing"),
        ({"plane": [None, "b"]}, "routes: key column plane is null in 1 entries"),
        ({"year": [70_000, 1]}, "routes: column year does not fit int16"),
        ({"flown": None}, "routes: column flown is missing"),
    ],
)
def test_entries_that_do_not_fit_are_refused_and_change_nothing(task, changed, said):
    given = {**entries("ab", [1.0, 2.0]), "flown": [1, 2], **changed}
    with pytest.raises(UsageError, match=said):
        State(task.operator, task.state).routes.put({n: values for n, values in given.items() if values is not None})
    assert task.dump("routes") == []


def test_entries_of_another_subtask_are_refused_and_change_nothing(tmp_path):
    one = HeapBackend().open(tmp_path, Everything().tables(), ("seen",), KeyGroupRange(0, 1), 128)
    one.begin(1, tracking=True)
    given = entries("abcdefgh", [1.0] * 8)
    with pytest.raises(UsageError, match="routes: entries of keys of another subtask"):
        State(Everything(), one).routes.put({**given, "flown": [1] * 8})
    assert one.tables["routes"].rows == 0
    one.close()


def test_list_state_keeps_order_and_positions(task):
    keys = keys_of(task, "a", "b", "c")
    task.run(lambda s: s.log.append(keys, np.array([2, 0, 2, 0]), {"event": ["c1", "a1", "c2", "a2"]}))
    task.run(lambda s: s.log.append(keys, np.array([0, 1]), {"event": ["a3", "b1"]}))
    at, rows = task.run(lambda s: s.log.get(keys))
    expected = {"a": [("a1",), ("a2",), ("a3",)], "b": [("b1",)], "c": [("c1",), ("c2",)]}
    assert lists(keys, at, rows) == expected
    assert at.tolist() == sorted(at.tolist())
    task.run(lambda s: s.log.delete(keys_of(task, "a", "zz")))
    at, rows = task.run(lambda s: s.log.get(keys))
    assert lists(keys, at, rows) == {**expected, "a": []}
    assert {r["plane"] for r in task.dump("log.bounds")} == {"b", "c"}
    task.run(lambda s: s.log.append(keys, np.array([], np.int64), {"event": pa.array([], pa.string())}))
    task.run(lambda s: s.log.append(keys, np.array([0]), {"event": [None]}))
    assert [r for r in task.dump("log") if r["plane"] == "a"] == [
        {"plane": "a", "year": 2013, "position": 0, "event": None}
    ]


def hours(*numbers):
    return [MOMENT + dt.timedelta(hours=n) for n in numbers]


def test_window_state_slides(task):
    keys = keys_of(task, "a", "b", "c")
    task.run(
        lambda s: s.week.insert(keys, np.array([0, 0, 1, 0]), {"at": hours(5, 1, 2, 3), "delay": [50, 10, 20, None]})
    )
    at, rows = task.run(lambda s: s.week.get(keys))
    assert lists(keys, at, rows)["a"] == list(zip(hours(1, 3, 5), [10, None, 50], strict=True))
    task.run(lambda s: s.week.evict(keys, MOMENT + dt.timedelta(hours=3)))
    at, rows = task.run(lambda s: s.week.get(keys))
    assert lists(keys, at, rows) == {"a": list(zip(hours(3, 5), [None, 50], strict=True)), "b": [], "c": []}
    bounds = {r["plane"]: (r["head"], r["tail"]) for r in task.dump("week.bounds")}
    assert bounds == {"a": (0, 3), "b": (1, 1)}
    # A limit of its own for each key; null keeps everything.
    task.run(lambda s: s.week.insert(keys, np.array([1, 2]), {"at": hours(7, 8), "delay": [1, 2]}))
    task.run(lambda s: s.week.evict(keys, pa.array([*hours(4, 8), None], pa.timestamp("us", "UTC"))))
    at, rows = task.run(lambda s: s.week.get(keys))
    assert lists(keys, at, rows) == {"a": [(*hours(5), 50)], "b": [], "c": [(*hours(8), 2)]}
    # Positions are not used again until the key is deleted.
    task.run(lambda s: s.week.insert(keys, np.array([1]), {"at": hours(9), "delay": [3]}))
    assert [r["position"] for r in task.dump("week") if r["plane"] == "b"] == [2]
    task.run(lambda s: s.week.delete(keys))
    assert task.dump("week") == task.dump("week.bounds") == []


def test_window_state_refuses_what_has_no_place_in_the_order(task):
    keys = keys_of(task, "a", "b")
    with pytest.raises(BadRow, match="week: column at orders the window and is null in 1 rows"):
        task.run(lambda s: s.week.insert(keys, np.array([0]), {"at": [None], "delay": [1]}))
    state = State(task.operator, task.state)
    with pytest.raises(UsageError, match="week: evict was given 1 limits for 2 keys"):
        state.week.evict(keys, hours(1))
    with pytest.raises(UsageError, match=r"week: evict needs timestamp\[us, tz=UTC\] to compare with at"):
        state.week.evict(keys, "yesterday")
    with pytest.raises(UsageError, match=r"week: evict needs timestamp\[us, tz=UTC\] to compare with at"):
        state.week.evict(keys, 1.5)


def test_opaque_state_saves_what_changed(task):
    task.run(lambda s: s.seen[3].append(7))
    assert dict(task.state.opaque["seen"]) == {3: b"\x07"}

    def more(state):
        state.seen[3].append(8)
        assert state.seen[3] == [7, 8]
        state.seen[5] = [1]
        assert 5 in state.seen
        assert 4 not in state.seen
        assert list(state.seen) == [3, 5]
        assert len(state.seen) == 2

    task.run(more)
    assert dict(task.state.opaque["seen"]) == {3: b"\x07\x08", 5: b"\x01"}
    with pytest.raises(UsageError, match="key group 8 is not of this subtask, which has 0 to 7"):
        State(task.operator, task.state).seen[8]


def test_opaque_state_that_is_not_bytes_is_refused():
    body = {"name": "o", "key": {"k": pa.int64()}, "s": OpaqueState(dict, str, dict)}
    with (
        subtask(type("O", (Operator,), body)()) as task,
        pytest.raises(UsageError, match="s: serialize returned str"),
    ):
        task.run(lambda s: s.s[0])


def test_an_unknown_variable_is_named(task):
    with pytest.raises(AttributeError, match="operator everything has no variable 'nothing'"):
        State(task.operator, task.state).nothing  # noqa: B018


def test_an_operator_without_process_says_so(task):
    with pytest.raises(NotImplementedError, match="everything does not define process"):
        task.process({"plane": ["a"], "year": [1]})


# The engine's four calls


def test_full_state_and_deltas_carry_over(task):
    keys = keys_of(task, *"abcdefgh")
    at = np.repeat(np.arange(8), 2)
    task.run(lambda s: s.log.append(keys, at, {"event": [str(i) for i in range(16)]}))
    with subtask(Everything()) as other:

        def copy(_):
            for table in ("log", "log.bounds"):
                for rows, owners in get_state(task.state, table, task.state.groups):
                    set_state(other.state, table, rows, owners)

        other.run(copy)
        assert sorted(map(str, other.dump("log"))) == sorted(map(str, task.dump("log")))
        task.run(lambda _: [table.mark() for table in task.state.tables.values()])
        task.run(lambda s: (s.log.delete(keys_of(task, "a")), s.log.append(keys, at[4:6], {"event": ["x", "y"]})))

        def follow(_):
            for table in ("log", "log.bounds"):
                changes, groups = get_delta(task.state, table)
                apply_delta(other.state, table, changes, groups if table == "log" else None)

        other.run(follow)
        for table in task.state.tables:
            assert other.state.tables[table].digests.tolist() == task.state.tables[table].digests.tolist()
        assert other.state.tables["log"].rows == 16
    some, _ = next(get_state(task.state, "log", KeyGroupRange(0, 8)))
    with pytest.raises(StateError, match="state table 'nothing' does not exist"):
        set_state(task.state, "nothing", some)
    with pytest.raises(StateError, match="do not belong to a subtask that has 0 to 7"):
        set_state(task.state, "log", some, np.full(len(some), 9, np.uint16))
