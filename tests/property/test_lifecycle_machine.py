"""A slice of the simulation of the whole life cycle; `lifecycle_machine` runs many thousand schedules of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from siltstone.catalog.records.steps import Step
from siltstone.run import stream_clock
from siltstone.run.stream_clock import StreamClock
from siltstone.time.clock_rules import StepClock, decide_clock
from tests.examples import few_examples, is_thorough
from tests.property.lifecycle_machine import SCHEDULES, Schedule, perform
from tests.simulation.world import World
from tests.simulation.writer import NAME, OPERATORS


@pytest.mark.slow
@settings(max_examples=few_examples(30), derandomize=not is_thorough(), suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, st.booleans())
def test_no_schedule_breaks_a_promise(schedule: Schedule, finish: bool) -> None:
    assert perform(schedule, finish)["run"] > 0


def test_a_run_that_nothing_disturbs_completes_checkpoints() -> None:
    """The simulation takes a run that is refused for no violation: if all were, no schedule could break a promise."""
    world = World()
    try:
        world.act("run", 5, 60)
        world.act("finish", 0, 1)
        assert len(world.oracle.visible(NAME)) >= 3
    finally:
        world.close()


def test_operators_come_and_go_and_pass_on_what_they_held_back_without_input() -> None:
    world = World()
    try:
        for number in range(16):
            world.act("run", number, 60)
            world.act("finish", 0, 1)
            world.act("rewind" if number % 4 == 3 else "savepoint", number, 200)
            world.act("clock", 1, 1)
        world.end(finish=True)
        drawn = {f"{operator} drained or read without input" for operator in OPERATORS}
        drawn |= {"operators added", "operators dropped"}
        drawn |= {f"{operator} fired {how} rows" for operator in OPERATORS[:2] for how in ("with", "without")}
        assert drawn <= world.counts.keys(), drawn - world.counts.keys()
    finally:
        world.close()


def decide_anew(
    clock: StreamClock, step: Step, begin: Callable[..., Step] = StreamClock.begin, **options: bool
) -> Step:
    return begin(clock, replace(step, clock=""), **options)


def go_back(previous: StepClock | None, event_times: Any, now: int, **options: bool) -> StepClock:
    return replace(decide_clock(previous, event_times, now, **options), now=now)


def forget_what_was_late(previous: StepClock | None, *arguments: Any, **options: bool) -> StepClock:
    made = decide_clock(previous, *arguments, **options)
    return replace(made, sources={name: replace(one, before=one.watermark) for name, one in made.sources.items()})


@pytest.mark.parametrize(
    ("place", "name", "broken", "said"),
    [
        (StreamClock, "begin", decide_anew, "was decided anew"),
        (stream_clock, "decide_clock", go_back, "goes back"),
        (stream_clock, "decide_clock", forget_what_was_late, "late in step"),
    ],
)
def test_the_oracle_notices_a_broken_clock(
    place: Any, name: str, broken: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, broken)
    world = World()
    try:
        with pytest.raises(AssertionError, match=said):
            for number in range(20):
                world.act("run", number, 60)
                world.act("finish", 0, 1)
                world.act("rewind", 2, 200)
    finally:
        world.close()
