"""Windows of `Aggregate`: their arithmetic, clocks that change, late rows, sums that overflow, and what is refused."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.functions import Count, Sum
from siltstone.aggregates.lists import TopN
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Cumulative, Panes, Session, Sliding, Tumbling, merge_sessions
from siltstone.change.edit import Editable, cast_changes
from siltstone.deduplicate import Deduplicate
from siltstone.errors import BadRow, SchemaConflict, UsageError
from siltstone.run.definition import check_definition, definition_of
from siltstone.state.schema import DELETED
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from siltstone.times import EPOCH, to_us
from tests.windowed_streams import (
    BERLIN,
    CASES,
    DELAY,
    ROWS,
    ByHand,
    Row,
    read_windows,
    table_of,
    times_of,
    windowed,
)

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
KEY = {"user": pa.int64()}
COUNT = (Count("n"),)


def rows_at(*minutes: float, v: int | None = 1) -> pa.Table:
    """Rows of user 0, one at each of these minutes after the beginning."""
    return table_of([(0, BEGIN + minute * MINUTE, v) for minute in minutes])


def shown(made: pa.Table) -> list[tuple[Any, ...]]:
    """(minute of the start, minute of the end, n) of each window, sorted."""
    rows = made.to_pylist()
    return sorted(((r["window_start"] - BEGIN) / MINUTE, (r["window_end"] - BEGIN) / MINUTE, r["n"]) for r in rows)


def counted(window: Any, emit: str = "close", late: str = "drop", **options: Any) -> Stream:
    """A stream of counts in windows, five minutes late."""
    operator = Aggregate(
        "a", key=KEY, aggregates=COUNT, window=window, emit=emit, map_side=options.pop("map_side", False)
    )
    return windowed(window, 5 * MINUTE, operators=[operator, *options.pop("readers", ())], late=late, **options)


@pytest.mark.parametrize("emit", ["close", "update"])
@pytest.mark.parametrize("name", CASES)
def test_each_kind_equals_the_windows_by_hand(name: str, emit: str) -> None:
    window, begin, unit = CASES[name]
    if isinstance(window, Session) and emit == "update":
        return
    choose = random.Random(name)
    given = [[(choose.randrange(3), choose.randint(-14, 14), choose.choice([None, 1, -4])) for _ in range(9)]] * 3
    by_hand, last = ByHand(window), dict[Any, Any]()
    with StreamTester(windowed(window, DELAY * unit, emit), parallelism=2) as tester:
        for batch in times_of(given, begin, unit):
            before = tester.watermark
            last |= read_windows(tester.step(table_of(batch))["a"])
            by_hand.step(batch, before, tester.watermark)
        last |= read_windows(tester.finish()["a"])
        by_hand.close(datetime.max.replace(tzinfo=UTC))
        assert last == by_hand.totals and last
        assert tester.state("a", "totals").num_rows == 0


# Arithmetic

ZONES = (BERLIN, "America/Havana", "America/Sao_Paulo", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kolkata")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("size", ["1 minute", "15 minutes", "1 hour", "6 hours", "1 day", "7 days"])
def test_a_pane_contains_its_times_and_begins_where_clocks_show_a_multiple(zone: str, size: str) -> None:
    panes, there = Tumbling(size, on="at", zone=zone).panes, ZoneInfo(zone)
    chosen = np.random.default_rng(7)
    changes = ["2026-10-25", "2026-03-29", "2011-12-30", "2016-02-21", "2026-04-05", "2026-11-01"]
    days = [to_us(datetime.fromisoformat(day)) for day in changes]
    at = np.concatenate([chosen.integers(day - 10**11, day + 10**11, 300) for day in days])
    k = panes.index(at)
    start, end = panes.boundary(k), panes.boundary(k + 1)
    assert (start <= at).all() and (at < end).all()
    width = timedelta(microseconds=panes.width_us)
    for us, number in set(zip(start.tolist(), k.tolist(), strict=True)):
        moment, wanted = EPOCH + timedelta(microseconds=us), datetime(1970, 1, 1) + number * width
        clock, just = (m.astimezone(there).replace(tzinfo=None) for m in (moment, moment - timedelta(microseconds=1)))
        assert clock == wanted or just < wanted < clock, "or the moment at which clocks skip it"


def test_days_of_berlin_have_23_and_25_hours() -> None:
    panes = Tumbling("1 day", on="at", zone=BERLIN).panes
    days = np.array([to_us(datetime(2026, *day)) for day in ((3, 28, 12), (3, 29, 12), (10, 25, 12))])
    k = panes.index(days)
    assert ((panes.boundary(k + 1) - panes.boundary(k)) // 3_600_000_000).tolist() == [24, 23, 25]


@pytest.mark.parametrize(
    "panes",
    [
        Panes(10, 1, 1),
        Panes(10, 6, 1),
        Panes(10, 6, 3),
        Panes(2, 5, 2),
        Panes(3, 5, 4, offset_us=2),
        Panes(10, 4, 4, is_cumulative=True),
    ],
)
def test_the_windows_of_a_pane_are_those_that_contain_it(panes: Panes) -> None:
    at = np.arange(-200, 200)
    k = panes.index(at)
    assert (panes.boundary(k) <= at).all() and (at < panes.boundary(k + 1)).all()
    starts = [n for n in range(-300, 300) if n % panes.stride == 0]
    spans = range(1, panes.length + 1) if panes.is_cumulative else [panes.length]
    for pane in set(k.tolist()):
        ends = [start + span for start in starts for span in spans if start <= pane < start + span]
        one = np.array([pane])
        first, last = int(panes.first_end(one)[0]), int(panes.last_end(one)[0])
        assert list(range(first, last + 1, panes.end_step)) == sorted(ends)
        bounds = [int(panes.boundary(np.array([end]))[0]) for end in sorted(ends)]
        for us in range(bounds[0], bounds[-1] + 12):
            assert int(panes.ends_until(one, us)[0]) == max(
                e for e, b in zip(sorted(ends), bounds, strict=True) if b <= us
            )
        for us in range(bounds[0] - 12, bounds[-1]):
            assert int(panes.ends_after(one, us)[0]) == min(
                e for e, b in zip(sorted(ends), bounds, strict=True) if b > us
            )


def test_times_far_away_are_in_windows_too() -> None:
    far = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max])
    for window in (Tumbling("36500 days", on="at"), Tumbling("1 day", on="at", zone=BERLIN), Session("1 day", on="at")):
        late = window.panes.find_late(far, 0) if isinstance(window, Tumbling) else window.find_late(far, 0)
        assert late.tolist() == [True, False]


def test_intervals_merge_also_where_one_is_within_another() -> None:
    owner = np.array([1, 0, 0, 0, 1, 0])
    start, end = np.array([5, 0, 2, 10, 4, 11]), np.array([6, 10, 3, 12, 5, 20])
    assert merge_sessions(owner, start, end).tolist() == [1, 0, 0, 0, 1, 0]
    assert merge_sessions(owner, start, end - 1).tolist() == [3, 0, 0, 1, 2, 1]


SKIPPED = [
    Cumulative("1 day", "1 hour", on="at", zone=BERLIN),
    Cumulative("1 day", "15 minutes", on="at", zone=BERLIN),
    Sliding("3 hours", "1 hour", on="at", zone=BERLIN),
    Sliding("3 hours", "30 minutes", on="at", zone=BERLIN),
]


@pytest.mark.parametrize("emit", ["close", "update"])
@pytest.mark.parametrize("window", SKIPPED, ids=lambda window: f"{type(window).__name__} {window.every}")
def test_windows_and_rows_count_once_where_clocks_skip_time(window: Any, emit: str) -> None:
    rows = [(0, datetime(2026, 3, 29, *when, tzinfo=UTC), v) for when, v in (((0, 30), 1), ((1, 20), 2), ((2, 40), 4))]
    by_hand = ByHand(window)
    by_hand.step(rows, None, None)
    by_hand.close(datetime.max.replace(tzinfo=UTC))
    with StreamTester(windowed(window, MINUTE, emit)) as tester:
        made = read_windows(tester.step(table_of(rows))["a"]) + read_windows(tester.finish()["a"])
        assert len(made) == len(dict(made)) and dict(made) == by_hand.totals


# Late rows

TEN, HOUR = Tumbling("10 minutes", on="at"), Sliding("20 minutes", "10 minutes", on="at")


def test_a_row_is_late_once_all_its_windows_had_closed() -> None:
    with StreamTester(counted(TEN)) as tester:
        tester.step(rows_at(1, 15))
        assert shown(tester.advance()["a"]) == [(0, 10, 1)]  # W is 10
        assert shown(tester.step(rows_at(9.9, 10, 35))["a"]) == [], "9.9 is late"
        assert shown(tester.finish()["a"]) == [(10, 20, 2), (30, 40, 1)]


def test_a_row_counts_in_the_windows_that_are_open() -> None:
    with StreamTester(counted(HOUR)) as tester:
        tester.step(rows_at(1, 15))
        assert shown(tester.advance()["a"]) == [(-10, 10, 1)]
        assert shown(tester.step(rows_at(9))["a"]) == [], "in a pane that there is"
        assert shown(tester.finish()["a"]) == [(0, 20, 3), (10, 30, 1)]
    with StreamTester(counted(HOUR)) as tester:
        tester.step(rows_at(15))
        tester.advance()
        tester.step(rows_at(9))
        assert shown(tester.finish()["a"]) == [(0, 20, 2), (10, 30, 1)], "in a new one"


@pytest.mark.parametrize("emit", ["close", "update"])
@pytest.mark.parametrize("window", [TEN, HOUR], ids=["tumbling", "sliding"])
def test_late_rows_that_are_processed_make_windows_of_their_own(window: Any, emit: str) -> None:
    with StreamTester(counted(window, emit, late="process")) as tester:
        tester.step(rows_at(1, 45))
        tester.advance()
        made = shown(tester.step(rows_at(2, 3))["a"])
        assert made == ([(0, 10, 2)] if window is TEN else [(-10, 10, 2), (0, 20, 2)])
        assert all(end > 20 for _, end, _ in shown(tester.finish()["a"]))
        assert tester.state("a", "totals").num_rows == 0
        tester.replay(backend="rocksdb")


def test_a_late_row_that_is_processed_makes_a_session_of_its_own() -> None:
    with StreamTester(counted(Session("5 minutes", on="at"), late="process")) as tester:
        tester.step(rows_at(1, 45))
        tester.advance()
        assert shown(tester.step(rows_at(2, 3))["a"]) == [(2, 8, 2)]


def test_a_row_at_the_end_of_a_session_belongs_to_it() -> None:
    with StreamTester(counted(Session("5 minutes", on="at"))) as tester:
        tester.step(rows_at(0, 10))
        tester.advance()
        assert shown(tester.step(rows_at(5))["a"]) == [], "W' is 5: nothing earlier is expected"
        assert shown(tester.finish()["a"]) == [(0, 15, 3)]


def test_rows_that_are_combined_are_late_together_and_counted_one_by_one() -> None:
    with StreamTester(counted(HOUR, map_side=True)) as tester:
        tester.step(rows_at(1, 15))
        tester.advance()
        assert shown(tester.step(rows_at(-1, -2, -9, 9, 9.5, 15))["a"]) == [], "three are late"
        assert tester.late == {"a": 3}
        assert shown(tester.finish()["a"]) == [(0, 20, 5), (10, 30, 2)]
        with pytest.raises(BadRow, match="event time at is null in 2 rows"):
            tester.step(table_of([(0, None, 1), (0, None, 2)]))  # pyright: ignore[reportArgumentType]


def test_combined_rows_may_have_their_event_time_in_the_key() -> None:
    def close(*, map_side: bool) -> list[dict[str, Any]]:
        operator = Aggregate("a", key={"at": ROWS.field("at").type}, aggregates=COUNT, window=TEN, map_side=map_side)
        with StreamTester(windowed(TEN, MINUTE, operators=[operator]), parallelism=2) as tester:
            tester.step(rows_at(1, 1, 2, 31))
            tester.advance()
            tester.step(rows_at(1, 1, 32))
            tester.finish()
            assert tester.late == {"a": 2}
            return sorted(tester.delivered("a").to_pylist(), key=lambda row: row["at"])

    assert [row["n"] for row in close(map_side=True)] == [2, 1, 1, 1]
    assert close(map_side=True) == close(map_side=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"late": "dead-letter"}, "no single one can become a dead letter"),
        ({"event_time": EventTime("at", delay="1m", per="partition")}, "do not have partition"),
    ],
)
def test_rows_are_combined_only_if_they_can_be_told_late(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        counted(TEN, map_side=True, **options)


def test_late_rows_become_dead_letters() -> None:
    with StreamTester(counted(TEN, late="dead-letter")) as tester:
        tester.step(rows_at(1, 15))
        tester.advance()
        tester.step(rows_at(9.9, 10))
        tester.finish()
        assert tester.dead_letters.num_rows == 1


# Operators that read windows


def test_hours_of_ten_minutes_are_hours() -> None:
    hours = Aggregate(
        "hours", key=KEY, reads="a", aggregates=[Sum("n", of="n")], window=Tumbling("1 hour", on="window_time")
    )
    with StreamTester(counted(TEN, readers=[hours])) as tester:
        made = [tester.step(rows_at(*minutes)) for minutes in ((1, 12, 55), (59, 66), (80,))]
        made += [tester.finish()]
        assert [shown(each["hours"]) for each in made] == [[], [], [(0, 60, 4)], [(60, 120, 2)]]
        tester.replay()


def test_days_of_sessions_take_each_session_once() -> None:
    hours = Aggregate(
        "hours", key=KEY, reads="a", aggregates=[Sum("n", of="n")], window=Tumbling("1 hour", on="window_end")
    )
    with StreamTester(counted(Session("5 minutes", on="at"), readers=[hours])) as tester:
        made = [shown(tester.step(rows_at(minute))["hours"]) for minute in (50, 55, 62, 65, 70)]
        made += [shown(tester.finish()["hours"])]
        assert sum(n for each in made for _, _, n in each) == 5


@pytest.mark.parametrize("late", ["drop", "process"])
def test_no_row_is_lost_or_doubled_from_windows_to_windows_to_windows(late: str) -> None:
    sums = [Sum("n", of="n")]
    visits = Aggregate("b", KEY, sums, reads="a", window=Session("3 minutes", on="window_time"))
    hours = Aggregate("c", KEY, sums, reads="b", window=Tumbling("1 hour", on="window_end"))
    with StreamTester(counted(HOUR, late=late, readers=[visits, hours])) as tester:
        made = [tester.step(rows_at(*m)) for m in ((1, 2, 14), (3, 30), (11, 45), (28, 70), (5, 90), (95,))]
        made.append(tester.finish())
        counts = [sum(sum(each[name]["n"].to_pylist()) for each in made) for name in "abc"]
        assert counts == [{"drop": 22, "process": 24}[late]] * 3, "the row at 5 is late, and in two windows"
        assert not any(tester.state(name, "totals").num_rows for name in "abc")
        tester.replay(parallelism=2)


@pytest.mark.parametrize("late", ["drop", "process"])
@pytest.mark.parametrize("window", [TEN, HOUR, Session("5 minutes", on="at")], ids=lambda one: type(one).__name__)
def test_after_the_end_every_row_is_late(window: Any, late: str) -> None:
    with StreamTester(counted(window, late=late)) as tester:
        tester.step(rows_at(1))
        tester.finish()
        tester.restart(lost=True)
        made = tester.step(rows_at(2, 100))["a"]
        each = 2 if window is HOUR else 1
        assert sum(made["n"].to_pylist()) == (2 * each if late == "process" else 0)
        assert tester.state("a", "totals").num_rows == 0
        tester.replay(backend="rocksdb")


# Sums


def test_a_sum_of_panes_that_does_not_fit_stops_the_stream() -> None:
    sums = Aggregate("a", key=KEY, aggregates=[Sum("total", of="v")], window=HOUR)
    with StreamTester(windowed(HOUR, MINUTE, operators=[sums])) as tester:
        tester.step(rows_at(1, 11, v=2**62 + 2**61))
        with pytest.raises(BadRow, match=r"total of column v leaves int64 for user 0; use"):
            tester.finish()


def test_rows_whose_sum_does_not_fit_become_dead_letters() -> None:
    sums = Aggregate("a", key=KEY, aggregates=[Sum("total", of="v")], window=TEN)
    with StreamTester(windowed(TEN, MINUTE, operators=[sums], on_bad_row="dead-letter")) as tester:
        big = 2**62 + 2**61
        tester.step(table_of([(user, BEGIN + m * MINUTE, big) for user, m in ((0, 1), (0, 2), (0, 11), (1, 1))]))
        made = [(r["user"], (r["window_start"] - BEGIN) / MINUTE, r["total"]) for r in tester.finish()["a"].to_pylist()]
        assert sorted(made) == [(0, 10, big), (1, 0, big)]
        assert tester.dead_letters.num_rows == 2


def test_rows_of_a_changed_window_whose_sum_does_not_fit_become_dead_letters() -> None:
    sums = Aggregate("a", key=KEY, aggregates=[Sum("total", of="v")], window=HOUR, emit="update")
    big = 2**62 + 2**61
    with StreamTester(windowed(HOUR, MINUTE, operators=[sums], on_bad_row="dead-letter")) as tester:
        tester.step(rows_at(1, v=big))
        made = tester.step(table_of([(user, BEGIN + m * MINUTE, big) for user, m in ((0, 11), (0, 21), (1, 11))]))["a"]
        found = [(r["user"], (r["window_start"] - BEGIN) / MINUTE, r["total"]) for r in made.to_pylist()]
        assert sorted(found) == [(1, 0, big), (1, 10, big)], "of user 0, the windows from 0 and from 10 have two rows"
        assert tester.dead_letters.num_rows == 2
        assert all("total of column v leaves int64" in reason for reason in tester.dead_letters["reason"].to_pylist())
        tester.replay()
    with StreamTester(windowed(HOUR, MINUTE, operators=[sums])) as tester:
        tester.step(rows_at(1, v=big))
        with pytest.raises(BadRow, match=r"total of column v leaves int64 for user 0; use"):
            tester.step(rows_at(11, v=big))


# Edits


EDITED = Stream(
    "s",
    None,
    [
        Aggregate("panes", key=KEY, aggregates=COUNT, window=HOUR),
        Aggregate("sessions", key=KEY, aggregates=COUNT, window=Session("5 minutes", on="at")),
        Deduplicate("once", key=KEY, within="1 hour", on="at"),
    ],
    event_time=EventTime("at", delay="0s"),
)


@pytest.mark.parametrize(
    ("pane", "due", "fits"),
    [
        (10, 20, True),
        (10, 30, True),
        (10, None, False),
        (10, 10, False),
        (10, 25, False),
        (10, 40, False),
        (11, 20, False),
    ],
)
def test_an_edit_leaves_a_pane_due_at_the_end_of_one_of_its_windows(pane: int, due: int | None, fits: bool) -> None:
    edited = Editable.find(EDITED, "panes", "totals")
    schema, variable = edited.schema, edited.variable
    at = [None if minute is None else BEGIN + minute * MINUTE for minute in (pane, due)]
    rows = pa.table({"user": [1], "pane": at[:1], "due": pa.array(at[1:], ROWS.field("at").type), "n": [5]})
    if fits:
        assert cast_changes(rows, schema, "rows", variable=variable).num_rows == 1
        return
    with pytest.raises(UsageError, match=r"^rows: no window with the pane .* ends at its due .*, and so in 1 rows"):
        cast_changes(rows, schema, "rows", variable=variable)
    gone = rows.append_column(DELETED, pa.array([True]))
    assert cast_changes(gone, schema, "rows", variable=variable).num_rows == 1


@pytest.mark.parametrize("name", CASES)
def test_an_edit_may_put_back_what_there_is(name: str) -> None:
    window, begin, unit = CASES[name]
    stream, times = windowed(window, DELAY * unit), [begin + number * unit for number in range(60)]
    with StreamTester(stream) as tester:
        for start in range(0, 60, 15):
            tester.step(table_of((0, at, 1) for at in times[start : start + 15]))
            rows = tester.state("a", "totals")
            edited = Editable.find(stream, "a", "totals")
            assert cast_changes(rows, edited.schema, "rows", variable=edited.variable).num_rows == len(rows) > 0


def test_an_edit_cannot_leave_a_timer_without_a_time() -> None:
    edited = Editable.find(EDITED, "once", "seen")
    rows = pa.table({"user": [1, 2], "due": pa.array([None, BEGIN], ROWS.field("at").type)})
    with pytest.raises(UsageError, match="rows: due is null in 1 rows, so they would never fire"):
        cast_changes(rows, edited.schema, "rows", variable=edited.variable)


SKETCHED = Aggregate("a", key=KEY, aggregates=[ApproxDistinct("d", of="v"), TopN("t", 2, by="v")])


@pytest.mark.parametrize("window", [None, TEN, Session("10 minutes", on="at")])
def test_an_edit_leaves_aggregates_such_as_they_keep_them(window: Any) -> None:
    """A sketch that is none would stop the stream; a list out of order would give wrong rows."""
    operator = Aggregate("a", key=KEY, aggregates=SKETCHED.aggregates, window=window)
    stream = windowed(window or TEN, DELAY * MINUTE, operators=[operator])
    edited = Editable.find(stream, "a", "totals")
    with StreamTester(stream) as tester:
        tester.step(table_of([(0, BEGIN, 1), (0, BEGIN, 9), (0, BEGIN, 4)]))
        rows = tester.state("a", "totals")

    def cast(**columns: pa.Array) -> pa.Table:
        bent = rows
        for name, column in columns.items():
            bent = bent.set_column(bent.column_names.index(name), name, column)
        return cast_changes(bent, edited.schema, "rows", edited.optional, edited.variable)

    assert cast().num_rows == 1
    [sketch, top] = [name for name in rows.column_names if name.startswith(("d_", "t"))]
    with pytest.raises(UsageError, match="d cannot go on with its state in"):
        cast(**{sketch: pa.array([b"\x00\xff"], rows.schema.field(sketch).type)})
    kept = rows.column(top).to_pylist()[0]
    with pytest.raises(UsageError, match="t does not keep its state as it is given in"):
        cast(**{top: pa.array([kept[::-1]], rows.schema.field(top).type)})


def test_sums_of_floats_sort_by_time_too() -> None:
    operator = Aggregate("a", key=KEY, aggregates=[Sum("f", of="v", type=pa.float64())], window=TEN)
    assert operator.order_by == ("user", "v", "at")


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tumbling("0s", on="at"), "size is 0:00:00: use more than 0"),
        (lambda: Tumbling("soon", on="at"), "window Tumbling: size: 'soon' is not a length"),
        (lambda: Tumbling("1m", on=""), "name the column with the event time"),
        (lambda: Tumbling("1m", on="at", offset="1m"), "offset is 0:01:00: use less than the size"),
        (lambda: Tumbling("1m", on="at", offset="x"), "offset: 'x' is not"),
        (lambda: Tumbling("7 hours", on="at", zone=BERLIN), "7:00:00 is neither whole days nor a part of one"),
        (lambda: Sliding("1 day", "7 hours", on="at", zone=BERLIN), "7:00:00 is neither"),
        (lambda: Tumbling("1 day", on="at", zone="Berlin"), "zone is 'Berlin': use a name like"),
        (lambda: Sliding("1m", "2m", on="at"), "rows would be in no window"),
        (lambda: Sliding("1 day", "1s", on="at"), "are more than 1,440"),
        (lambda: Cumulative("10m", "3m", on="at"), "0:10:00 is not a multiple of 0:03:00"),
        (lambda: Session("0s", on="at"), "gap is 0:00:00"),
    ],
)
def test_a_wrong_window_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": "10 minutes"}, "window is '10 minutes': use Tumbling"),
        ({"emit": "change"}, "emit is 'change': use 'close' or 'update'"),
        ({"emit": "update", "window": None}, "emit='update' is for windows"),
        ({"emit": "update", "window": Session("1m", on="at")}, "not for sessions"),
        ({"map_side": True, "window": Session("1m", on="at")}, "leave out map_side"),
        ({"output": False}, "leave out output=False"),
        ({"aggregates": [Count("due")]}, "due"),
        ({"aggregates": [Count("window_end")]}, "window_end is a column of windows"),
        ({"key": {"window_start": pa.int64()}}, "window_start is a column of windows"),
        ({"key": {"__partial_n": pa.int64()}}, "__partial_n"),
        ({"aggregates": [Count("n", of="__partial_n")]}, "__partial_n is a name of Siltstone's own"),
    ],
)
def test_a_wrong_aggregate_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Aggregate(**{"name": "a", "key": KEY, "aggregates": COUNT, "window": TEN, **fields})


def test_windows_of_another_column_than_the_event_time_are_refused() -> None:
    with pytest.raises(UsageError, match="operator a takes at of source for its event time, and that is then: use "):
        operator = Aggregate("a", key=KEY, aggregates=COUNT, window=TEN)
        Stream("s", None, [operator], event_time=EventTime("then"))
    reader = Aggregate("b", key=KEY, reads="a", aggregates=COUNT, window=TEN)
    with pytest.raises(UsageError, match="operator b takes at of a for its event time, and that is window_time"):
        counted(TEN, readers=[reader])
    with pytest.raises(UsageError, match="the output of a, which it reads, has none"):
        counted(TEN, "update", readers=[reader])


def test_state_of_other_windows_is_refused() -> None:
    recorded = definition_of(counted(TEN), {})
    check_definition("s", recorded, definition_of(counted(TEN), {}))
    for other in (HOUR, Tumbling("10 minutes", on="at", zone=BERLIN), Session("5 minutes", on="at")):
        with pytest.raises(SchemaConflict, match=r"a\.totals changed"):
            check_definition("s", recorded, definition_of(counted(other), {}))


def test_no_rows_make_no_window() -> None:
    with StreamTester(counted(HOUR, "update"), schema=ROWS) as tester:
        assert tester.step(table_of([]))["a"].num_rows == 0
        assert tester.finish()["a"].num_rows == 0


def rows_of(number: int) -> list[Row]:
    """Many rows of many users."""
    return [(user, BEGIN + (user % 90) * MINUTE, user) for user in range(number)]


@pytest.mark.parametrize("window", [HOUR, Session("3 minutes", on="at")], ids=["sliding", "sessions"])
def test_keys_are_closed_batch_by_batch(window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("panes", "sessions"):
        monkeypatch.setattr(f"siltstone.aggregates.{module}.ROWS_A_BATCH", 50)
    by_hand = ByHand(window)
    rows = [(user % 40, at, v) for user, at, v in rows_of(500)]
    by_hand.step(rows, None, None)
    by_hand.close(datetime.max.replace(tzinfo=UTC))
    for emit in ("close", *(["update"] if window is HOUR else [])):
        with StreamTester(windowed(window, 5 * MINUTE, emit)) as tester:
            made = read_windows(tester.step(table_of(rows))["a"]) + read_windows(tester.finish()["a"])
            assert len(made) == len(dict(made)) and dict(made) == by_hand.totals
