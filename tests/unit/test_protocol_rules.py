"""The protocol of a region: what each event may follow, and what it leads to."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from siltstone.errors import StateError
from siltstone.run import protocol_rules as rules
from siltstone.run.protocol_rules import Checkpoint, CheckpointState, Interval, Phase, Region

OPERATORS = ("a", "b")


def opened(max_pending: int = 1) -> Region:
    return replace(rules.open_region(3, OPERATORS, completed=7, step=20), max_pending=max_pending)


def with_step(region: Region, *, ends: bool) -> Region:
    region = rules.begin_step(region, ends=ends)
    for operator in OPERATORS:
        region = rules.acknowledge(region, operator)
    return region


def with_checkpoint(region: Region, checkpoint: int) -> Region:
    return rules.note_durable(rules.begin_storing(with_step(region, ends=True), checkpoint), checkpoint)


def committed(region: Region, checkpoint: int) -> Region:
    return rules.note_committed(rules.begin_commit(region), checkpoint)


def test_a_checkpoint_names_the_steps_logged_since_the_one_before() -> None:
    region = with_step(with_step(opened(), ends=False), ends=False)
    assert (region.logged, region.pending, region.next_checkpoint) == ((21, 22), (), 8)
    region = with_checkpoint(region, 8)
    assert region.pending == (Checkpoint(8, (21, 22, 23), CheckpointState.PENDING, durable=True),)
    region = committed(region, 8)
    assert (region.completed, region.completed_step, region.logged, region.pending) == (8, 23, (), ())
    assert rules.state_of(region, 8) is CheckpointState.COMPLETE
    assert rules.state_of(rules.note_delivered(region, 8), 8) is CheckpointState.DELIVERED
    assert rules.state_of(region, 9) is None


def test_a_step_is_logged_once_every_operator_has_acknowledged() -> None:
    region = rules.acknowledge(rules.begin_step(opened(), ends=True), "a")
    assert region.running is not None and region.running.awaited == {"b"} and not region.pending
    assert rules.acknowledge(region, "b").pending == (Checkpoint(8, (21,)),)


def test_checkpoints_complete_in_order_however_their_bytes_arrive() -> None:
    region = with_step(with_step(opened(max_pending=2), ends=True), ends=True)
    region = rules.begin_storing(region, 9)
    assert [each.state for each in region.pending] == [CheckpointState.PREPARED, CheckpointState.PENDING]
    region = rules.note_durable(rules.begin_storing(region, 8), 9)
    assert not rules.may_commit(region, 9), "8 is not complete"
    region = rules.note_durable(region, 8)
    with pytest.raises(StateError, match="checkpoint 9 is not being committed"):
        committed(region, 9)
    region = committed(committed(region, 8), 9)
    assert (region.completed, region.completed_step) == (9, 22)


def test_a_failure_fails_what_is_pending_and_doubt_is_kept() -> None:
    region = rules.note_durable(with_checkpoint(with_checkpoint(opened(max_pending=2), 8), 9), 9)
    failed = rules.note_failed(region)
    assert (failed.phase, rules.state_of(failed, 8)) == (Phase.RESETTING, CheckpointState.FAILED)
    doubted = rules.note_failed(rules.begin_commit(region))
    assert doubted.phase is Phase.RESETTING and doubted.pending[0].in_doubt
    assert rules.state_of(doubted, 8) is CheckpointState.PENDING, "the catalog may have it"
    assert rules.state_of(doubted, 9) is CheckpointState.FAILED
    answered = rules.note_committed(doubted, 8)
    assert (answered.completed, answered.phase) == (8, Phase.RESETTING)
    refused = rules.note_refused(rules.begin_commit(region), 8)
    assert refused == rules.note_refused(doubted, 8) == failed
    assert rules.note_fenced(region).phase is Phase.ENDED


REFUSED: list[tuple[Callable[[], Region], str]] = [
    (lambda: rules.begin_step(rules.begin_step(opened(), ends=False), ends=False), "a step is running"),
    (lambda: rules.begin_step(with_step(opened(), ends=True), ends=True), "1 checkpoints are pending"),
    (lambda: rules.begin_step(rules.note_failed(opened()), ends=False), "the region is resetting"),
    (lambda: rules.begin_step(rules.end_region(opened()), ends=False), "the region is ended"),
    (lambda: rules.acknowledge(opened(), "a"), "operator a has nothing to acknowledge"),
    (lambda: rules.acknowledge(with_step(opened(), ends=True), "a"), "operator a has nothing to acknowledge"),
    (
        lambda: rules.acknowledge(rules.note_failed(rules.begin_step(opened(), ends=True)), "a"),
        "the region is resetting",
    ),
    (lambda: rules.begin_storing(with_step(opened(), ends=False), 8), "checkpoint 8 is not prepared"),
    (lambda: rules.begin_storing(rules.begin_storing(with_step(opened(), ends=True), 8), 8), "8 is not prepared"),
    (lambda: rules.begin_storing(rules.note_failed(with_step(opened(), ends=True)), 8), "the region is resetting"),
    (lambda: rules.note_durable(with_step(opened(), ends=True), 8), "checkpoint 8 is not pending"),
    (lambda: rules.begin_commit(rules.begin_storing(with_step(opened(), ends=True), 8)), "no checkpoint is durable"),
    (lambda: rules.begin_commit(rules.note_failed(with_checkpoint(opened(), 8))), "the region is resetting"),
    (lambda: rules.note_committed(with_checkpoint(opened(), 8), 8), "checkpoint 8 is not being committed"),
    (lambda: rules.note_refused(opened(), 8), "checkpoint 8 is not being committed"),
]


def test_manifests_are_stored_in_order_each_after_the_commit_of_the_one_before() -> None:
    region = with_step(with_step(opened(max_pending=2), ends=True), ends=True)
    assert rules.find_unstored(region).id == 8
    region = rules.note_durable(rules.begin_storing(rules.begin_storing(region, 9), 8), 8)
    with pytest.raises(StateError, match="checkpoint 8 is not complete, which 9 follows"):
        rules.find_unstored(region)
    region = committed(region, 8)
    assert rules.find_unstored(region).id == 9
    with pytest.raises(StateError, match="the region is resetting"):
        rules.find_unstored(rules.note_failed(region))
    with pytest.raises(StateError, match="no checkpoint is prepared"):
        rules.find_unstored(committed(rules.note_durable(region, 9), 9))


@pytest.mark.parametrize(("event", "reason"), REFUSED)
def test_the_protocol_refuses(event: Callable[[], Region], reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        event()


def test_when_an_interval_ends() -> None:
    by_steps, by_time = Interval(steps=2), Interval(steps=2, seconds=10.0)
    region = opened()
    assert not rules.ends_interval(region, by_steps, 99.0)
    assert rules.ends_interval(with_step(region, ends=False), by_steps, 0.0)
    assert not rules.ends_interval(with_step(region, ends=False), by_time, 9.0)
    assert rules.ends_interval(region, by_time, 10.0)
    assert rules.ends_interval(with_step(region, ends=True), by_time, 10.0), "room is another question"


def test_the_timer_completes_a_logged_step_and_nothing_else() -> None:
    by_steps, by_time = Interval(steps=3, idle_s=5.0), Interval(seconds=10.0)
    logged = with_step(opened(), ends=False)
    for region, overdue in [
        (logged, True),
        (opened(), False),
        (rules.begin_step(logged, ends=False), False),
        (with_step(logged, ends=True), False),
        (rules.note_failed(logged), False),
        (rules.end_region(logged), False),
    ]:
        assert rules.is_overdue(region, by_steps, waited_s=99.0, idle_s=5.0) is overdue
        assert rules.is_overdue(region, by_time, waited_s=10.0, idle_s=0.0) is overdue
    assert not rules.is_overdue(logged, by_steps, waited_s=99.0, idle_s=4.9)
    assert not rules.is_overdue(logged, by_time, waited_s=9.9, idle_s=99.0)
