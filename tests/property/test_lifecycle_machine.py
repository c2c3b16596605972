"""A slice of the simulation of the whole life cycle; `lifecycle_machine` runs many thousand schedules of it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        for number in range(12):
            world.act("run", number, 60)
            world.act("finish", 0, 1)
            world.act("rewind" if number % 4 == 3 else "savepoint", number, 200)
        world.end(finish=True)
        drawn = {f"{operator} drained or read without input" for operator in OPERATORS}
        drawn |= {"operators added", "operators dropped"}
        assert drawn <= world.counts.keys(), drawn - world.counts.keys()
    finally:
        world.close()
