"""Compare working state in the heap with working state in RocksDB, by steps of whole runs under Spark.

Both sides are `benchmarks.systems`: the same stream over the same input, each micro-batch a checkpoint, in a process of
its own on two cores. In each round all sides run once, in the order of the round before turned about. The ratios are
taken within each round: wall time and CPU seconds of all processes until the last checkpoint is complete, per step.
Spark's own RocksDB state store runs in each round, too, so that both can be compared with it.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.goals import Goal, Report, table_of
from benchmarks.step import measure
from benchmarks.summary import Run
from benchmarks.workload import Workload

HEAP, ROCKSDB, PEER = "siltstone", "siltstone-rocksdb", "rocksdb"
SIDES = {HEAP: "heap", ROCKSDB: "RocksDB", PEER: "Spark's RocksDB store"}
FULL = (Workload(300_000, 10_000, warm_up=3, measured=20), Workload(3_000_000, 100_000, warm_up=3, measured=15))
QUICK = (Workload(30_000, 3_000, warm_up=2, measured=5),)

Rounds = Sequence[Mapping[str, Run]]
"""per round, side -> its run"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each workload."""
    load, progress, report = os.getloadavg()[0], Console(stderr=True), Report([])
    for workload in QUICK if quick else FULL:
        rounds: list[Mapping[str, Run]] = []
        with tempfile.TemporaryDirectory(dir=scratch) as inputs:
            workload.write(Path(inputs) / "input")
            for number in range(1 if quick else 3):
                sides = list(SIDES)[:: -1 if number % 2 else 1]
                progress.print(f"round {number + 1} at {workload.name}: {', '.join(sides)} ...")
                rounds.append({side: measure(side, workload, Path(inputs) / "input", scratch) for side in sides})
        add_workload(report, workload.name, rounds, load)
    return report


def add_workload(report: Report, name: str, rounds: Rounds, load: float) -> None:
    """Add the table and the ratios of one workload."""
    heads = ("side", "wall s per step", "min to max", "CPU s per step", "bytes per step")
    report.tables.append(table := table_of(f"a step at {name}, by backend (load {load:.1f} at the start)", *heads))
    for side, title in SIDES.items():
        runs = [each[side] for each in rounds]
        walls, cpus = [run.wall_s for run in runs], [run.cpu_s for run in runs if run.cpu_s is not None]
        table.add_row(
            title,
            f"{median(walls):.3f}",
            f"{min(walls):.3f} to {max(walls):.3f}",
            f"{median(cpus):.2f}" if cpus else "-",
            f"{median(run.delta_bytes for run in runs):,.0f}",
        )
        report.numbers[f"{name}, {side}"] = {"wall_s": walls, "cpu_s": cpus}
    for side, other in ((ROCKSDB, HEAP), (HEAP, PEER), (ROCKSDB, PEER)):
        ratios = sorted(each[side].wall_s / each[other].wall_s for each in rounds)
        what = f"wall time per step, {name}: {SIDES[side]} / {SIDES[other]} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        report.goals.append(Goal(what, median(ratios)))
