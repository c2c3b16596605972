"""Summarize the cluster benchmark: medians, ranges, ratios and goals."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.goals import Goal, Report, table_of
from benchmarks.workload import Workload

CLUSTER, LOCAL = "two workers", "local[2]"
STEP_AT_MOST, DEATH_AT_MOST_S = 1.3, 15.0


@dataclass(frozen=True)
class SideRun:
    """One run of one side.

    Attributes:
        completed_s: when each checkpoint was complete, in seconds since the epoch: the last of the warm-up first, then
            the measured ones.
        cpu_seconds: of all processes of this side in this time; None where they cannot be sampled.
    """

    side: str
    completed_s: Sequence[float]
    cpu_seconds: float | None
    digest: str

    @property
    def steps_s(self) -> list[float]:
        """The seconds of each measured step."""
        return np.diff(self.completed_s).tolist()

    @property
    def wall_s(self) -> float:
        """Seconds per step until the last checkpoint is complete."""
        return (self.completed_s[-1] - self.completed_s[0]) / (len(self.completed_s) - 1)

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds per step."""
        return None if self.cpu_seconds is None else self.cpu_seconds / (len(self.completed_s) - 1)


@dataclass(frozen=True)
class Death:
    """A killed worker: seconds until the next checkpoint with its share, and those that restoring the share took."""

    killed_at: float
    """the part of a median step after which it was killed"""
    seconds: float
    restore_s: float

    @property
    def beyond_restore_s(self) -> float:
        """Seconds that were not the restore."""
        return self.seconds - self.restore_s


def steps_report(workload: Workload, rounds: Sequence[Mapping[str, SideRun]]) -> Report:
    """Make the report of the rounds: medians and ranges of each side, and the ratio within each round."""
    title = f"a step at {workload.name}: rounds: {len(rounds)}, {load_text()}"
    heads = ("side", "wall s per step, by round", "median step s", "min to max", "CPU s per step, by round")
    report = Report([table := table_of(title, *heads)])
    for side in (LOCAL, CLUSTER):
        runs = [each[side] for each in rounds]
        steps = [seconds for run in runs for seconds in run.steps_s]
        walls = ", ".join(f"{run.wall_s:.3f}" for run in runs)
        cpus = ", ".join("-" if run.cpu_s is None else f"{run.cpu_s:.2f}" for run in runs)
        table.add_row(side, walls, f"{median(steps):.3f}", f"{min(steps):.3f} to {max(steps):.3f}", cpus)
    ratios = [each[CLUSTER].wall_s / each[LOCAL].wall_s for each in rounds]
    what = f"wall time per step, {workload.name}: {CLUSTER} / {LOCAL}"
    report.goals = [Goal.of_rounds(what, ratios, at_most=STEP_AT_MOST)]
    cpu = [(each[CLUSTER].cpu_s, each[LOCAL].cpu_s) for each in rounds]
    if both := [ours / theirs for ours, theirs in cpu if ours and theirs]:
        report.goals.append(Goal.of_rounds(f"CPU seconds per step, {workload.name}: {CLUSTER} / {LOCAL}", both))
    plain = [{side: vars(run) for side, run in each.items()} for each in rounds]
    report.numbers = {"rounds": plain, "ratios": ratios}
    return report


def deaths_report(workload: Workload, deaths: Sequence[Death]) -> Report:
    """Make the report of the kills; the goal is for the worst of them."""
    title = f"a worker is killed at {workload.name}: seconds until the next checkpoint, {load_text()}"
    report = Report([table := table_of(title, "killed at", "seconds", "restore of its share", "beyond the restore")])
    for death in deaths:
        cells = (death.seconds, death.restore_s, death.beyond_restore_s)
        table.add_row(f"{death.killed_at:g} of a step", *(f"{each:.2f}" for each in cells))
    beyond = [death.beyond_restore_s for death in deaths]
    what = (
        f"seconds from a worker's death to the next checkpoint beyond its restore, worst (median {median(beyond):.1f})"
    )
    report.goals = [Goal(what, max(beyond), at_most=DEATH_AT_MOST_S)]
    report.numbers = {"deaths": [vars(death) for death in deaths]}
    return report


def load_text() -> str:
    """Describe how busy this machine is; what is measured is part of it."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
