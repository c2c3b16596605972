"""Event times at the edges of what there is, and clocks that are followed under another definition."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from siltstone.catalog.records.steps import Step, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import BadRow, UsageError
from siltstone.operator import SOURCE, Due, OpaqueState, Operator, Rows, State, Timer, ValueState
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.clock_rules import SourceClock, decode_clock
from siltstone.time.event_time import EventTime
from tests.region_run import RegionRun
from tests.timed_streams import BEGIN, TIME, Alarms, Sessions, at, clicks, timed

AHEAD = timedelta(days=36500)
POLICY = policy_by_name("marginal-cost", PolicyOptions())


class Ends(Operator):
    """Sets a timer of each row's time."""

    name = "ends"
    key = {"user": pa.int64()}  # noqa: RUF012
    end = Timer()

    def process(self, rows: Rows, state: State) -> None:
        state.end.set(rows.keys, at(0))

    def on_timer(self, due: Due, state: State) -> None:
        pass


def test_the_least_time_of_all_is_one_that_a_run_goes_on_from() -> None:
    least = pa.array([-(1 << 63)]).view(TIME)
    with StreamTester(timed("s", operators=[Ends()])) as tester:
        tester.step({"user": [1], "at": least})
        tester.restart(lost=True)
        tester.step({"user": [1], "at": [at(0)]})
        assert tester.watermark == datetime.min.replace(tzinfo=UTC)
        assert tester.replay() == 2


def test_a_watermark_before_the_year_1_is_not_the_end() -> None:
    with StreamTester(timed("s", operators=[Ends()])) as tester:
        tester.step([{"user": 1, "at": datetime(1, 1, 1, tzinfo=UTC)}])
        tester.step([{"user": 1, "at": at(20)}])
        assert tester.watermark == datetime.min.replace(tzinfo=UTC)
        tester.step()
        assert tester.watermark == at(15)


@pytest.mark.parametrize("day", [-(1 << 31), 106_751_991 + (1 << 9), (1 << 31) - 1])
def test_a_day_that_microseconds_have_no_room_for_is_not_another_day(day: int) -> None:
    days = pa.array([day, 20_000], pa.int32()).view(pa.date32())
    with StreamTester(timed("s", operators=[Ends()])) as tester:
        if day > 0:
            with pytest.raises(BadRow, match="too far ahead"):
                tester.step({"user": [1, 2], "at": days})
            return
        tester.step({"user": [1, 2], "at": days})
        tester.step()
        assert tester.watermark == datetime(2024, 10, 3, 23, 55, tzinfo=UTC)


class Passing(Operator):
    """Passes on rows that it combines before the shuffle, and does not go by event time itself."""

    name = "passing"
    key = {"user": pa.int64()}  # noqa: RUF012
    combined = {"user": pa.int64(), "at": TIME}  # noqa: RUF012
    output = pa.schema([("user", pa.int64()), ("at", TIME)])
    output_time = "at"
    counts = ValueState({"n": pa.int64()})

    def combine(self, table: pa.Table) -> pa.Table:
        return table.select(["user", "at"])

    def process(self, rows: Rows, state: State) -> pa.Table:
        return rows.table.select(["user", "at"])


def test_a_watermark_that_no_operator_would_measure_is_refused() -> None:
    ends = Ends()
    ends.reads = "passing"
    with pytest.raises(UsageError, match="one operator must read the source by key and not combine rows"):
        timed("s", operators=[Passing(), ends])


def test_a_column_of_the_source_does_not_count_late_rows() -> None:
    rows = [{"user": 1, "at": at(20), "__rows": "x"}, {"user": 2, "at": at(1), "__rows": "y"}]
    with StreamTester(timed("s", operators=[Ends()])) as tester:
        tester.step(rows)
        tester.step(rows[:1])
        tester.step(rows)
        assert tester.late == {"ends": 1}


def test_each_partition_has_a_name_of_its_own() -> None:
    event_time = EventTime("at", per=("a", "b"), max_ahead=AHEAD)
    rows = [("x,y", "z"), ("x", "y,z"), (None, "z"), ("None", "z")]
    given = [{"user": 1, "at": at(n), "a": a, "b": b} for n, (a, b) in enumerate(rows)]
    with StreamTester(timed("s", operators=[Ends()], event_time=event_time)) as tester:
        tester.step(given)
        tester.step()
        assert tester.watermark == at(0), "that which lags most holds it back"


def test_the_event_time_of_a_checkpoint_is_that_of_the_source_alone() -> None:
    class Later(Ends):
        reads = "sessions"

    stream = timed("s", operators=[Sessions(), Later()], sinks={})
    with StreamTester(stream) as tester:
        tester.step(clicks((1, 0), (2, 30)))
        tester.finish()
        checkpoints = tester._place.catalog.checkpoints.list("s")  # noqa: SLF001
        assert [each.event_time_max for each in checkpoints] == [at(30)] * 2


