"""Compare a checkpoint in every micro-batch with one in a hundred: what checkpoints cost in throughput.

The sides are `benchmarks.systems`, in alternating rounds (`benchmarks.rounds`). All log each step. The wall time counts
until the last step's checkpoint is complete.
"""

from pathlib import Path

from benchmarks.goals import Report
from benchmarks.rounds import run_rounds
from benchmarks.systems import SELDOM
from benchmarks.workload import Workload

EACH, PENDING, RARE = "siltstone", "siltstone-pending", "siltstone-seldom"
TITLES = {EACH: "each step", PENDING: "each step, 2 pending", RARE: f"each {SELDOM}th step"}
FULL = (Workload(3_000_000, 100_000, warm_up=97, measured=100),)
QUICK = (Workload(300_000, 10_000, warm_up=9, measured=20),)
AT_LEAST = 0.95


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each workload."""
    rounds = run_rounds(TITLES, QUICK if quick else FULL, 1 if quick else 3, scratch)
    report = Report([rounds.steps_table("how often a checkpoint is taken")], numbers=rounds.to_json())
    for workload in rounds.workloads:
        for side in (EACH, PENDING):
            what = f"throughput, {workload.name}: {TITLES[side]} / {TITLES[RARE]}"
            sides = (RARE, workload), (side, workload)
            report.goals += rounds.compare(what, lambda run: run.wall_s, *sides, at_least=AT_LEAST)
            report.goals += rounds.compare(f"CPU seconds, inverse of {what}", lambda run: run.cpu_s, *sides)
    return report
