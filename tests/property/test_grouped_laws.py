"""Rows brought together by key give what a loop over the rows of each key gives."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siltstone.operator import Operator, Rows, ValueState
from streams.grouped import Grouped


class Keyed(Operator):
    name = "keyed"
    key = {"k": pa.int64()}  # noqa: RUF012
    anything = ValueState(value={"v": pa.int64()})


ROW = st.tuples(st.integers(0, 4), st.integers(-9, 9), st.booleans(), st.sampled_from("abc"))


def grouped(rows: list[tuple[int, int, bool, str]]) -> tuple[Grouped, list[int]]:
    table = pa.table(dict(zip(("k", "v", "restart", "s"), zip(*rows, strict=True), strict=True)))
    calls = Rows.of(Keyed(), table, None, 128)
    return Grouped(calls), calls.keys.columns.column("k").to_pylist()


@given(st.lists(ROW, min_size=1, max_size=40), st.lists(st.integers(-9, 9), min_size=5, max_size=5))
def test_running_sums_restart_and_carry(rows: list[tuple[int, int, bool, str]], carried: list[int]) -> None:
    by_key, keys = grouped(rows)
    values, restart = by_key.values("v"), by_key.values("restart")
    found = by_key.running(values, restart, np.array([carried[k] for k in keys]))
    wanted: list[int] = []
    for k in keys:
        so_far = carried[k]
        for _, value, again, _ in (row for row in rows if row[0] == k):
            so_far = 0 if again else so_far + value
            wanted.append(so_far)
    assert found.tolist() == wanted


@given(st.lists(ROW, min_size=1, max_size=40))
def test_sums_and_ends(rows: list[tuple[int, int, bool, str]]) -> None:
    by_key, keys = grouped(rows)
    values = by_key.values("v")
    own = [[v for k, v, *_ in rows if k == key] for key in keys]
    assert by_key.sums(values).tolist() == [sum(v) for v in own]
    assert by_key.first(values).tolist() == [v[0] for v in own]
    assert by_key.last(values).tolist() == [v[-1] for v in own]


@given(st.lists(ROW, min_size=1, max_size=40))
def test_entries_are_the_distinct_key_and_columns(rows: list[tuple[int, int, bool, str]]) -> None:
    by_key, keys = grouped(rows)
    some = np.flatnonzero(by_key.values("v") >= 0)
    first, entry = by_key.entries(some, "s", "restart")
    columns = [by_key.table.column(c).to_pylist() for c in ("k", "s", "restart")]
    named = [tuple(column[i] for column in columns) for i in first]
    assert sorted(named) == sorted({tuple(column[i] for column in columns) for i in some})
    assert [named[e] for e in entry] == [tuple(column[i] for column in columns) for i in some]
    assert [keys[by_key.group[i]] for i in first] == [name[0] for name in named]
