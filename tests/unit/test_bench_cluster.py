"""The cluster benchmark's arithmetic: what a step is, the ratio of a round, the worst death."""

import pytest

from benchmarks.cluster_summary import CLUSTER, LOCAL, Death, SideRun, deaths_report, steps_report
from benchmarks.workload import Workload

WORKLOAD = Workload(3_000_000, 100_000, 3, 150)


def side(name: str, *steps_s: float, cpu_s: float | None = None) -> SideRun:
    completed = [1000.0]
    for each in steps_s:
        completed.append(completed[-1] + each)
    return SideRun(name, completed, cpu_s, "digest")


def test_a_step_takes_the_time_between_the_ends_of_two_checkpoints() -> None:
    run = side(LOCAL, 1.0, 2.0, 6.0, cpu_s=12.0)
    assert run.steps_s == pytest.approx([1, 2, 6])
    assert (run.wall_s, run.cpu_s) == (pytest.approx(3.0), 4.0)


def test_the_ratio_is_taken_within_each_round() -> None:
    """A round in which the machine is slow slows both of its sides, and counts as any other."""
    rounds = [
        {LOCAL: side(LOCAL, 1.0, 1.0, cpu_s=4), CLUSTER: side(CLUSTER, 1.2, 1.2, cpu_s=6)},
        {LOCAL: side(LOCAL, 10.0, 10.0, cpu_s=4), CLUSTER: side(CLUSTER, 14.0, 14.0, cpu_s=8)},
        {LOCAL: side(LOCAL, 2.0, 2.0, cpu_s=4), CLUSTER: side(CLUSTER, 2.0, 2.0, cpu_s=4)},
    ]
    report = steps_report(WORKLOAD, rounds)
    step, cpu = report.goals
    assert (step.measured, step.at_most, step.is_kept) == (pytest.approx(1.2), 1.3, True)
    assert (step.low, step.high) == (pytest.approx(1.0), pytest.approx(1.4))
    assert (cpu.measured, cpu.is_kept) == (1.5, None)
    missed, *_ = steps_report(WORKLOAD, rounds[1:2]).goals
    assert missed.measured == pytest.approx(1.4) and missed.is_kept is False


def test_the_worst_death_has_to_keep_the_goal() -> None:
    """What the restore of the share took does not count."""
    deaths = [Death(0.25, 17.0, 3.0), Death(0.5, 4.0, 1.0), Death(0.75, 19.5, 4.0)]
    (missed,) = deaths_report(WORKLOAD, deaths).goals
    assert (missed.measured, missed.is_kept) == (15.5, False) and "median 14.0" in missed.what
    (met,) = deaths_report(WORKLOAD, deaths[:2]).goals
    assert (met.measured, met.is_kept) == (14.0, True)
