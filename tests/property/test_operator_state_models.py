"""Map, list and window state behave as plain Python dicts and lists do, whatever is done to them."""

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


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.lists(st.lists(action, max_size=4), max_size=6))
def test_state_equals_a_python_model(steps):
    maps, lists, windows = {}, {k: [] for k in range(KEYS)}, {k: [] for k in range(KEYS)}
    with subtask(Model(), max_parallelism=4) as task:
        everyone = task.rows({"k": list(range(KEYS))}).keys
        ordinal = np.argsort(everyone.columns["k"].to_numpy())

        def batch(some):
            return task.rows({"k": pa.array(sorted(set(some)), pa.int64())}).keys

        def apply(state, name, entries):
            if name in ("put", "remove"):
                k, m, v = columns(entries, pa.int64(), pa.string(), pa.int64())
                if name == "put":
                    state.map.put({"k": k, "m": m, "v": v})
                    maps.update({(key, sub): value for key, sub, value in entries})
                else:
                    state.map.delete({"k": k, "m": m})
                    for key, sub, _ in entries:
                        maps.pop((key, sub), None)
            elif name == "append":
                k, _, v = columns(entries, pa.int64(), pa.int32(), pa.int64())
                state.list.append(everyone, ordinal[k.to_numpy()], {"v": v})
                for key, _, value in entries:
                    lists[key].append(value)
            elif name == "clear list":
                state.list.delete(batch(entries))
                lists.update({key: [] for key in entries})
            elif name == "insert":
                k, t, v = columns(entries, pa.int64(), pa.int32(), pa.int64())
                state.window.insert(everyone, ordinal[k.to_numpy()], {"t": t, "v": v})
                for key, moment, value in entries:
                    windows[key].append((moment, value))
            elif name == "evict":
                limits = dict(entries)
                keys = batch(limits)
                state.window.evict(keys, [limits[key] for key in keys.columns["k"].to_pylist()])
                for key, limit in limits.items():
                    windows[key] = [r for r in windows[key] if r[0] >= limit]
            else:
                state.window.delete(batch(entries))
                windows.update({key: [] for key in entries})

        for actions in steps:
            task.run(lambda state, actions=actions: [apply(state, *one) for one in actions])
            pairs = [(k, m) for k in range(KEYS) for m in "xyz"]
            found, (list_at, listed), (window_at, windowed) = task.run(
                lambda state, pairs=pairs: (
                    state.map.get({"k": [k for k, _ in pairs], "m": [m for _, m in pairs]}),
                    state.list.get(everyone),
                    state.window.get(everyone),
                )
            )
            assert found["v"].to_pylist() == [maps.get(pair) for pair in pairs]
            for k in range(KEYS):
                mine = pa.array(np.flatnonzero(list_at == ordinal[k]))
                assert listed["v"].take(mine).to_pylist() == lists[k]
                mine = pa.array(np.flatnonzero(window_at == ordinal[k]))
                taken = windowed.take(mine).to_pydict()
                expected = sorted(windows[k], key=lambda r: r[0])
                assert list(zip(taken["t"], taken["v"], strict=True)) == expected
        assert task.state.tables["map"].rows == len(maps)
        assert task.state.tables["list"].rows == sum(map(len, lists.values()))
        assert task.state.tables["window"].rows == sum(map(len, windows.values()))
