"""State with a time to live: what is refused, when rows expire, and what becomes of rows without a stamp."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import SchemaConflict, UsageError
from siltstone.keyed import KeyedProcessor
from siltstone.model import KeyGroupRange
from siltstone.operator import (
    TTL,
    Due,
    ListState,
    MapState,
    Operator,
    OperatorCheckpoint,
    Rows,
    State,
    Timer,
    ValueState,
    WindowState,
)
from siltstone.state.backends.heap.table import HeapTable
from siltstone.state.backends.named import backend as backend_by_name
from siltstone.state.schema import DELETED
from siltstone.state.time_index import TimedTable
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from tests.proofs import check_restores
from tests.region_run import RegionRun, clock_of
from tests.state_model import MAX_PARALLELISM
from tests.state_tables import LONG
from tests.ttl_streams import AFTER, BEGIN, SOURCE, TABLES, Checked, Kept, kept, rows_of
from tests.unit.test_time_index import batch, dues, taken

BACKENDS = ("heap", "rocksdb")
ALL_EVENT, ALL_DAY = (dict.fromkeys(TABLES, TTL(AFTER, clock)) for clock in ("event", "processing"))
NOTHING = dict.fromkeys(TABLES)
N = {"n": pa.int64()}
KEY = pa.schema({"k": pa.int64()})


# What is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"after": 30}, "is not a length of time"),
        ({"after": "0 days"}, "use more than 0"),
        ({"after": timedelta(days=365_001)}, "at most 365000 days"),
        ({"after": "1 day", "clock": "wall"}, "the clock of a TTL is 'wall': use 'event' or 'processing'"),
        ({"after": "1 day", "renew": "never"}, "renew of a TTL is 'never': use 'write' or 'read'"),
    ],
)
def test_a_wrong_ttl_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TTL(**fields)


def test_a_length_of_time_is_not_yet_a_ttl() -> None:
    with pytest.raises(UsageError, match=r'ttl is .30 days.: use a TTL, such as st\.TTL\("30 days"\)'):
        ValueState(N, ttl="30 days")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "variable",
    [
        ValueState({"written_at": pa.int64()}, ttl=TTL(None)),
        MapState({"written_at": pa.int64()}, N, ttl=TTL(None)),
        ListState({"n": pa.int64(), "written_at": pa.timestamp("us")}, ttl=TTL(None)),
        WindowState({"written_at": pa.int64()}, order="written_at", ttl=TTL(None)),
    ],
)
def test_a_column_of_its_own_cannot_have_the_name_of_the_stamp(variable: Any) -> None:
    with pytest.raises(UsageError, match="adds a column written_at: give its own column another name"):
        variable.tables("v", KEY)
    assert ValueState({"written_at": pa.int64()}).tables("v", KEY)


def test_a_ttl_by_event_time_needs_event_time() -> None:
    with pytest.raises(UsageError, match="goes by event time, and the stream does not tell"):
        Stream("s", None, [Kept(ALL_EVENT)])
    assert Kept(ALL_EVENT).clocks == {"event"} and Kept(ALL_DAY).clocks == {"processing"}
    assert Stream("s", None, [Kept(dict.fromkeys(TABLES, TTL(None)))]).is_timed is False


def test_positional_arguments_are_as_they_were() -> None:
    assert WindowState(N, "n") == WindowState(value=N, order="n", ttl=None)
    assert MapState({"m": pa.int64()}, N, ("m",)).nullable == ("m",)


# When rows expire


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_expires_in_the_first_step_that_is_not_before_its_time(backend: str) -> None:
    checked = Checked(ALL_DAY, backend=backend)
    with checked.tester as tester:
        checked.advance(2)  # 40 s, which is rounded down
        checked.step({1: ("put", 5, 0)})
        checked.advance(3 * 64 - 3)
        assert tester.state("kept", "list").num_rows == 1
        checked.advance(1)
        assert tester.now == BEGIN + AFTER
        assert all(tester.state("kept", name).num_rows == 0 for name in (*TABLES, "list.bounds", "window.bounds"))


def test_a_write_renews_what_it_writes_and_a_read_only_where_the_ttl_says_so() -> None:
    ttls = {**ALL_DAY, "map": TTL(AFTER, "processing", "read"), "list": TTL(AFTER, "processing", "read")}
    checked = Checked(ttls)
    with checked.tester as tester:
        checked.step({1: ("put", 0, 0), 2: ("put", 1, 0)})
        checked.advance(150)
        checked.step({1: ("put", 1, 0), 2: ("read", 0, 0)})
        checked.advance(42)
        rows = {name: tester.state("kept", name).num_rows for name in TABLES}
        assert rows == {
            "value": 1,
            "map": 2,
            "list": 2,
            "window": 1,
        }  # key 2 lives where it is read
        checked.advance(150)
        assert not any(tester.state("kept", name).num_rows for name in TABLES)


def test_a_stream_that_ends_ends_what_lives_by_event_time() -> None:
    with StreamTester(kept({**ALL_EVENT, "map": TTL(AFTER, "processing"), "list": None}), schema=SOURCE) as tester:
        tester.step(rows_of({1: ("put", 5, 0)}))  # before there is a watermark
        tester.finish()
        rows = {name: tester.state("kept", name).num_rows for name in (*TABLES, "window.bounds")}
        assert rows == {"value": 0, "map": 1, "list": 1, "window": 0, "window.bounds": 0}
        tester.replay()


def test_late_rows_are_cut_where_a_ttl_goes_by_event_time() -> None:
    event_time = kept(ALL_EVENT).event_time
    for ttls, count in ((ALL_EVENT, 2), (ALL_DAY, 4)):
        with StreamTester(Stream("s", None, [Kept(ttls)], event_time=event_time), schema=SOURCE) as tester:
            for unit in (100, 101, 50):
                tester.step(rows_of({unit: ("put", 5, unit)}))
            tester.step(rows_of({3: ("put", 5, 99)}))
            assert tester.state("kept", "value").num_rows == count


def test_a_list_with_gaps_keeps_its_bounds_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("siltstone.run.expiry.EXPIRED_AT_ONCE", 2)
    ttls = {**NOTHING, "list": TTL(AFTER, "processing"), "window": TTL(AFTER, "processing", "read")}
    checked = Checked(ttls)
    with checked.tester:
        for count in range(20):
            checked.step({key: ("put", (7 * count + key) % 10, 0) for key in range(count % 4)})
            checked.advance(18)
            if count % 6 == 0:
                checked.step({1: ("drop", 6, 0), 2: ("read", 0, 0)})
        checked.advance(200)
        assert checked.model.tails == {"list": {}, "window": {}}


class Alarm(Operator):
    """Sets a timer for when its value expires."""

    name = "alarm"
    key = {"k": pa.int64()}  # noqa: RUF012
    output = pa.schema({"k": pa.int64(), **N})
    value = ValueState(N, ttl=TTL(AFTER, "processing"))
    over = Timer("processing")

    def process(self, rows: Rows, state: State) -> None:
        state.value.put(rows.keys, {"n": rows.max("n")})
        state.over.set(rows.keys, state.clock.now + AFTER)

    def on_timer(self, due: Due, state: State) -> pa.Table:
        if due.keys.columns["k"][0].as_py() == 2:
            state.value.put(due.keys, {"n": [9]})
        return due.keys.with_columns({"n": state.value.get(due.keys)["n"]})


def test_rows_expire_after_the_timers_of_their_step() -> None:
    with StreamTester(kept({}, operators=[Alarm()]), schema=SOURCE, now=BEGIN) as tester:
        tester.step(rows_of({1: ("put", 5, 0)}))
        assert tester.advance(AFTER)["alarm"].to_pylist() == [{"k": 1, "n": 5}]
        assert not tester.state("alarm", "value")
        tester.step(rows_of({2: ("put", 5, 0)}))
        assert tester.advance(AFTER)["alarm"].to_pylist() == [{"k": 2, "n": 9}]
        assert tester.state("alarm", "value")["k"].to_pylist() == [2]


class Documents(Operator):
    """Nested values, of which a stamp must not be in the way."""

    name = "documents"
    key = {"k": pa.int64()}  # noqa: RUF012
    value = pa.schema({"doc": pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), "n": pa.int64()})
    output = pa.schema({"k": pa.int64(), **dict(zip(value.names, value.types, strict=True))})
    docs = ValueState(value, ttl=TTL("1 day", "processing", "read"))
    more = ListState(value, ttl=TTL("1 day", "processing", "read"))

    def process(self, rows: Rows, state: State) -> pa.Table:
        n = rows.max("n")
        there = state.docs.lookup(rows.keys)
        assert there.values.schema.equals(self.value)
        docs = [{"a": each.as_py(), "b": [str(each)] * 2} for each in n]
        made = pa.table({"doc": pa.array(docs, self.value.field("doc").type), "n": n}, schema=self.value)
        state.docs.put(rows.keys, made)
        state.more.append(rows.keys, np.arange(len(rows.keys)), made)
        assert state.docs.get(rows.keys).equals(made)
        return rows.keys.with_columns({name: made[name] for name in self.value.names})


def test_nested_values_come_back_without_the_stamp() -> None:
    with StreamTester(kept({}, operators=[Documents()]), schema=SOURCE) as tester:
        for n in (1, 2):
            out = tester.step(rows_of({1: ("put", n, 0), 2: ("put", n, 0)}))["documents"]
            tester.advance("1 hour")
        assert out["doc"][0].as_py() == {"a": 2, "b": ["2", "2"]}
        assert tester.state("documents", "more").column_names == ["k", "position", "doc", "n", "written_at"]
        tester.advance("2 days")
        assert tester.state("documents", "more.bounds").num_rows == tester.state("documents", "docs").num_rows == 0


# Whose reading counts


class Careful(Operator):
    """Reads in `reset`, which may not change state, and peeks."""

    name = "careful"
    key = {"k": pa.int64()}  # noqa: RUF012
    held = ValueState(N, ttl=TTL("64 minutes", "processing", "read"))

    def process(self, rows: Rows, state: State) -> None:
        assert state.held.lookup(rows.keys, renews=False).values.column_names == ["n"]
        if (rows.table["do"].to_numpy() == "put").any():
            state.held.put(rows.keys, {"n": rows.max("n")})

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        assert state.held.contains(Rows.make(self, rows_of({1: ("read", 0, 0)}), None, 8).keys).all()


def test_neither_peeking_nor_a_reset_renews_a_row() -> None:
    with StreamTester(kept({}, operators=[Careful()]), schema=SOURCE) as tester:
        tester.step(rows_of({1: ("put", 1, 0)}))
        before = tester.state("careful", "held")
        tester.advance("30 minutes")
        tester.restart(lost=True)
        tester.step(rows_of({1: ("read", 1, 0)}))
        assert tester.state("careful", "held") == before
        tester.advance("34 minutes")
        assert not tester.state("careful", "held")


class ByKey(KeyedProcessor):
    """Reads what it has of a key only if a row says so."""

    name = "by_key"
    key = {"k": pa.int64()}  # noqa: RUF012
    values = ValueState(N, ttl=TTL(AFTER, "processing", "read"))
    entries = MapState({"m": pa.int64()}, N, ttl=TTL(AFTER, "processing", "read"))
    lists = ListState(N, ttl=TTL(AFTER, "processing", "read"))
    windows = WindowState(N, order="n", ttl=TTL(AFTER, "processing", "read"))

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> None:
        for row in rows:
            n = {"n": row["n"]}
            if row["do"] == "put":
                state.values.put(n)
                state.entries.put({"m": 1}, n)
                state.lists.append(n)
                state.windows.insert(n)
            elif row["do"] == "read":
                assert state.values.get() == n and state.entries.get({"m": 1}) == n
                assert state.lists.get() == state.windows.get() == [n]


def test_one_key_at_a_time_a_read_renews_only_the_keys_for_which_it_is() -> None:
    tables = ("values", "entries", "lists", "windows", "lists.bounds", "windows.bounds")
    with StreamTester(kept({}, operators=[ByKey()]), schema=SOURCE, parallelism=2) as tester:
        tester.step(rows_of({key: ("put", 5, 0) for key in range(20)}))
        tester.advance("60 minutes")
        tester.step(rows_of({key: ("read" if key % 2 else "leave", 5, 0) for key in range(20)}))
        tester.advance("4 minutes")
        for name in tables:
            assert tester.state("by_key", name)["k"].to_pylist() == list(range(1, 20, 2)), name
        tester.replay(parallelism=5)
        tester.advance("60 minutes")
        assert not any(tester.state("by_key", name) for name in tables)


# Rows without a stamp, and other definitions

DELTAS = policy_by_name("adjust-d", PolicyOptions(d_max=100, size_ratio_max=None, space_amplification_max=None))
ALL = KeyGroupRange(0, 8)
SHORT = dict.fromkeys(TABLES, TTL("8 seconds", "processing"))


def day(ttls: Any) -> Stream:
    return Stream("s", None, [Kept(ttls)], max_parallelism=8)


def contents(run: RegionRun, table: str) -> pa.Table:
    """The rows of a table in the working state of its only subtask."""
    region = run.region
    directory = region.warehouse.local.state("s", region.epoch, "kept", 0)
    op = region.stream.operators[0]
    state = backend_by_name(region.options.backend).open(directory, op.tables(), (), ALL, 8)
    try:
        parts = [rows for rows, _ in state.tables[table].scan(ALL)]
    finally:
        state.close()
    return pa.concat_tables([op.tables()[table].rows.empty_table(), *parts]).sort_by("k")


def put(*keys: int) -> pa.Table:
    return rows_of({key: ("put", 5, 0) for key in keys})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ttl_that_is_added_begins_in_its_first_step(tmp_path: Path, backend: str) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, day(NOTHING), DELTAS, backend=backend)
        for key in (1, 2):
            run.step(put(key))
        run.region.close("done")
        run = RegionRun(place, day(SHORT), DELTAS, backend=backend)
        first = 3
        for step in range(first, first + 8):
            run.step(put(2) if step == first + 3 else put())
            written = contents(run, "value")["written_at"]
            assert written[0].as_py() == moment(first)
            assert written[1].as_py() == moment(first + 3 if step >= first + 3 else first)
        run.step(put())
        assert [contents(run, name)["k"].to_pylist() for name in (*TABLES, "list.bounds")] == [[2]] * 5
        for _ in range(3):
            run.step(put())
        assert not any(contents(run, name).num_rows for name in (*TABLES, "list.bounds", "window.bounds"))
        run.region.close("done")
        check_restores(place, "s", (1, 3))


def moment(step: int) -> datetime:
    us = int(clock_of(step)[1:].split(",")[0])
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us - us % 1_000_000)


def test_a_ttl_may_change_and_be_taken_away_but_its_column_stays(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        for ttl in (TTL("1 hour", "processing"), TTL("2 days", "processing", "read"), TTL(None)):
            run = RegionRun(place, day(dict.fromkeys(TABLES, ttl)), DELTAS)
            run.step(put(1))
            run.step(put(2))
            stamps = contents(run, "value")["written_at"].to_pylist()
            assert (None in stamps) == (ttl.after is None)
            run.region.close("done")
        with pytest.raises(SchemaConflict, match=r"the column of a TTL stays, by ttl=st\.TTL\(None\)"):
            RegionRun(place, day(NOTHING), DELTAS)
        run = RegionRun(place, day(SHORT), DELTAS)
        for _ in range(9):
            run.step(put())
        assert not any(contents(run, name).num_rows for name in (*TABLES, "list.bounds", "window.bounds"))


class WiderKept(Kept):
    """It has one more column of its own, before the stamp."""

    def __init__(self, ttls: Any) -> None:
        super().__init__(ttls)
        self.value = ValueState({"n": pa.int64(), "more": pa.string()}, ttl=ttls["value"])

    def _put(self, rows: Rows, state: State) -> None:
        state.value.put(rows.keys, {"n": rows.max("n"), "more": ["x"] * len(rows.keys)})


def test_a_column_may_be_added_before_the_stamp(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, day(SHORT), DELTAS)
        run.step(put(1, 2))
        run.region.close("done")
        run = RegionRun(place, Stream("s", None, [WiderKept(SHORT)], max_parallelism=8), DELTAS)
        run.step(put(2))
        rows = contents(run, "value").to_pylist()
        assert rows[0] == {"k": 1, "n": 5, "more": None, "written_at": moment(1)}
        assert rows[1] == {"k": 2, "n": 5, "more": "x", "written_at": moment(2)}
        run.region.close("done")
        check_restores(place, "s", (1, 3))


def test_an_edit_may_leave_the_stamp_out_or_set_it(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, day(SHORT), DELTAS)
        run.step(put(1, 2, 3))
        run.edit("kept", "value", pa.table({"k": [1, 4], "n": [8, 9], DELETED: [False, False]}))
        found = {row["k"]: (row["n"], row["written_at"]) for row in contents(run, "value").to_pylist()}
        assert found == {1: (8, None), 2: (5, moment(1)), 3: (5, moment(1)), 4: (9, None)}
        stamps = pa.array([moment(-100)], pa.timestamp("us", "UTC"))
        run.edit("kept", "value", pa.table({"k": [2], "n": [7], "written_at": stamps}))
        run.step(put())
        found = {row["k"]: row["written_at"] for row in contents(run, "value").to_pylist()}
        assert found == {1: moment(4), 3: moment(1), 4: moment(4)}
        run.region.close("done")
        check_restores(place, "s", (1, 3))


def test_rows_without_a_time_are_due_when_the_index_is_told_so(tmp_path: Path) -> None:
    table = HeapTable.in_memory(LONG, MAX_PARALLELISM)
    index = TimedTable.open(tmp_path / "a", table, "v", 10, null_due=-5)
    index.put(batch([1, 2, 3]), dues([None, 4, None]))
    index.begin_round()
    assert index.next_due() == -5
    assert sorted(taken(index, 0)) == [(-5, 1), (-5, 3)] and taken(index, 14) == [(14, 2)]
    index.put(batch([1]), dues([100]))
    index.save(1, 1)
    for home, null_due, wanted in (
        ("a", -5, [(-5, 3), (14, 2), (110, 1)]),
        ("b", -5, [(-5, 3), (14, 2), (110, 1)]),
        ("a", None, [(14, 2), (110, 1)]),
    ):
        assert taken(TimedTable.open(tmp_path / home, table, "v", 10, null_due)) == wanted
