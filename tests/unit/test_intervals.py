"""Checkpoints by time: when the interval of a coordinator ends, by its clock."""

import pytest

from siltstone.run.coordinator import Coordinator
from siltstone.run.protocol_rules import Interval, open_region


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


def take_step(coordinator: Coordinator, clock: Clock, at_s: float) -> bool:
    """Take a step at a time; return whether it ends in a checkpoint."""
    clock.at_s = at_s
    ends = coordinator.begin_step().ends
    coordinator.acknowledge("a")
    return ends


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock, max_pending: int) -> Coordinator:
    return Coordinator(open_region(1, ["a"], max_pending=max_pending), Interval(seconds=10), clock)


def test_a_checkpoint_is_taken_every_so_many_seconds(clock: Clock) -> None:
    coordinator = opened(clock, 1)
    assert [take_step(coordinator, clock, 100 + s) for s in (3, 9, 10)] == [False, False, True]
    coordinator.store(lambda checkpoint: coordinator.begin_storing(checkpoint.id))
    clock.at_s = 114
    coordinator.commit(lambda _: None)
    assert [take_step(coordinator, clock, 100 + s) for s in (15, 19, 25)] == [False, False, True]


def test_steps_beside_a_pending_checkpoint_do_not_end_in_more(clock: Clock) -> None:
    """It may be on its way for longer than the step after it takes."""
    coordinator = opened(clock, 3)
    ends = [take_step(coordinator, clock, 100 + s) for s in (10, 11, 19, 20, 21, 31)]
    assert ends == [True, False, False, True, False, True]


def test_an_interval_without_input_ends_in_time(clock: Clock) -> None:
    coordinator = opened(clock, 2)
    assert take_step(coordinator, clock, 110) and not take_step(coordinator, clock, 112)
    clock.at_s = 119
    assert not coordinator.is_overdue()
    clock.at_s = 120
    assert coordinator.is_overdue()
