"""Compare an operator that a user wrote in Python with the same as Spark's `StatefulProcessor`.

Four aggregates per key (`benchmarks.python_systems`), over a state of S keys, K distinct random keys per step. Each
system runs in a fresh process, over the same input files, one after the other. Measured is the wall time from the
beginning of the first measured step until the last one's checkpoint is complete, divided by the number of steps.
"""

import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.goals import Goal, Report, table_of
from benchmarks.step import measure
from benchmarks.summary import Run
from benchmarks.workload import Workload

MODULE = "benchmarks.python_systems"
TITLES = {
    "operator": "Siltstone, Operator",
    "keyed": "Siltstone, KeyedProcessor",
    "rows": "Spark, transformWithState",
    "pandas": "Spark, transformWithStateInPandas",
}
FULL = (Workload(100_000, 10_000, warm_up=3, measured=10), Workload(100_000, 100_000, warm_up=0, measured=2))
QUICK = (Workload(10_000, 1_000, warm_up=1, measured=3),)
OURS, THEIRS = "operator", "pandas"
AT_LEAST = {10_000: 25.0, 100_000: 250.0}
"""keys per step -> how many times the steps of `THEIRS` take those of `OURS`"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    progress, heads = (
        Console(stderr=True),
        ("S, K", "system", "wall s per step", "CPU s per step", "times the Operator's"),
    )
    report = Report([table := table_of("a step of an operator written in Python", *heads, left=2)])
    for workload in QUICK if quick else FULL:
        found: dict[str, Run] = {}
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            inputs = Path(directory) / "input"
            workload.write(inputs)
            for system, title in TITLES.items():
                progress.print(f"{title} at {workload.name} ...")
                found[system] = measure(system, workload, inputs, scratch, MODULE)
        for system, run in found.items():
            times, cpu = run.wall_s / found[OURS].wall_s, "-" if run.cpu_s is None else f"{run.cpu_s:.2f}"
            table.add_row(workload.name, TITLES[system], f"{run.wall_s:.3f}", cpu, f"{times:.1f}")
            if system != OURS:
                at_least = AT_LEAST.get(workload.step_rows) if system == THEIRS else None
                what = f"wall time per step, {workload.name}: {TITLES[system]} / {TITLES[OURS]}"
                report.goals.append(Goal(what, times, at_least=at_least))
        report.numbers[workload.name] = {
            system: {"wall_s": run.wall_s, "cpu_s": run.cpu_s} for system, run in found.items()
        }
    return report
