"""An operator that reads several inputs, in this process: rows, keys, times, dead letters, replays."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from siltstone.errors import BadRow, UsageError
from siltstone.joins.interval import IntervalJoin
from siltstone.joins.lookup import LookupJoin
from siltstone.operator import Due, MapState, Operator, Rows, State, Timer, ValueState
from siltstone.run import step_order
from siltstone.run.inputs import HASH, original_column
from siltstone.run.read_rows import digest_read
from siltstone.state.rows_digest import DigestedRows
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.clock_rules import StepClock, decide_clock, hear
from siltstone.time.event_time import EventTime

_START = datetime(2026, 1, 1, tzinfo=UTC)
_OUT = {"auction": pa.int64(), "items": pa.int64(), "most": pa.int64()}


def at(seconds: int) -> datetime:
    return _START + timedelta(seconds=seconds)


class Prices(Operator):
    """Counts the items of an auction and its highest bid."""

    name = "prices"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = {"auctions": {"id": "auction"}, "bids": {"auction": "auction"}}  # noqa: RUF012
    inputs = {"bids": ("price",)}  # noqa: RUF012
    order_by = ("auctions.item", "bids.price")
    output = _OUT
    best = ValueState({"items": pa.int64(), "most": pa.int64()})
    seen = MapState({"price": pa.int64()}, {"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        bids, items = rows.of("bids"), rows.of("auctions")
        assert bids.table.column_names == ["auction", "price"]
        assert set(items.table.column_names) <= {"auction", "item", "price"}
        entries = bids.by("price")
        state.seen.put(entries.keys.columns.append_column("n", entries.count()))
        for own, function in ((items, Rows.count), (bids, Rows.max)):
            old = state.best.get(own.keys)
            if function is Rows.count:
                new = {"items": own.count(initial=old["items"]), "most": old["most"]}
            else:
                new = {"items": old["items"], "most": own.max("price", initial=old["most"])}
            state.best.put(own.keys, new)
        found = state.best.get(rows.keys)
        return rows.keys.with_columns({"items": found["items"], "most": found["most"]})


SOURCES: Any = {"auctions": None, "bids": None}
SCHEMA: Any = {
    "auctions": {"id": pa.int64(), "item": pa.string(), "price": pa.string()},
    "bids": {"auction": pa.int32(), "price": pa.int64()},
}


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=str)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_two_inputs_meet_at_their_key(backend: str, parallelism: int) -> None:
    stream = Stream("shop", sources=SOURCES, operators=[Prices()], sinks={"prices": None})
    with StreamTester(stream, parallelism=parallelism, backend=backend, schema=SCHEMA) as tester:
        items = [{"id": 1, "item": "a", "price": "no number"}, {"id": 2, "item": "b", "price": None}]
        out = tester.step({"auctions": items, "bids": [{"auction": 1, "price": 7}, {"auction": 3, "price": 1}]})
        assert rows_of(out["prices"]) == [(1, 1, 7), (2, 1, None), (3, None, 1)]
        out = tester.step({"bids": [{"auction": 2, "price": 4}, {"auction": 1, "price": 5}]})
        assert rows_of(out["prices"]) == [(1, 1, 7), (2, 1, 4)]
        tester.rescale(2)
        out = tester.step({"auctions": [{"id": 3, "item": "c", "price": ""}]})
        assert rows_of(out["prices"]) == [(3, 1, 1)]
        assert tester.state("prices", "seen").num_rows == 4
        assert tester.replay() == 3 and tester.replay(parallelism=4) == 3


def test_two_inputs_may_be_an_operator_and_a_source() -> None:
    class Doubles(Operator):
        name = "doubles"
        key = {"auction": pa.int64()}  # noqa: RUF012
        reads = "bids"
        output = {"number": pa.int32(), "price": pa.int64()}  # noqa: RUF012
        counts = ValueState({"n": pa.int64()})

        def process(self, rows: Rows, state: State) -> pa.Table:
            state.counts.put(rows.keys, {"n": rows.count(initial=state.counts.get(rows.keys)["n"])})
            numbers = rows.table["auction"].cast(pa.int32())
            return pa.table({"number": numbers, "price": pa.array([2 * p.as_py() for p in rows.table["price"]])})

    prices = Prices(reads={"auctions": {"id": "auction"}, "doubles": {"number": "auction"}}, inputs={})
    prices_of = Prices.process

    class Both(Prices):
        def process(self, rows: Rows, state: State) -> pa.Table:
            inner = rows.of

            def renamed(name: str) -> Rows:
                return inner({"bids": "doubles"}.get(name, name))

            rows.of = renamed  # type: ignore[method-assign]
            return prices_of(self, rows, state)

    both = Both(reads=prices.reads, inputs={"doubles": ("price",)}, order_by=("doubles.price",))
    stream = Stream("shop", sources=SOURCES, operators=[both, Doubles()])
    with StreamTester(stream, parallelism=2, schema=SCHEMA) as tester:
        out = tester.step({"bids": [{"auction": 1, "price": 7}]})
        assert rows_of(out["prices"]) == [(1, None, 14)]
        out = tester.step({"auctions": [{"id": 1, "item": "a", "price": ""}], "bids": [{"auction": 1, "price": 8}]})
        assert rows_of(out["prices"]) == [(1, 1, 16)]
        tester.replay()


def test_rows_are_told_wrong_by_the_input_that_has_them() -> None:
    class Refusing(Prices):
        def process(self, rows: Rows, state: State) -> pa.Table:
            rows.of("bids").sum("price")
            return super().process(rows, state)

    refusing = Refusing(key={"auction": pa.int16()})
    stream = Stream("shop", sources=SOURCES, operators=[refusing], on_bad_row="dead-letter")
    with StreamTester(stream, schema=SCHEMA) as tester:
        most = 2**63 - 1
        bids = [{"auction": 1, "price": most}, {"auction": 1, "price": 1}, {"auction": 2, "price": 5}]
        out = tester.step({"auctions": [{"id": 1, "item": "a"}, {"id": 1 << 20, "item": "b"}], "bids": bids})
        assert rows_of(out["prices"]) == [(1, 1, None), (2, None, 5)], "the auction of the refused bids is not refused"
        letters = sorted(tester.dead_letters.to_pylist(), key=lambda letter: letter["row"])
        assert [letter["reason"] for letter in letters] == [
            "operator prices: key column auction cannot be cast to int16",
            *["operator prices: the sum of column price leaves int64"] * 2,
        ]
        assert letters[0]["row"] == '{"auctions": {"id": 1048576, "item": "b", "price": null}}'
        assert letters[2]["row"] == f'{{"bids": {{"auction": 1, "price": {most}}}}}'
        tester.replay()
    stops = StreamTester(Stream("shop", sources=SOURCES, operators=[refusing]), schema=SCHEMA)
    with stops as tester, pytest.raises(BadRow, match="the sum of column price"):
        tester.step({"bids": bids})


class Waits(Operator):
    """Remembers the clock that it sees, and rings once per key."""

    name = "waits"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = {"auctions": {"id": "auction"}, "bids": {"auction": "auction"}}  # noqa: RUF012
    inputs = {"auctions": ("opened",), "bids": ("at",)}  # noqa: RUF012
    output = {"auction": pa.int64(), "watermark": pa.timestamp("us", "UTC")}  # noqa: RUF012
    rings = Timer()

    def process(self, rows: Rows, state: State) -> None:
        for name, column in (("auctions", "opened"), ("bids", "at")):
            own = rows.of(name)
            if len(own):
                state.rings.set(own.keys, own.max(column))

    def on_timer(self, due: Due, state: State) -> pa.Table:
        seen = pa.array([state.clock.watermark] * len(due), pa.timestamp("us", "UTC"))
        return due.keys.with_columns({"watermark": seen})


TIMES: Any = {"auctions": EventTime("opened", delay="10 s"), "bids": EventTime("at")}
TYPES: Any = {
    "auctions": {"id": pa.int64(), "opened": pa.timestamp("us", "UTC")},
    "bids": {"auction": pa.int64(), "at": pa.timestamp("us")},
}


def test_the_watermark_is_the_least_of_the_inputs() -> None:
    stream = Stream("shop", sources=SOURCES, operators=[Waits()], event_time=TIMES)
    with StreamTester(stream, parallelism=2, schema=TYPES) as tester:
        tester.step({"auctions": [{"id": 1, "opened": at(100)}]})
        tester.advance()
        assert tester.watermark is None, "no bid has come: nothing is known of their times"
        tester.step({"bids": [{"auction": 2, "at": at(50).replace(tzinfo=None)}]})
        out = tester.advance()
        assert tester.watermark == at(50) and rows_of(out["waits"]) == [(2, at(50))]
        tester.step({"bids": [{"auction": 2, "at": at(200).replace(tzinfo=None)}]})
        assert tester.step()["waits"].num_rows == 0 and tester.watermark == at(90)
        late = {"auctions": [{"id": 9, "opened": at(80)}], "bids": [{"auction": 9, "at": at(89).replace(tzinfo=None)}]}
        tester.step(late)
        assert tester.late == {"waits": 2}
        assert sorted(rows_of(tester.finish()["waits"])) == [(1, tester.watermark), (2, tester.watermark)]
        tester.replay(parallelism=3)


def test_an_idle_source_follows_the_others() -> None:
    times = {"auctions": EventTime("opened"), "bids": EventTime("at", idle_after="1 minute")}
    stream = Stream("shop", sources=SOURCES, operators=[Waits()], event_time=times)
    with StreamTester(stream, schema=TYPES) as tester:
        tester.step({"auctions": [{"id": 1, "opened": at(100)}]})
        tester.advance("59 s")
        assert tester.watermark is None, "bids may still be on their way"
        assert rows_of(tester.advance("1 s")["waits"]) == [(1, at(100))]
        tester.step({"bids": [{"auction": 2, "at": at(99).replace(tzinfo=None)}]})
        assert tester.late == {"waits": 1}, "it comes back too late"
        tester.step({"bids": [{"auction": 2, "at": at(300).replace(tzinfo=None)}]})
        tester.step({"auctions": [{"id": 1, "opened": at(200)}]})
        tester.advance("2 minutes")
        tester.step({"auctions": [{"id": 1, "opened": at(400)}]})
        tester.step()
        assert tester.watermark == at(400), "bids are idle again"
        tester.replay()


def test_what_an_operator_holds_back_its_readers_wait_for() -> None:
    class Passes(Waits):
        name = "passes"
        output = {"auction": pa.int64(), "was": pa.timestamp("us", "UTC")}  # noqa: RUF012
        output_time = "was"
        holds_back = "30 s"

        def on_timer(self, due: Due, state: State) -> pa.Table:
            return due.keys.with_columns({"was": due.at})

    class Reads(Operator):
        name = "reads"
        key = {"auction": pa.int64()}  # noqa: RUF012
        reads = "passes"
        output = {"auction": pa.int64()}  # noqa: RUF012
        rings = Timer()

        def process(self, rows: Rows, state: State) -> None:
            state.rings.set(rows.keys, rows.max("was"))

        def on_timer(self, due: Due, state: State) -> pa.Table:
            return due.keys.columns

    stream = Stream("shop", sources=SOURCES, operators=[Reads(), Passes()], event_time=TIMES)
    with StreamTester(stream, schema=TYPES) as tester:
        both = {"auctions": [{"id": 1, "opened": at(30)}], "bids": [{"auction": 2, "at": at(20).replace(tzinfo=None)}]}
        tester.step(both)
        out = tester.advance()
        assert rows_of(out["passes"]) == [(2, at(20))] and out["reads"].num_rows == 0
        far = {"auctions": [{"id": 8, "opened": at(70)}], "bids": [{"auction": 8, "at": at(70).replace(tzinfo=None)}]}
        tester.step(far)
        out = tester.advance()  # the watermark is 60 s, and that of what reads it 30 s
        assert rows_of(out["passes"]) == [(1, at(30))] and rows_of(out["reads"]) == [(1,), (2,)]


def test_wrong_inputs_are_refused() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("give each key column one of its columns", {"reads": {"auctions": {"id": "other"}, "bids": {"a": "auction"}}}),
        ("inputs is", {"inputs": ("price",)}),
        ("inputs is", {"inputs": {"orders": ("price",)}}),
        ("is not a source or operator name", {"reads": {"Bids": {"a": "auction"}}, "inputs": {}}),
        ("cannot combine", {"combined": {"auction": pa.int64()}}),
        ("another column of auctions", {"inputs": {"auctions": ("auction",)}}),
    ]
    for message, fields in wrong:
        with pytest.raises(UsageError, match=message):
            Prices(**fields)
    streams: list[tuple[str, dict[str, Any]]] = [
        ("give one of the two", {"source": lambda *_: None, "sources": SOURCES}),
        ("which no operator reads", {"sources": {**SOURCES, "more": None}}),
        ("is not an operator with an output", {"sources": {"bids": None}}),
        ("several sources", {"sources": SOURCES, "event_time": EventTime("at")}),
        ("of its sources", {"sources": SOURCES, "event_time": {"other": EventTime("at")}}),
    ]
    for message, fields in streams:
        with pytest.raises(UsageError, match=message):
            Stream("shop", operators=[Prices()], **fields)
    with pytest.raises(UsageError, match="does not tell that of its bids"):
        Stream("shop", sources=SOURCES, operators=[Waits()], event_time={"auctions": EventTime("opened")})
    with StreamTester(Stream("shop", sources=SOURCES, operators=[Prices()])) as tester:
        with pytest.raises(UsageError, match="has named sources"):
            tester.step([{"auction": 1}])
        with pytest.raises(UsageError, match="no input 'other'"):
            Rows.make(Prices(), pa.table({"auction": [1]}), None, 4).of("other")


class Alerts(Operator):
    """Returns its rows, alerts of high prices, and at the end of an interval how many there were."""

    name = "alerts"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = "bids"
    output = {"auction": pa.int64(), "price": pa.int64()}  # noqa: RUF012
    side_outputs = {"high": {"auction": pa.int64(), "over": pa.int64()}, "counts": {"n": pa.int64()}}  # noqa: RUF012
    counts = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> Any:
        state.counts.put(rows.keys, {"n": rows.count(initial=state.counts.get(rows.keys)["n"])})
        high = rows.filter(pa.array([price > 10 for price in rows.table["price"].to_pylist()]))
        over = pa.array([price - 10 for price in high.table["price"].to_pylist()], pa.int64())
        return {"alerts": rows.table, "high": pa.table({"auction": high.table["auction"], "over": over})}

    def drain(self, state: State) -> Any:
        return {"counts": pa.table({"n": pa.array([1], pa.int64())})}


class Last(Operator):
    name = "last"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = "alerts-high"
    output = {"auction": pa.int64(), "over": pa.int64()}  # noqa: RUF012
    most = ValueState({"over": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        most = {"over": rows.max("over", initial=state.most.get(rows.keys)["over"])}
        state.most.put(rows.keys, most)
        return rows.keys.with_columns(most)


OUTPUTS = Stream(
    "outputs",
    sources={"bids": None},
    operators=[Last(), Alerts()],
    sinks={"alerts": None, "alerts-high": None, "alerts-counts": None, "last": None},
)


def test_an_operator_has_several_outputs_each_with_readers_and_a_sink() -> None:
    with StreamTester(OUTPUTS, parallelism=2, checkpoint_every=2, schema={"bids": SCHEMA["bids"]}) as tester:
        bids = [{"auction": 1, "price": 7}, {"auction": 1, "price": 12}, {"auction": 2, "price": 30}]
        out = tester.step({"bids": bids})
        assert rows_of(out["alerts-high"]) == rows_of(out["last"]) == [(1, 2), (2, 20)]
        assert rows_of(out["alerts"]) == [(1, 12), (1, 7), (2, 30)] and out["alerts-counts"].num_rows == 0
        out = tester.step({"bids": [{"auction": 1, "price": 3}]})
        assert out["last"].num_rows == 0 and out["alerts-counts"].num_rows == 2, "both subtasks drain"
        assert rows_of(tester.delivered("alerts-high")) == [(1, 2), (2, 20)]
        assert tester.delivered("alerts").num_rows == 4 and tester.delivered("alerts-counts").num_rows == 2
        tester.restart(lost=True)
        tester.replay()


def test_outputs_are_checked() -> None:
    with pytest.raises(UsageError, match="name a timestamp column of its output alerts-high"):
        Alerts(side_times={"high": "over"})
    with pytest.raises(UsageError, match="rename the column"):
        Alerts(output={"alerts-high": pa.int64()})
    with pytest.raises(UsageError, match="two sources, operators or outputs are called alerts-high"):
        Stream("s", sources={"bids": None}, operators=[Alerts(), Last(name="alerts-high", reads="bids")])
    with pytest.raises(UsageError, match="reads the output of 'alerts-low'"):
        Stream("s", sources={"bids": None}, operators=[Alerts(), Last(reads="alerts-low")])

    class Wrong(Alerts):
        def process(self, rows: Rows, state: State) -> Any:
            return {"low": rows.table}

    wrong = StreamTester(Stream("s", sources={"bids": None}, operators=[Wrong()]), schema={"bids": SCHEMA["bids"]})
    with wrong as tester, pytest.raises(UsageError, match="an output 'low', and declares alerts, high, counts"):
        tester.step({"bids": [{"auction": 1, "price": 1}]})


def test_names_of_sources_operators_and_outputs_differ() -> None:
    first, second = Alerts(name="a", side_outputs={"b-c": _OUT}), Alerts(name="a-b", side_outputs={"c": _OUT})
    with pytest.raises(UsageError, match="are called a-b-c: rename one"):
        Stream("s", sources={"bids": None}, operators=[first, second])
    with pytest.raises(UsageError, match="are called alerts-high: rename one"):
        Stream("s", sources={"bids": None, "alerts-high": None}, operators=[Alerts(), Last()])


def test_a_column_is_not_taken_for_the_key_column_of_its_name() -> None:
    """Seen: the key was taken for the event time, and the watermark was that of another column."""

    class Planned(Waits):
        key = {"at": pa.timestamp("us", "UTC")}  # noqa: RUF012
        reads = {"auctions": {"opened": "at"}, "bids": {"planned": "at"}}  # noqa: RUF012
        inputs = {"auctions": ("id",), "bids": ("auction",)}  # noqa: RUF012

    bids = {"planned": pa.timestamp("us", "UTC"), **TYPES["bids"]}
    stream = Stream("s", sources=SOURCES, operators=[Planned()], event_time=TIMES)
    tester = StreamTester(stream, schema={"auctions": TYPES["auctions"], "bids": bids})
    with tester, pytest.raises(UsageError, match="reads the column at of bids, and has a key column of that name"):
        tester.step({"bids": [{"planned": at(9), "auction": 1, "at": None}]})


def test_an_input_may_have_its_key_alone_and_columns_of_nulls() -> None:
    class Blocked(Operator):
        name = "blocked"
        key = {"auction": pa.int64()}  # noqa: RUF012
        reads = {"auctions": {"id": "auction"}, "blocks": {"id": "auction"}}  # noqa: RUF012
        inputs = {"auctions": ("note",)}  # noqa: RUF012
        counts = ValueState({"n": pa.int64()})

        def process(self, rows: Rows, state: State) -> None:
            assert rows.of("blocks").table.column_names == ["auction"]
            state.counts.put(rows.keys, {"n": rows.count(initial=state.counts.get(rows.keys)["n"])})

    names: Any = {"auctions": None, "blocks": None}
    with StreamTester(Stream("s", sources=names, operators=[Blocked()])) as tester:
        auctions = [{"id": 1, "note": None}]
        tester.step({"auctions": auctions, "blocks": [{"id": 2}, {"id": 3}]})
        tester.step({"blocks": [{"id": 2}]})
        tester.step({"auctions": auctions})
        assert tester.replay() == 3


def test_what_an_idle_source_comes_to_does_not_depend_on_when_steps_are_taken() -> None:
    times = {name: EventTime("t", idle_after="1 minute") for name in ("a", "b")}

    def later(clock: StepClock, minutes: int, heard: dict[str, int]) -> StepClock:
        clock = decide_clock(clock, times, minutes * 60_000_000)
        for name, high in heard.items():
            clock = hear(clock, name, {"": high * 60_000_000})
        return clock

    begun = hear(hear(decide_clock(None, times, 0), "a", {"": 0}), "b", {"": 0})
    often = begun
    for minutes, heard in ((5, {"a": 5}), (5, {}), (6, {}), (7, {}), (20, {})):
        often = later(often, minutes, heard)
    seldom = later(later(begun, 5, {"a": 5}), 20, {})
    assert often.sources["b"].watermark == seldom.sources["b"].watermark == 5 * 60_000_000


def test_one_source_that_advances_by_itself_takes_idle_ones_along() -> None:
    times = {
        "a": EventTime("t", idle_after="1 minute", on_idle="advance"),
        "b": EventTime("t", idle_after="2 minutes"),
    }
    begun = hear(hear(decide_clock(None, times, 0), "a", {"": 0}), "b", {"": 0})
    assert decide_clock(begun, times, 600_000_000).sources["b"].watermark == 600_000_000


def test_a_changed_input_is_seen_whatever_becomes_of_bad_rows() -> None:
    key = Prices(key={"auction": pa.int16()})

    def digest(price: int, **further: Any) -> DigestedRows:
        given = {"price": pa.array([price]), **further}
        struct = pa.StructArray.from_arrays(list(given.values()), list(given))
        keys = {"auction": pa.array([1], pa.int16()), HASH: pa.array([7])}
        return digest_read(key, pa.table({**keys, "bids": struct}), ["bids"])

    original = {original_column("auction"): pa.array([1], pa.int32())}
    assert digest(1).differs(digest(2, **original))


def one_by_one(batches: Iterator[pa.RecordBatch], **_: bool) -> Iterator[pa.Table]:
    """A call for each row, instead of for a quarter of a million."""
    for batch in batches:
        yield from (pa.Table.from_batches([batch.slice(n, 1)]) for n in range(batch.num_rows))


def test_a_version_counts_for_each_row_of_its_step_however_calls_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_order, "calls", one_by_one)
    priced = LookupJoin(
        "priced",
        key={"k": pa.int64()},
        reads={"orders": {"k": "k"}, "rates": {"k": "k"}},
        on={},
        columns={"orders": {"amount": pa.int64()}, "rates": {"rate": pa.int64()}},
        as_of="now",
    )
    with StreamTester(Stream("s", sources={"orders": None, "rates": None}, operators=[priced])) as tester:
        orders = [{"k": 1, "amount": None}, {"k": 1, "amount": 5}]
        out = tester.step({"orders": orders, "rates": [{"k": 1, "rate": 7}]})
        assert [row["rate"] for row in out["priced"].to_pylist()] == [7, 7]


def test_a_value_that_a_join_cannot_keep_is_a_dead_letter() -> None:
    join = IntervalJoin(
        "won",
        key={"k": pa.int64()},
        reads={"a": {"k": "k"}, "b": {"k": "k"}},
        on={"a": "at", "b": "seen"},
        columns={"b": {"price": pa.int32()}},
        between=("0 s", "1 hour"),
    )
    times = {"a": EventTime("at"), "b": EventTime("seen")}
    stream = Stream("s", sources={"a": None, "b": None}, operators=[join], event_time=times, on_bad_row="dead-letter")
    with StreamTester(stream) as tester:
        rows = {"a": [{"k": 1, "at": at(0)}], "b": [{"k": 1, "seen": at(1), "price": p} for p in (1 << 40, 5)]}
        assert [row["price"] for row in tester.step(rows)["won"].to_pylist()] == [5]
        [letter] = tester.dead_letters.to_pylist()
        assert letter["reason"] == "operator won, b: column price does not fit int32"
