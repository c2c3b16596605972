"""Compare working state in the heap with working state in RocksDB, by alternating rounds of whole runs under Spark.

All sides are `benchmarks.systems`: the same stream over the same input, each micro-batch a checkpoint, in a process of
its own on two cores. Spark's own RocksDB state store runs in each round, too, so that both can be compared with it.
"""

from pathlib import Path

from benchmarks.goals import Report
from benchmarks.rounds import run_rounds
from benchmarks.workload import Workload

HEAP, ROCKSDB, PEER = "siltstone", "siltstone-rocksdb", "rocksdb"
SIDES = {HEAP: "heap", ROCKSDB: "RocksDB", PEER: "Spark's RocksDB store"}
FULL = (Workload(300_000, 10_000, warm_up=3, measured=20), Workload(3_000_000, 100_000, warm_up=3, measured=15))
QUICK = (Workload(30_000, 3_000, warm_up=2, measured=5),)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each workload."""
    rounds = run_rounds(SIDES, QUICK if quick else FULL, 1 if quick else 3, scratch)
    report = Report([rounds.steps_table("a step, by backend")], numbers=rounds.to_json())
    for workload in rounds.workloads:
        for side, other in ((ROCKSDB, HEAP), (HEAP, PEER), (ROCKSDB, PEER)):
            report.goals += rounds.compare_step(workload, side, other)
    return report
