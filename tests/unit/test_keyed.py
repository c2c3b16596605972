"""`KeyedProcessor`: each call is about one key, and the state is that of a Python model, however often it is read."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import BadRow, UsageError
from siltstone.keyed import KeyedProcessor
from siltstone.operator import ListState, MapState, OpaqueState, Operator, Rows, State, ValueState, WindowState
from tests.examples import examples
from tests.subtask import subtask

COMMANDS = ("put", "remove", "map put", "map remove", "append", "clear list", "insert", "evict", "drop", "object")


class Everything(KeyedProcessor):
    """Does what its rows say, and tells the state of each key after each row."""

    name = "everything"
    key = {"k": pa.int64()}  # noqa: RUF012
    output = {"k": pa.int64(), "seen": pa.string()}  # noqa: RUF012
    value = ValueState({"n": pa.int64()})
    map = MapState(key={"m": pa.float64()}, value={"n": pa.int64()})
    log = ListState({"n": pa.int64()})
    window = WindowState({"n": pa.int64()}, order="n")
    object = OpaqueState(dict, lambda d: json.dumps(d, sort_keys=True).encode(), json.loads)

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> Iterator[dict[str, Any]]:
        for row in rows:
            n, entry = row["n"], {"m": row["m"]}
            match row["command"]:
                case "put":
                    state.value.put({"n": n})
                case "remove":
                    state.value.remove()
                case "map put":
                    state.map.put(entry, {"n": n})
                case "map remove":
                    state.map.remove(entry)
                case "append":
                    state.log.append({"n": n})
                case "clear list":
                    state.log.remove()
                case "insert":
                    state.window.insert({"n": n})
                case "evict":
                    state.window.evict(n)
                case "drop":
                    state.window.remove()
                case "object":
                    state.object.get()[str(key[0])] = n
            # An entry of another row, which may not be among those that are read ahead.
            seen = [state.value.get(), state.map.get(entry), state.map.get({"m": 7.0}), state.log.get()]
            yield {"k": key[0], "seen": repr([*seen, state.window.get(), state.object.get().get(str(key[0]))])}


class Model:
    """The state of one key."""

    def __init__(self) -> None:
        self.value, self.map, self.list, self.window, self.object = None, {}, [], [], None

    def take(self, row: dict[str, Any]) -> str:
        n, m = row["n"], "NaN" if row["m"] != row["m"] else row["m"]
        match row["command"]:
            case "put":
                self.value = {"n": n}
            case "remove":
                self.value = None
            case "map put":
                self.map[m] = {"n": n}
            case "map remove":
                self.map.pop(m, None)
            case "append":
                self.list.append({"n": n})
            case "clear list":
                self.list.clear()
            case "insert":
                self.window.append({"n": n})
            case "evict":
                self.window = [each for each in self.window if each["n"] >= n]
            case "drop":
                self.window.clear()
            case "object":
                self.object = n
        window = sorted(self.window, key=lambda each: each["n"])
        return repr([self.value, self.map.get(m), self.map.get(7.0), self.list, window, self.object])


ROW = st.fixed_dictionaries(
    {
        "k": st.integers(0, 2),
        "command": st.sampled_from(COMMANDS),
        "n": st.integers(0, 9),
        "m": st.sampled_from([0.0, -0.0, 7.0, float("nan")]),
    }
)


@settings(max_examples=examples(60))
@given(st.lists(st.lists(ROW, min_size=1, max_size=12), max_size=4))
def test_the_state_of_each_key_is_that_of_a_model(calls: list[list[dict[str, Any]]]) -> None:
    models: dict[int, Model] = defaultdict(Model)
    with subtask(Everything()) as task:
        for rows in calls:
            told = task.process(pa.Table.from_pylist(rows)).to_pylist()
            for key in {row["k"] for row in rows}:
                wanted = [models[key].take(row) for row in rows if row["k"] == key]
                assert [row["seen"] for row in told if row["k"] == key] == wanted
        assert task.state.tables["value"].rows == sum(model.value is not None for model in models.values())
        assert task.state.tables["map"].rows == sum(len(model.map) for model in models.values())
        assert task.state.tables["window"].rows == sum(len(model.window) for model in models.values())


def test_evicting_again_keeps_rows_inserted_after_a_higher_limit() -> None:
    commands = [("insert", 5), ("evict", 9), ("insert", 3), ("insert", 1), ("evict", 2)]
    with subtask(Everything()) as task:
        rows = [{"k": 1, "command": command, "n": n, "m": 0.0} for command, n in commands]
        task.process(pa.Table.from_pylist(rows))
        told = task.process(pa.Table.from_pylist([{"k": 1, "command": "append", "n": 0, "m": 0.0}]))
        assert "[{'n': 0}], [{'n': 3}]" in told["seen"][0].as_py()


class Spenders(Operator):
    """Adds up; all keys at once."""

    name = "spenders"
    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        state.totals.put(rows.keys, {"n": rows.sum("n", initial=state.totals.get(rows.keys)["n"])})


class SpendersByKey(KeyedProcessor):
    """Adds up; one key at a time."""

    name = "spenders"
    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState({"n": pa.int64()})

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
        old = state.totals.get()
        state.totals.put({"n": sum(row["n"] for row in rows) + (old["n"] if old else 0)})


def test_state_is_that_of_the_same_logic_for_all_keys_at_once() -> None:
    with subtask(Spenders()) as one, subtask(SpendersByKey()) as other:
        for seed in range(3):
            rows = pa.table({"k": [n * seed % 5 for n in range(20)], "n": list(range(20))})
            assert one.process(rows) is None and other.process(rows) is None
        assert Spenders().definition() == SpendersByKey().definition()
        assert one.state.tables["totals"].digests.tolist() == other.state.tables["totals"].digests.tolist()


class Faulty(SpendersByKey):
    """Does what it is told by the first row."""

    output = {"n": pa.int64()}  # noqa: RUF012

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> Any:
        return {
            13: lambda: bad([row["n"] == 13 for row in rows]),
            14: lambda: bad(None),
            15: lambda: state.totals.put({"m": 1}),
            16: lambda: state.totals.put({"n": "x"}),
            17: lambda: [{"m": 1}],
            18: lambda: state.nothing,
        }.get(max(row["n"] for row in rows), lambda: None)()


def bad(rows: list[bool] | None) -> None:
    raise BadRow("unlucky", rows=rows)


@pytest.mark.parametrize(("n", "wanted"), [(13, [False, True, False]), (14, [True, True, False])])
def test_bad_rows_of_a_key_are_named_among_those_of_the_call(n: int, wanted: list[bool]) -> None:
    with subtask(Faulty()) as task, pytest.raises(BadRow, match="unlucky") as caught:
        task.process({"k": [1, 1, 2], "n": [1, n, 2]})
    assert caught.value.rows.tolist() == wanted


@pytest.mark.parametrize(
    ("n", "error", "said"),
    [
        (15, UsageError, "totals: columns m were given: it has n"),
        (16, UsageError, "totals: a value does not fit"),
        (17, UsageError, "the output of operator spenders: columns m were given: it has n"),
        (18, AttributeError, "operator spenders has no variable 'nothing'"),
    ],
)
def test_mistakes_are_said_and_change_nothing(n: int, error: type[Exception], said: str) -> None:
    with subtask(Faulty()) as task:
        with pytest.raises(error, match=said):
            task.process({"k": [1], "n": [n]})
        assert task.dump("totals") == []


class Tags(KeyedProcessor):
    """Changes what it was given and what it put, without putting it again."""

    name = "tags"
    key = {"k": pa.int64()}  # noqa: RUF012
    output = {"k": pa.int64(), "seen": pa.string()}  # noqa: RUF012
    value = ValueState({"tags": pa.list_(pa.string())})
    map = MapState({"m": pa.string()}, {"place": pa.struct([("city", pa.string())])})

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> Iterator[dict[str, Any]]:
        for row in rows:
            value = state.value.get() or {"tags": []}
            value["tags"].append(row["tag"])
            state.value.put(value)
            value["tags"].append("lost")
            state.value.get()["tags"].clear()
            place = {"place": {"city": row["tag"]}}
            state.map.put({"m": "a"}, place)
            place["place"]["city"] = state.map.get({"m": "a"})["place"]["city"] = "lost"
            yield {"k": key[0], "seen": repr([state.value.get(), state.map.get({"m": "a"})])}


def test_changing_a_nested_value_that_was_got_or_put_changes_no_state() -> None:
    seen = []
    with subtask(Tags()) as task:
        for tags in (["a", "b"], ["c"]):
            rows = pa.table({"k": pa.array([1] * len(tags), pa.int64()), "tag": tags})
            seen += task.process(rows).column("seen").to_pylist()
    expected = [["a"], ["a", "b"], ["a", "b", "c"]]
    assert seen == [repr([{"tags": tags}, {"place": {"city": tags[-1]}}]) for tags in expected]
