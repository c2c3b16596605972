"""`KeyedProcessor` takes whatever Python value Arrow takes for a column, and treats equal ones as one."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import BadRow, UsageError
from siltstone.keyed import KeyedProcessor
from siltstone.operator import ListState, MapState, Operator, ValueState, WindowState
from siltstone.stream import DEAD_LETTERS
from tests.examples import examples
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed
from tests.places import place_at
from tests.subtask import Subtask, subtask

YORK = ZoneInfo("America/New_York")
MOMENTS = [
    datetime(2024, 1, 1),
    datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2023, 12, 31, 19, tzinfo=YORK),
    pd.Timestamp("2024-01-01"),
    1704067200000000,
    # The clock of New York shows this twice.
    datetime(2024, 11, 3, 1, 30, tzinfo=YORK, fold=0),
    datetime(2024, 11, 3, 1, 30, tzinfo=YORK, fold=1),
    datetime(2024, 11, 3, 6, 30, tzinfo=UTC),
]
SPELLED: dict[pa.DataType, list[Any]] = {
    pa.int64(): [5, 5.0, np.int32(5), np.int64(-1), -1, pa.scalar(5), 2**63 - 1],
    pa.uint8(): [0, 255, np.uint8(255), 255.0, np.bool_(False).astype(np.uint8)],
    pa.float32(): [
        0.1,
        np.float32(0.1),
        float(np.float32(0.1)),
        1,
        1.0,
        0.0,
        -0.0,
        math.nan,
        np.float32("nan"),
        math.inf,
    ],
    pa.float64(): [0.1, np.float64(0.1), np.float32(0.1), 1, True + 0.0, 0.0, -0.0, math.nan, -math.nan, -math.inf],
    pa.decimal128(10, 2): [Decimal("1.5"), Decimal("1.50"), Decimal(1), 1, Decimal("1E+1"), 10],
    pa.bool_(): [True, False, np.bool_(True)],
    pa.string(): ["a", b"a", np.str_("a"), "\xe4", "\xe4".encode(), "", "NaN"],
    pa.binary(): [b"a", "a", bytearray(b"a"), b"\xff", b""],
    pa.date32(): [
        date(2024, 1, 1),
        datetime(2024, 1, 1, 5),
        datetime(2024, 1, 1, 7, tzinfo=YORK),
        19723,
        date(1, 1, 1),
    ],
    pa.timestamp("us"): MOMENTS,
    pa.timestamp("us", "UTC"): MOMENTS,
    pa.timestamp("us", "America/New_York"): MOMENTS,
}
"""values that Arrow takes for each type, many of them the same one"""
Work = Callable[[Any], None]


@contextmanager
def keyed(kind: pa.DataType) -> Any:
    """Yields a function that runs a step of work on the state of one key, and the subtask."""
    work: list[Work] = []

    class Spelled(KeyedProcessor):
        name = "spelled"
        key = {"k": pa.int64()}  # noqa: RUF012
        entries = MapState(key={"x": kind}, value={"v": kind})
        total = ValueState({"v": kind})
        items = ListState({"v": kind})

        def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
            work.pop()(state)

    with subtask(Spelled(), max_parallelism=1) as task:

        def step(do: Work) -> None:
            work.append(do)
            task.process({"k": [1]})

        yield step, task


def stored(value: Any, kind: pa.DataType) -> Any:
    """What Arrow gives back."""
    return pa.array([value], kind)[0].as_py()


def identity(value: Any, kind: pa.DataType) -> Any:
    """The same for what Spark takes for one key."""
    array = pa.array([value], kind)
    if pa.types.is_timestamp(kind):
        return array.cast(pa.int64())[0].as_py()
    found = array[0].as_py()
    return "not a number" if isinstance(found, float) and math.isnan(found) else found


def dump(task: Subtask, kind: pa.DataType) -> dict[Any, Any]:
    return {identity(row["x"], kind): identity(row["v"], kind) for row in task.dump("entries")}


def can_order_a_window(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_date(kind) or types.is_timestamp(kind)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_map_is_a_dict_over_what_arrow_gives_back(data: st.DataObject) -> None:
    """The cases `keyed` and `keyed_bent`, for each type: whichever spelling a call uses."""
    kind = data.draw(st.sampled_from(list(SPELLED)))
    spelled = st.sampled_from(SPELLED[kind])
    commands = st.lists(st.tuples(st.sampled_from(["put", "remove", "get"]), spelled, spelled), max_size=8)
    model: dict[Any, Any] = {}
    with keyed(kind) as (step, task):
        for calls in data.draw(st.lists(commands, min_size=1, max_size=3)):

            def work(state: Any, calls: list[tuple[str, Any, Any]] = calls) -> None:
                for command, x, v in calls:
                    if command == "put":
                        state.entries.put({"x": x}, {"v": v})
                        model[identity(x, kind)] = identity(v, kind)
                    elif command == "remove":
                        state.entries.remove({"x": x})
                        model.pop(identity(x, kind), None)
                    found = state.entries.get({"x": x})
                    assert (found and identity(found["v"], kind)) == model.get(identity(x, kind))

            step(work)
            assert dump(task, kind) == model


@pytest.mark.parametrize("kind", SPELLED, ids=str)
def test_a_value_is_got_as_a_later_step_reads_it(kind: pa.DataType) -> None:
    def put(state: Any) -> None:
        for each in SPELLED[kind]:
            state.total.put({"v": each})
            assert repr(state.total.get()) == repr({"v": stored(each, kind)})
            state.items.append({"v": each})
        seen.append(repr([state.total.get(), state.items.get()]))

    def get(state: Any) -> None:
        seen.append(repr([state.total.get(), state.items.get()]))

    seen: list[str] = []
    with keyed(kind) as (step, _):
        step(put)
        step(get)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [k for k in SPELLED if can_order_a_window(k)], ids=str)
def test_a_window_evicts_as_it_does_in_state(kind: pa.DataType) -> None:
    """Before and after the step, with limits in any order and spelling; nothing is less than null or NaN."""

    class Windows(KeyedProcessor):
        name = "windows"
        key = {"k": pa.int64()}  # noqa: RUF012
        window = WindowState({"v": kind}, order="v")

        def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
            work.pop()(state.window)

    def own(window: Any) -> list[str]:
        return [repr(row) for row in window.get()]

    work: list[Callable[[Any], None]] = []
    seen: list[list[str]] = []
    for limit in [*SPELLED[kind], None]:
        with subtask(Windows(), max_parallelism=1) as task:
            work += [
                lambda window: seen.append(own(window)),
                lambda window, limit=limit: (window.evict(limit), seen.append(own(window))),
                lambda window: [window.insert({"v": each}) for each in SPELLED[kind]],
                lambda window, limit=limit: (
                    [window.insert({"v": each}) for each in SPELLED[kind]],
                    window.evict(limit),
                    window.evict(None),
                    seen.append(own(window)),
                    window.remove(),
                ),
            ]
            for _ in range(4):
                task.process({"k": [1]})
        assert seen[-3] == seen[-2] == seen[-1]


CUT: list[tuple[pa.DataType, object]] = [
    (pa.int64(), Decimal("1.5")),
    (pa.date32(), 19723.5),
    (pa.timestamp("us"), 1.5),
    (pa.timestamp("us"), pd.Timestamp("2024-01-01 00:00:00.000000001")),
    (pa.list_(pa.int64()), [1.5]),
    (pa.list_(pa.int64()), np.array([1.5, 2.5])),
    (pa.list_(pa.float32()), [1e300]),
    (pa.struct([("a", pa.float32())]), {"a": 1e300}),
    (pa.struct([("a", pa.int64())]), [("a", 1), ("b", 2)]),
    (pa.list_(pa.struct([("a", pa.int64())])), np.array([{"a": 1, "b": 2}], object)),
    (pa.list_(pa.struct([("a", pa.int64())])), deque([{"a": 1, "b": 2}])),
    (pa.timestamp("us", "Nowhere/There"), datetime(2024, 1, 1)),
]
"""Arrow takes these, without a part of them; of the last, it knows no zone"""


@pytest.mark.parametrize(("kind", "value"), CUT, ids=str)
def test_a_row_that_is_returned_is_not_cut_either(kind: pa.DataType, value: object) -> None:
    class Returns(KeyedProcessor):
        name = "returns"
        key = pa.schema({"k": pa.int64()})
        output = pa.schema({"v": kind})
        seen = ValueState({"n": pa.int64()})

        def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> Any:
            yield {"v": value}

    with subtask(Returns()) as task, pytest.raises(UsageError, match="the output of operator returns: a value does"):
        task.process({"k": [1]})


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32()], ids=str)
def test_times_that_python_does_not_have_are_bad_rows(where: str, kind: pa.DataType) -> None:
    """Of such a row, which Arrow and Spark may have, an OverflowError ended the stream, dead letters or not."""

    class Times(KeyedProcessor):
        name = "times"
        key = pa.schema({"k": kind if where == "k" else pa.int64()})
        seen = ValueState({"n": pa.int64()})

        def handle_input(self, key: tuple[Any], rows: list[dict[str, Any]], state: Any) -> None:
            state.seen.put({"n": 1})

    raw, ordinals = pa.int32() if kind == pa.date32() else pa.int64(), pa.array([5, 4, 3, 5, 4])
    late = pa.array([0, 1, 2**31 - 1, 0, 2**31 - 1], raw)
    if raw == pa.int64():
        late = pa.array([0, 1, 2**62, 0, -(2**62)], raw)
    with subtask(Times()) as task:
        with pytest.raises(BadRow, match="years 1 to 9999") as caught:
            task.process({"k": late.cast(kind)} if where == "k" else {"k": ordinals, "v": late.cast(kind)})
        assert caught.value.rows.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("variable", ["value", "entries", "ahead", "items", "window"])
def test_a_time_in_state_that_python_does_not_have_is_named_with_its_key(variable: str) -> None:
    """Seen: OverflowError, which says neither where nor what to do."""
    declared = {
        "value": ValueState({"v": pa.timestamp("us")}),
        "entries": MapState(key={"x": pa.int64()}, value={"v": pa.timestamp("us")}),
        "ahead": MapState(key={"n": pa.int64()}, value={"v": pa.timestamp("us")}),
        "items": ListState({"v": pa.timestamp("us")}),
        "window": WindowState({"n": pa.int64(), "v": pa.timestamp("us")}, order="n"),
    }
    fields = {"name": "late", "key": {"k": pa.int64()}, "inputs": ("n",), variable: declared[variable]}
    rows = {"k": [1, 2, 3], "n": [7, 8, 9]}

    def put(_: Any, rows: Any, state: Any) -> None:
        access, late = getattr(state, variable), pa.array([0, 0, 2**62]).cast(pa.timestamp("us"))
        if variable == "value":
            access.put(rows.keys, {"v": late.take(pa.array([k - 1 for k in rows.keys.columns["k"].to_pylist()]))})
        elif variable in ("entries", "ahead"):
            access.put(
                pa.table({"k": rows.table["k"], "x" if variable == "entries" else "n": rows.table["n"], "v": late})
            )
        elif variable == "items":
            access.append(rows.keys, rows.key_index, pa.table({"v": late}))
        else:
            access.insert(rows.keys, rows.key_index, pa.table({"n": rows.table["n"], "v": late}))

    def get(_: Any, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
        at = key[0] + 6
        entry = {"entries": [{"x": at}], "ahead": [{"n": at}]}.get(variable, [])
        getattr(state, variable).get(*entry)

    with subtask(type("Puts", (Operator,), {**fields, "process": put})()) as task:
        task.process(rows)
        task.operator = type("Gets", (KeyedProcessor,), {**fields, "handle_input": get})()
        said = rf"variable {variable} of key k 3: a time is not within the years 1 to 9999.*: write process in place"
        with pytest.raises(UsageError, match=said):
            task.process(rows)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), np.float32(1.5)),
        (pa.int64(), 2**63),
        (pa.int64(), math.nan),
        (pa.int64(), True),
        (pa.int64(), ...),
        (pa.uint8(), -1),
        (pa.float32(), 1e300),
        (pa.decimal128(10, 2), Decimal("1.234")),
        (pa.string(), "\udcff"),
        (pa.string(), b"\xff"),
        (pa.date32(), 10**7),
        (pa.timestamp("us"), 2**62),
        (pa.list_(pa.int64()), [1, "x"]),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.list_(pa.struct([("a", pa.int64())])), [{"a": 1}, {"c": 2}]),
        *CUT,
    ],
    ids=str,
)
def test_what_does_not_fit_is_a_bad_row_of_its_key(kind: pa.DataType, value: object) -> None:
    class Values(KeyedProcessor):
        name = "values"
        key = {"k": pa.int64()}  # noqa: RUF012
        totals = ValueState({"v": kind})

        def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
            if key == (2,):
                state.totals.put({"v": value})

    with subtask(Values()) as task:
        with pytest.raises(BadRow, match=r"totals: a value does not fit its column \(v .*\): ") as caught:
            task.process({"k": [1, 2, 1, 2]})
        assert caught.value.rows.tolist() == [False, True, False, True]
        assert caught.value.reason.endswith(")") and task.dump("totals") == []


def test_bad_rows_that_are_not_one_per_row_of_the_key_are_refused() -> None:
    class Miscounts(KeyedProcessor):
        name = "miscounts"
        key = {"k": pa.int64()}  # noqa: RUF012
        totals = ValueState({"v": pa.int64()})

        def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
            raise BadRow("unlucky", rows=[True])

    with subtask(Miscounts()) as task, pytest.raises(UsageError, match=r"bool\[1\], not bool\[2\]"):
        task.process({"k": [1, 1]})


class Entries(KeyedProcessor):
    """Counts the entries of each key by `n`, which may be null; a window has the same rows."""

    key = {"k": pa.int64()}  # noqa: RUF012
    output = {"k": pa.int64(), "n": pa.int64()}  # noqa: RUF012
    counts = MapState(key={"n": pa.int64()}, value={"count": pa.int64()})
    recent = WindowState({"n": pa.int64()}, order="n")
    call = "get"

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> Any:
        for row in rows:
            entry = {"n": row["n"]}
            if self.call == "insert":
                state.recent.insert(entry)
                state.recent.get()
                continue
            if self.call == "remove":
                state.counts.remove(entry)
            found = state.counts.get(entry) if self.call == "get" else None
            state.counts.put(entry, {"count": (found["count"] if found else 0) + 1})
        yield {"k": key[0], "n": len(rows)}


@pytest.mark.parametrize("call", ["get", "put", "remove", "insert"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_null_map_key_is_a_dead_letter_of_its_key(tmp_path: Path, call: str, count: int) -> None:
    """The case `keyed`, in which it ended the stream."""
    operator = Entries(name=SINK)
    operator.call = call
    rows = pa.table({"k": [1] * count + [2], "n": pa.array([None] + [5] * (count - 1) + [7], pa.int64())})
    heard, letters = Heard(), Heard()
    with place_at(tmp_path / "w") as place:
        stream = replace(STREAM, operators=[operator], on_bad_row="dead-letter")
        run = Outboxed(place, heard, stream=stream, letters=letters)
        completed = run.step(rows)
        assert completed is not None and completed.dead_letters == {SINK: count}
        assert {o.name for o in place.catalog.outbox.list(NAME)} == {SINK, DEAD_LETTERS}
    [(_, told)] = letters.calls
    what = "recent: column n orders the window and" if call == "insert" else "counts: map key n"
    assert {row["reason"] for row in told} == {f"{what} is null"}
    assert heard.calls == [(1, [{"k": 2, "n": 1}])]
