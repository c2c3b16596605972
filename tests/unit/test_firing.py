"""Timers that set themselves again: up to a limit in one step, then in the next; an error if they stand still."""

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from siltstone.errors import UsageError
from siltstone.operator import Due, Operator, Rows, State, Timer, ValueState
from siltstone.testing import StreamTester
from tests.examples import long_form
from tests.timed_streams import BEGIN, clicks, timed


class Minutes(Operator):
    """Counts the minutes since a key's first row, by a timer that sets itself again."""

    name = "minutes"
    key = {"user": pa.int64()}  # noqa: RUF012
    counts = ValueState({"minutes": pa.int64()})
    tick = Timer("processing")
    by = timedelta(minutes=1)

    def process(self, rows: Rows, state: State) -> None:
        state.tick.set(rows.keys, state.clock.now + self.by)

    def on_timer(self, due: Due, state: State) -> None:
        old = state.counts.get(due.keys)["minutes"]
        state.counts.put(due.keys, {"minutes": pc.add(pc.fill_null(old, 0), 1)})
        state.tick.set(due.keys, pc.add(due.at, pa.scalar(self.by)))


class Still(Minutes):
    """Never gets on."""

    by = timedelta(0)


def running(operator: Operator, **options: Any) -> StreamTester:
    return StreamTester(timed("t", operators=[operator], event_time=None), now=BEGIN, **options)


@pytest.mark.parametrize("parallelism", [long_form(1), 3])
def test_a_timer_of_each_minute_catches_up_after_an_outage_step_by_step(parallelism: int) -> None:
    with running(Minutes(), parallelism=parallelism) as one:
        one.step(clicks((1, 0), (2, 0)))
        one.advance("40 hours")
        assert one.state("minutes", "counts")["minutes"].to_pylist() == [1000, 1000]
        for minutes in (2000, 2400, 2400):
            one.advance()
            assert one.state("minutes", "counts")["minutes"].to_pylist() == [minutes, minutes]
        one.replay(parallelism=2)


def test_a_timer_that_stands_still_is_an_error() -> None:
    with running(Still()) as one, pytest.raises(UsageError, match="no later for 1,000 rounds of step 1"):
        one.step(clicks((1, 0), (2, 0)))