class Logged(Operator):
    """Notes the timers of all keys of a key group, in the order in which they fire."""

    name = "logged"
    key = {"user": pa.int64()}  # noqa: RUF012
    first, second = Timer(), Timer()
    fired = OpaqueState(list, lambda of: json.dumps(of).encode(), json.loads)

    def process(self, rows: Rows, state: State) -> None:
        for name, timer in (("first", state.first), ("second", state.second)):
            times = rows.last(name, by="at")
            some = np.flatnonzero(pc.is_valid(times))
            if len(some):
                timer.set(rows.keys.take(some), times.take(pa.array(some)))

    def on_timer(self, due: Due, state: State) -> None:
        users, groups = due.keys.columns["user"].to_pylist(), due.keys.key_groups.tolist()
        for user, group in zip(users, groups, strict=True):
            state.fired[group] = [*state.fired[group], [due.timer, user]]


def test_timers_of_the_keys_of_a_group_fire_in_one_order_whatever_the_parallelism() -> None:
    random = np.random.default_rng(1)
    rows: dict[str, Any] = {"user": np.arange(60), "at": [BEGIN] * 60}
    for name in ("first", "second"):
        rows[name] = [at(n) if n < 20 else None for n in random.integers(0, 30, 60).tolist()]
    stream, digests = timed("s", operators=[Logged()], max_parallelism=8), set()
    for parallelism in (1, 3, 8):
        with StreamTester(stream, parallelism=parallelism, schema={"first": TIME, "second": TIME}) as tester:
            tester.step(rows)
            tester.finish()
            digests.add(tester.digest)
            tester.replay(parallelism=2)
    assert len(digests) == 1


class Following(RegionRun):
    """Decides the clocks of its own steps."""

    def _clock(self) -> str:
        return ""

    def follow_one(self, step: Step, *, ends: bool) -> None:
        """Take one logged step."""
        self._take(step, {SOURCE: rows_of(step.offsets)}, ends)
        if ends:
            self.end_interval()


BATCHES = [clicks((1, 0)), clicks((2, 5)), clicks((1, 30), (2, 31)), clicks((3, 60))]
BY_PART = EventTime("at", delay="5 minutes", per="from", max_ahead=AHEAD)


def rows_of(offsets: str) -> pa.Table:
    return BATCHES[int(offsets.splitlines()[2])]


def rolled_back(place: OpenWarehouse, before: Stream, after: Stream) -> tuple[list[Any], Following]:
    """A stream of four checkpoints that was rolled back to the first; their clocks, and a run that is to follow."""
    run = Following(place, before, POLICY)
    for number, rows in enumerate(BATCHES):
        run.step(rows, offsets=f"v1\n{{}}\n{number}")
        run.region.deliver(dict.fromkeys(before.sinks, lambda _: None))
    run.region.close("done")
    clocks = clocks_of(place)
    run = Following(place, before, POLICY)
    place.catalog.rollbacks.roll_back("s", run.region.epoch, 1, "a test", "a test")
    run.region.close("done")
    return clocks, Following(place, after, POLICY)


def clocks_of(place: OpenWarehouse) -> list[Any]:
    """What was decided of each recorded step's clock: now, W and W'."""
    clocks = [decode_clock(step.clock) for step in place.catalog.input_log.list("s", 99)]
    sources = [(clock, clock.sources.get(SOURCE, SourceClock())) for clock in clocks if clock]
    return [(clock.now, one.watermark, one.before) for clock, one in sources]


@pytest.mark.parametrize("sinks", [(), ("sessions",)])
def test_logged_steps_have_their_clocks_also_if_partitions_are_told_in_another_way(
    place: OpenWarehouse, sinks: Sequence[str]
) -> None:
    stream = timed("s", sinks=dict.fromkeys(sinks))
    clocks, run = rolled_back(place, stream, replace(stream, event_time=BY_PART))
    (first, ends), *_ = with_ends(run.region.logged_steps())
    run.follow_one(first, ends=ends)
    assert [step.step for step in place.catalog.input_log.list_logged("s")] == [3, 4], "the others still come"
    run.follow(rows_of)
    assert clocks_of(place) == clocks
    newest = decode_clock(run.region.clock.text)
    assert newest and [part.high for part in newest.sources[SOURCE].partitions.values()] == [
        int(at(minute).timestamp()) * 1_000_000 for minute in (31, 60)
    ], "what came before the newest step is known, too"


def test_logged_steps_come_again_where_event_time_is_new(place: OpenWarehouse) -> None:
    stream, with_time = (timed("s", operators=[Alarms()], event_time=of) for of in ("at", BY_PART))
    clocks, run = rolled_back(place, stream, with_time)
    run.follow(rows_of)
    assert [now for now, *_ in clocks_of(place)] == [now for now, *_ in clocks]
    assert clocks_of(place)[-1][1] == int(at(25).timestamp()) * 1_000_000
