"""Map, list and window state behave as plain Python dicts and lists do, whatever is done to them."""

from datetime import UTC, date, datetime, timedelta
from math import inf, nan

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.operator import ListState, MapState, Operator, WindowState
from tests.examples import examples
from tests.subtask import subtask


class Model(Operator):
    name = "model"
    key = {"k": pa.int64()}  # noqa: RUF012
    map = MapState(key={"m": pa.string()}, value={"v": pa.int64()})
    list = ListState(value={"v": pa.int64()})
    window = WindowState(value={"t": pa.int32(), "v": pa.int64()}, order="t")


KEYS = 5
number = st.integers(0, 99)
owner = st.integers(0, KEYS - 1)
owners = st.lists(owner, max_size=4)
entry = st.tuples(owner, st.sampled_from("xyz"), number)
row = st.tuples(owner, st.integers(0, 20), number)
action = st.one_of(
    st.tuples(st.just("put"), st.lists(entry, max_size=8)),
    st.tuples(st.just("remove"), st.lists(entry, max_size=4)),
    st.tuples(st.just("append"), st.lists(row, max_size=8)),
    st.tuples(st.just("clear list"), owners),
    st.tuples(st.just("insert"), st.lists(row, max_size=8)),
    st.tuples(st.just("evict"), st.lists(st.tuples(owner, st.integers(0, 22)), max_size=KEYS)),
    st.tuples(st.just("clear window"), owners),
)


def columns(entries, *kinds):
    parts = list(zip(*entries, strict=True)) or [()] * len(kinds)
    return [pa.array(part, kind) for part, kind in zip(parts, kinds, strict=True)]


class Python:
    """The same state as dicts and lists: what each action makes of it."""

    def __init__(self) -> None:
        self.maps = {}
        self.lists = {k: [] for k in range(KEYS)}
        self.windows = {k: [] for k in range(KEYS)}

    def apply(self, name, entries):
        if name == "put":
            self.maps.update({(key, sub): value for key, sub, value in entries})
        elif name == "remove":
            for key, sub, _ in entries:
                self.maps.pop((key, sub), None)
        elif name == "append":
            for key, _, value in entries:
                self.lists[key].append(value)
        elif name == "clear list":
            self.lists.update({key: [] for key in entries})
        elif name == "insert":
            for key, moment, value in entries:
                self.windows[key].append((moment, value))
        elif name == "evict":
            for key, limit in dict(entries).items():
                self.windows[key] = [r for r in self.windows[key] if r[0] >= limit]
        else:
            self.windows.update({key: [] for key in entries})


class Applied:
    """A subtask of the operator, the keys there are, and what each action does to its state."""

    def __init__(self, task) -> None:
        self.task = task
        self.everyone = task.rows({"k": list(range(KEYS))}).keys
        self.ordinal = np.argsort(self.everyone.columns["k"].to_numpy())

    def keys(self, some):
        return self.task.rows({"k": pa.array(sorted(set(some)), pa.int64())}).keys

    def apply(self, state, name, entries):
        if name in ("put", "remove"):
            k, m, v = columns(entries, pa.int64(), pa.string(), pa.int64())
            if name == "put":
                state.map.put({"k": k, "m": m, "v": v})
            else:
                state.map.delete({"k": k, "m": m})
        elif name == "append":
            k, _, v = columns(entries, pa.int64(), pa.int32(), pa.int64())
            state.list.append(self.everyone, self.ordinal[k.to_numpy()], {"v": v})
        elif name == "clear list":
            state.list.delete(self.keys(entries))
        elif name == "insert":
            k, t, v = columns(entries, pa.int64(), pa.int32(), pa.int64())
            state.window.insert(self.everyone, self.ordinal[k.to_numpy()], {"t": t, "v": v})
        elif name == "evict":
            limits = dict(entries)
            keys = self.keys(limits)
            state.window.evict(keys, [limits[key] for key in keys.columns["k"].to_pylist()])
        else:
            state.window.delete(self.keys(entries))

    def check(self, model: Python) -> None:
        """Reads bring what the model has."""
        pairs = [(k, m) for k in range(KEYS) for m in "xyz"]
        found, (list_at, listed), (window_at, windowed) = self.task.run(
            lambda state: (
                state.map.get({"k": [k for k, _ in pairs], "m": [m for _, m in pairs]}),
                state.list.get(self.everyone),
                state.window.get(self.everyone),
            )
        )
        assert found["v"].to_pylist() == [model.maps.get(pair) for pair in pairs]
        for k in range(KEYS):
            mine = pa.array(np.flatnonzero(list_at == self.ordinal[k]))
            assert listed["v"].take(mine).to_pylist() == model.lists[k]
            mine = pa.array(np.flatnonzero(window_at == self.ordinal[k]))
            taken = windowed.take(mine).to_pydict()
            expected = sorted(model.windows[k], key=lambda r: r[0])
            assert list(zip(taken["t"], taken["v"], strict=True)) == expected


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.lists(st.lists(action, max_size=4), max_size=6))
def test_state_equals_a_python_model(steps):
    model = Python()
    with subtask(Model(), max_parallelism=4) as task:
        applied = Applied(task)
        for actions in steps:
            task.run(lambda state, actions=actions: [applied.apply(state, *one) for one in actions])
            for one in actions:
                model.apply(*one)
            applied.check(model)
        assert task.state.tables["map"].rows == len(model.maps)
        assert task.state.tables["list"].rows == sum(map(len, model.lists.values()))
        assert task.state.tables["window"].rows == sum(map(len, model.windows.values()))


DAY, TIME = date(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "inserted", "expected"),
    [
        (pa.float64(), [nan, 1.5, -inf, 0.0, -0.0], [2, 3, 4, 1, 0]),
        (pa.float32(), [nan, 1.5, -inf, 0.0, -0.0], [2, 3, 4, 1, 0]),
        (pa.uint64(), [2**64 - 1, 5, 2**63, 5], [1, 3, 2, 0]),
        (pa.int64(), [2**63 - 1, 5, -(2**63), 5], [2, 1, 3, 0]),
        (pa.date32(), [DAY, DAY - timedelta(1), DAY], [1, 0, 2]),
        (pa.timestamp("us", "UTC"), [TIME, TIME - timedelta(1), TIME], [1, 0, 2]),
    ],
    ids=str,
)
def test_a_window_is_in_the_order_of_whatever_may_order_it(kind, inserted, expected):
    class Ordered(Operator):
        name = "ordered"
        key = pa.schema({"k": pa.int64()})
        window = WindowState(value={"t": kind, "v": pa.int64()}, order="t")

    with subtask(Ordered(), max_parallelism=4) as task:
        keys = task.rows({"k": [1]}).keys
        at, moments = np.zeros(len(inserted), np.int64), pa.array(inserted, kind)
        task.run(lambda state: state.window.insert(keys, at, {"t": moments, "v": list(range(len(at)))}))
        assert task.run(lambda state: state.window.get(keys))[1]["v"].to_pylist() == expected
