"""A slice of the simulation of the whole life cycle; `lifecycle_machine` runs many thousand schedules of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.lifecycle_machine import SCHEDULES, perform


@settings(max_examples=30)
@given(SCHEDULES, st.booleans())
def test_no_schedule_breaks_a_promise(schedule: list[tuple[str, int, int]], finish: bool) -> None:
    assert perform(schedule, finish)["checkpoints"] > 1
