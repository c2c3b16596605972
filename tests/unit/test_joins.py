"""Joins by examples: what each kind returns and when, what is kept, and what is refused."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import siltstone as st
from siltstone.errors import BadRow, UsageError
from siltstone.joins.interval import IntervalJoin
from siltstone.joins.lookup import LookupJoin
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.timed_streams import BEGIN, TIME, at

WON: dict[str, Any] = {
    "key": {"auction": pa.int64()},
    "reads": {"auctions": {"id": "auction"}, "bids": {"auction": "auction"}},
    "on": {"auctions": "opened", "bids": "at"},
    "between": ("0 s", "1 hour"),
    "columns": {"auctions": {"item": pa.string()}, "bids": {"price": pa.int64()}},
}
PRICED: dict[str, Any] = {
    "key": {"currency": pa.string()},
    "reads": {"orders": {"currency": "currency"}, "rates": {"code": "currency"}},
    "on": {"orders": "at", "rates": "since"},
    "columns": {"orders": {"amount": pa.int64()}, "rates": {"rate": pa.int64()}},
}
SCHEMA: dict[str, Any] = {
    "auctions": {"id": pa.int64(), "opened": TIME, "item": pa.string(), "closes": TIME, "tags": pa.list_(pa.string())},
    "bids": {"auction": pa.int64(), "at": TIME, "price": pa.int64(), "score": pa.float64()},
    "orders": {"currency": pa.string(), "at": TIME, "amount": pa.int64()},
    "rates": {"code": pa.string(), "since": TIME, "rate": pa.int64()},
}


def won(**options: Any) -> IntervalJoin:
    return IntervalJoin("won", **{**WON, **options})


def priced(**options: Any) -> LookupJoin:
    return LookupJoin("priced", **{**PRICED, **options})


def join_tester(
    operator: IntervalJoin | LookupJoin, schema: Mapping[str, Any] = SCHEMA, **options: Any
) -> StreamTester:
    """A tester of a stream with this operator alone, whose sources have a delay of ten minutes."""
    times = {name: operator.time_column(name) for name in operator.input_names}
    event_time = {name: EventTime(time, delay="10 minutes") for name, time in times.items() if time}
    stream = Stream(
        "joins",
        sources=dict.fromkeys(operator.input_names),
        **{
            "operators": [operator],
            "sinks": {operator.name: None},
            "event_time": event_time or None,
            **options,
        },
    )
    given = {name: schema[name] for name in operator.input_names if name in schema}
    return StreamTester(stream, schema=given, now=BEGIN)


def auction(id: int, minute: float, item: str = "vase", **further: Any) -> dict[str, Any]:
    return {"id": id, "opened": at(minute), "item": item, **further}


def bid(auction: int, minute: float, price: int, **further: Any) -> dict[str, Any]:
    return {"auction": auction, "at": at(minute), "price": price, **further}


def order(currency: str, minute: float, amount: int) -> dict[str, Any]:
    return {"currency": currency, "at": at(minute), "amount": amount}


def rate(code: str, minute: float, rate: int) -> dict[str, Any]:
    return {"code": code, "since": at(minute), "rate": rate}


def shown(outputs: Mapping[str, pa.Table], *names: str) -> list[tuple[Any, ...]]:
    """Some columns of the rows of the only output, sorted."""
    [table] = outputs.values()
    return sorted((tuple(row[name] for name in names) for row in table.to_pylist()), key=str)


def test_a_pair_comes_once_when_its_later_row_does() -> None:
    with join_tester(won()) as tester:
        assert not shown(tester.step({"auctions": [auction(1, 0), auction(2, 0, "lamp")]}), "auction")
        came = tester.step({"bids": [bid(1, 5, 10), bid(1, 60, 20), bid(1, 60.1, 30), bid(3, 5, 40)]})
        assert shown(came, "auction", "item", "price") == [(1, "vase", 10), (1, "vase", 20)]
        assert came["won"].schema.names == ["auction", "opened", "item", "at", "price"]
        assert shown(tester.step({"auctions": [auction(3, 4, "book")]}), "auction", "price") == [(3, 40)]


def test_rows_go_when_no_partner_can_come() -> None:
    with join_tester(won(how="full")) as tester:
        tester.step({"auctions": [auction(1, 0), auction(2, 0)], "bids": [bid(1, 5, 10), bid(7, 0, 70)]})
        rows = {"auctions": [auction(5, 70)], "bids": [bid(5, 70, 50), bid(8, 60, 80)]}
        tester.step(rows)  # the watermark is one hour from now on
        alone = tester.advance()
        assert shown(alone, "auction", "item", "price") == [(7, None, 70)]
        assert [row["auction"] for row in tester.state("won", "left").to_pylist()] == [1, 2, 5], "still at their bound"
        assert tester.state("won", "right")["price"].to_pylist() == [50, 80], "one may come at the watermark itself"
        came = tester.step({"auctions": [auction(5, 71), auction(8, 60)], "bids": [bid(5, 71, 51)]})
        assert (8, 80) in shown(came, "auction", "price")
        assert shown(tester.advance(), "auction", "item", "price") == [(2, "vase", None)]
        assert set(tester.state("won", "left")["auction"].to_pylist()) == {5, 8}
        assert tester.state("won", "left.bounds")["auction"].to_pylist() == [5, 8]


def test_the_types_of_a_source_without_rows_need_not_be_known() -> None:
    with join_tester(won(how="full"), {}) as tester:
        tester.step({"bids": [bid(1, 5, 10)]})
        assert shown(tester.step({"auctions": [auction(1, 0)]}), "item", "price") == [("vase", 10)]
    with join_tester(priced(), {}) as tester:
        tester.step({"orders": [order("EUR", 5, 10)]})
        assert shown(tester.finish(), "amount", "rate") == [(10, None)]


def test_semi_and_anti_keep_no_row_that_was_decided() -> None:
    rows = {"auctions": [auction(1, 0), auction(2, 0)], "bids": [bid(1, 5, 10)]}
    with join_tester(won(how="semi")) as tester:
        assert shown(tester.step(rows), "auction", "item") == [(1, "vase")]
        assert tester.state("won", "left")["auction"].to_pylist() == [2]
        assert shown(tester.step({"bids": [bid(1, 6, 11), bid(2, 6, 12), bid(2, 7, 13)]}), "auction") == [(2,)]
        assert tester.state("won", "left").num_rows == tester.state("won", "left.bounds").num_rows == 0
    with join_tester(won(how="anti")) as tester:
        assert not shown(tester.step(rows), "auction")
        assert shown(tester.finish(), "auction", "item") == [(2, "vase")]


def test_a_column_may_bound_the_interval_and_a_function_the_pairs() -> None:
    columns = {"auctions": {"closes": TIME}, "bids": {"price": pa.int64()}}
    join = won(
        columns=columns, between=("0 s", "closes"), how="left", where=lambda pairs: pc.greater(pairs["price"], 9)
    )
    with join_tester(join) as tester:
        opened = [auction(1, 0, closes=at(300)), auction(2, 0, closes=None), auction(3, 0, closes=at(-1))]
        assert shown(tester.step({"auctions": opened}), "auction", "price") == [(2, None), (3, None)], "at once"
        bids = [bid(1, 300, 10), bid(1, 301, 11), bid(1, 299, 9), bid(2, 0, 12), bid(3, 0, 13)]
        assert shown(tester.step({"bids": bids}), "auction", "price") == [(1, 10)]
        assert not shown(tester.finish(), "auction"), "it has found one"


def test_where_has_to_tell_of_each_pair() -> None:
    with (
        join_tester(won(where=lambda pairs: pairs["price"])) as tester,
        pytest.raises(UsageError, match="boolean per row"),
    ):
        tester.step({"auctions": [auction(1, 0)], "bids": [bid(1, 0, 1)]})


def test_late_rows_change_nothing_unless_they_are_to() -> None:
    for late, pairs in (("drop", 0), ("process", 2)):
        with join_tester(won(how="left"), late=late) as tester:
            tester.step({"auctions": [auction(1, 0)], "bids": [bid(9, 0, 1)]})
            tester.step({"auctions": [auction(9, 55)], "bids": [bid(9, 200, 1)]})  # the watermark: 45 minutes
            tester.step({"auctions": [auction(9, 55)]})
            before = tester.state("won", "left"), tester.state("won", "right")
            came = tester.step({"auctions": [auction(1, 30)], "bids": [bid(1, 40, 5)]})
            assert len(shown(came, "auction")) == pairs
            if late == "drop":
                assert before == (tester.state("won", "left"), tester.state("won", "right"))
            assert tester.late == {"won": 2}
            tester.finish()
            assert tester.state("won", "left").num_rows == tester.state("won", "right").num_rows == 0
            tester.replay()


def test_any_value_is_kept_as_it_came() -> None:
    columns = {"auctions": {"tags": pa.list_(pa.string())}, "bids": {"score": pa.float64()}}
    with join_tester(won(columns=columns, how="full")) as tester:
        tester.step({"auctions": [auction(1, 0, tags=["old", None]), auction(2, 1, tags=None)]})
        tester.restart(lost=True)
        came = tester.step({"bids": [bid(1, 2, 0, score=0.0), bid(1, 2, 0, score=-0.0), bid(3, 2, 0, score=None)]})
        assert [str(score) for _, score in shown(came, "tags", "score")] == ["0.0", "0.0"], "-0.0 comes in any order"
        assert shown(tester.finish(), "auction", "tags", "score") == [(2, None, None), (3, None, None)]
        tester.replay(parallelism=3)


def test_a_row_without_a_key_is_a_bad_row() -> None:
    with join_tester(won()) as tester, pytest.raises(BadRow, match="auction is null"):
        tester.step({"auctions": [auction(1, 0), {"id": None, "opened": at(0)}]})


def test_the_list_of_a_key_begins_at_its_first_row() -> None:
    with join_tester(won()) as tester:
        tester.step({"auctions": [auction(1, minute) for minute in range(100)], "bids": [bid(2, 0, 0)]})
        tester.step({"auctions": [auction(2, 120)], "bids": [bid(2, 120, 0)]})  # the watermark: 110 minutes
        tester.advance()
        assert tester.state("won", "left")["position"].to_pylist()[:50] == [*range(50, 100)]
        assert tester.state("won", "left.bounds").to_pylist()[0] == {"auction": 1, "head": 50, "tail": 100}
        came = tester.step({"auctions": [auction(1, 111)], "bids": [bid(1, 111, 5)]})
        assert len(shown(came, "auction")) == 50, "of minutes 51 to 99, and the new one"


def test_a_row_waits_for_the_version_of_its_time() -> None:
    with join_tester(priced()) as tester:
        rates = [rate("EUR", 0, 100), rate("EUR", 30, 130), rate("EUR", 30, 131), rate("USD", 0, 7)]
        came = tester.step({"orders": [order("EUR", 20, 1), order("EUR", 30, 2), order("GBP", 20, 3)], "rates": rates})
        assert not shown(came, "amount")
        orders = [order("USD", 50, 4), order("EUR", 40, 5)]
        tester.step({"orders": orders, "rates": [rate("EUR", 15, 115), rate("EUR", 60, 160)]})  # the watermark: 40
        assert shown(tester.advance(), "amount", "rate") == [(1, 115), (2, 131), (3, None)]
        assert tester.state("priced", "current")["rate"].to_pylist() == [131, 7]
        assert tester.state("priced", "coming")["rate"].to_pylist() == [160]
        tester.step({"rates": [rate("EUR", 40, 140)]})
        assert shown(tester.finish(), "amount", "rate") == [(4, 7), (5, 140)]
        assert tester.state("priced", "current")["rate"].to_pylist() == [160, 7], "for ever"


def test_what_is_newest_now() -> None:
    with join_tester(priced(as_of="now", on={"rates": "since"}), event_time=None) as tester:
        step = {"orders": [order("EUR", 20, 1)], "rates": [rate("EUR", 30, 130), rate("EUR", 0, 100)]}
        assert shown(tester.step(step), "amount", "rate") == [(1, 130)], "although it is later than the order"
        tester.crash(lost=True)
        step = {"orders": [order("EUR", 0, 2), order("USD", 0, 3)], "rates": [rate("EUR", 10, 110)]}
        assert shown(tester.step(step), "amount", "rate") == [(2, 130), (3, None)]
        assert tester.replay() == 2
    columns = {**PRICED["columns"], "orders": {"at": TIME, "amount": pa.int64()}}
    with join_tester(priced(as_of="now", on={}, how="inner", columns=columns), event_time=None) as tester:
        tester.step({"rates": [rate("EUR", 30, 130), rate("EUR", 0, 100)]})
        assert tester.state("priced", "current")["rate"].to_pylist() == [130], "the greatest of a step"
        step = {"orders": [order("EUR", 20, 1), order("USD", 0, 3)], "rates": [rate("EUR", 10, 110)]}
        assert shown(tester.step(step), "amount", "rate") == [(1, 110)], "a later step's is newer"


def test_an_output_has_the_time_that_holds_readers_back_least() -> None:
    for options, time, holds_back_s in (
        ({}, "at", 0),
        ({"output_time": "opened"}, "opened", 3600),
        ({"between": ("-2 hours", "1 hour")}, "opened", 3600),
        ({"between": ("-2 hours", "-1 hour")}, "opened", 0),
        ({"how": "left"}, "opened", 3600),
        ({"how": "right", "between": ("-5 minutes", "1 hour")}, "at", 300),
        ({"how": "full"}, None, 0),
        ({"how": "semi", "between": ("0 s", "closes"), "columns": {"auctions": {"closes": TIME}}}, None, 0),
    ):
        operator = won(**options)
        assert (operator.output_time, operator.holds_back.total_seconds()) == (time, holds_back_s)


def test_the_oldest_row_that_a_join_returns_is_not_late() -> None:
    for output_time, first, last in (("opened", auction(1, 45), bid(1, 50, 1)), ("at", bid(1, 45, 1), auction(1, 50))):
        join = won(between=("-5 minutes", "5 minutes"), output_time=output_time)
        window = st.Tumbling("1 minute", on=output_time)
        counts = st.Aggregate("counts", join.key, [st.Count("n")], reads="won", window=window)
        with join_tester(join, operators=[join, counts], sinks={"won": None, "counts": None}) as tester:
            named = {"opened": "auctions", "at": "bids"}
            ahead = {"auctions": [auction(9, 60)], "bids": [bid(9, 60, 0)]}  # the watermark: 50 minutes
            of, other = named[output_time], next(name for name in ahead if name != named[output_time])
            tester.step({**ahead, of: [*ahead[of], first]})
            tester.step({"bids": [bid(7, 60, 0)]})
            came = tester.step({other: [last]})["won"]
            assert came[output_time].to_pylist() == [at(45)]
            tester.finish()
            assert not tester.late
            assert (1, 1) in [(row["auction"], row["n"]) for row in tester.delivered("counts").to_pylist()]


def test_a_join_may_read_another_one() -> None:
    pairs = won(output_time="opened")
    scored = LookupJoin(
        "scored",
        key={"auction": pa.int64()},
        reads={"won": {"auction": "auction"}, "bids": {"auction": "auction"}},
        on={"won": "opened", "bids": "at"},
        columns={"won": {"price": pa.int64()}, "bids": {"score": pa.float64()}},
    )
    with join_tester(pairs, operators=[pairs, scored], sinks={"scored": None}) as tester:
        bids = [bid(1, -5, 1, score=0.5), bid(1, 2, 3, score=1.5), bid(1, 7, 4, score=2.5)]
        tester.step({"auctions": [auction(1, 5), auction(9, 90)], "bids": [*bids, bid(9, 90, 0)]})
        tester.step({"auctions": [auction(9, 91)], "bids": [bid(9, 91, 0)]})  # the watermark: 80 minutes
        tester.step({"auctions": [auction(9, 200)], "bids": [bid(9, 200, 0)]})
        assert tester.delivered("scored").num_rows == 1, "the watermark of what reads the pairs is an hour earlier"
        tester.finish()
        found = [row for row in tester.delivered("scored").to_pylist() if row["auction"] == 1]
        assert [(row["opened"], row["price"], row["score"]) for row in found] == [(at(5), 4, 1.5)]
        assert not tester.late
        tester.replay(parallelism=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"how": "cross"}, "how is 'cross'"),
        ({"between": ("1 hour", "0 s")}, "lesser bound first"),
        ({"between": ("1 hour",)}, "give two bounds"),
        ({"between": ("0 s", "soon")}, "'soon': use a length of time"),
        ({"between": ("0 s", "item")}, "partners count until item"),
        ({"between": ("0 s", "400000 days")}, "at most 365000 days"),
        ({"reads": {"auctions": {"id": "auction"}}}, "joins two inputs"),
        ({"on": {"auctions": "opened"}}, "on lacks bids"),
        ({"columns": {"asks": {}}}, "of auctions and bids"),
        ({"columns": {"bids": {"at": pa.int64()}}}, "at is int64, and the event time"),
        ({"columns": {"bids": {"position": pa.int64()}}}, "position is a column of the join's state"),
        ({"on": {"auctions": "at", "bids": "at"}}, 'at would be there twice .* names={INPUT: {"at"'),
        ({"names": {"bids": {"prize": "p"}}}, "names renames prize"),
        ({"how": "left", "output_time": "at"}, "use 'opened'"),
        ({"how": "full", "output_time": "at"}, "leave it out"),
    ],
)
def test_a_wrong_option_of_an_interval_join_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        won(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"how": "full"}, "how is 'full'"),
        ({"as_of": "then"}, "as_of is 'then'"),
        ({"on": {"rates": "since"}}, "name the column with the event time of orders and that of rates"),
        ({"on": {"orders": "at"}, "as_of": "now"}, "name the column with the event time"),
        ({"on": {}, "as_of": "now", "columns": {"orders": {"amount": pa.int64()}}}, "returns no column of rates"),
        ({"columns": {"rates": {"at": TIME}}}, "at would be there twice"),
    ],
)
def test_a_wrong_option_of_a_lookup_join_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        priced(**options)


def test_state_of_another_kind_of_join_is_refused() -> None:
    assert won().definition() != won(how="semi").definition()
    assert won().definition() == won(between=("0 s", "2 hours")).definition()
