"""A slice of the simulation of the whole life cycle; `lifecycle_machine` runs many thousand schedules of it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.property.lifecycle_machine import SCHEDULES, Schedule, perform


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, st.booleans())
def test_no_schedule_breaks_a_promise(schedule: Schedule, finish: bool) -> None:
    assert perform(schedule, finish)["run"] > 0
