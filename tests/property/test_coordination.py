"""Seeded schedules of the real coordinator (`tests.simulation.coordination`), and rules broken on purpose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from siltstone.run import protocol_rules as rules
from siltstone.run.protocol_rules import Region
from tests.examples import few_examples
from tests.simulation.coordination import run_schedules

SCHEDULES = few_examples(5000)
"""1,000 in `make test`"""


@pytest.mark.slow
def test_no_schedule_breaks_a_promise() -> None:
    happened = run_schedules(1, SCHEDULES)
    rare = {"kill", "fail", "resets", "overdue", "Fenced", "Unreachable", "swept", "rolled forward"}
    assert all(happened[what] > SCHEDULES // 40 for what in rare), happened


def assume_committed(region: Region, fail: Callable[[Region], Region] = rules.note_failed) -> Region:
    doubted = [each.id for each in region.pending if each.in_doubt]
    return fail(rules.note_committed(region, doubted[0]) if doubted else region)


def assume_failed(region: Region, fail: Callable[[Region], Region] = rules.note_failed) -> Region:
    return fail(replace(region, pending=tuple(replace(each, in_doubt=False) for each in region.pending)))


def forget_logged(region: Region, *, ends: bool, begin: Callable[..., Region] = rules.begin_step) -> Region:
    return replace(begin(region, ends=ends), logged=())


@pytest.mark.parametrize(
    ("rule", "broken", "first"),
    [
        ("note_failed", assume_committed, 1),
        ("note_failed", assume_failed, 1),
        ("begin_step", forget_logged, 1),
    ],
)
def test_the_schedules_notice_a_broken_rule(
    rule: str, broken: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, rule, broken)
    with pytest.raises(AssertionError, match="seed"):
        run_schedules(first, 1000)
