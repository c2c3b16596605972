"""Compare an operator that a user wrote in Python with the same as Spark's `StatefulProcessor`.

Four aggregates per key (`benchmarks.python_systems`), over a state of S keys, K distinct random keys per step, in
alternating rounds of whole runs (`benchmarks.rounds`).
"""

from pathlib import Path

from benchmarks.goals import Report
from benchmarks.rounds import run_rounds
from benchmarks.workload import Workload

OURS, THEIRS = "operator", "pandas"
KEYED, ROWS = "keyed", "rows"
"""code for one key at a time: ours and Spark's"""
QUICK_TITLES = {OURS: "Siltstone, Operator", THEIRS: "Spark, transformWithStateInPandas"}
TITLES = QUICK_TITLES | {KEYED: "Siltstone, KeyedProcessor", ROWS: "Spark, transformWithState"}
FULL = (Workload(100_000, 10_000, warm_up=2, measured=4), Workload(100_000, 100_000, warm_up=1, measured=2))
QUICK = (Workload(5_000, 1_000, warm_up=2, measured=3),)
AT_LEAST = {10_000: 25.0, 100_000: 250.0}
"""keys per step -> how many times the steps of `THEIRS` take those of `OURS`"""
KEYED_AT_LEAST = 3.0
"""how many times the steps of `ROWS` take those of `KEYED`"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    titles, workloads = (QUICK_TITLES, QUICK) if quick else (TITLES, FULL)
    rounds = run_rounds(titles, workloads, 1 if quick else 3, scratch, "benchmarks.python_systems")
    report = Report([rounds.steps_table("an operator written in Python")], numbers=rounds.to_json())
    for workload in workloads:
        for system in titles:
            if system != OURS:
                at_least = AT_LEAST.get(workload.step_rows) if system == THEIRS else None
                report.goals += rounds.compare_step(workload, system, OURS, less_is_better=False, at_least=at_least)
        if not quick:
            report.goals += rounds.compare_step(workload, ROWS, KEYED, less_is_better=False, at_least=KEYED_AT_LEAST)
    return report
