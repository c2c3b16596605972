"""Compare an operator of ours, on either backend, with Spark's own query on its RocksDB state store."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goals import Report
from benchmarks.rounds import Run, run_rounds
from benchmarks.workload import Workload

HEAP, OWN_ROCKSDB, PEER = "heap", "rocksdb", "spark"
TITLES = {HEAP: "Siltstone, heap", OWN_ROCKSDB: "Siltstone, RocksDB", PEER: "Spark, RocksDB"}
AT_MOST = 0.4
"""goal of a step on the heap, as a part of Spark's"""


def compare(
    module: str, what: str, workloads: Sequence[Workload], check: Callable[[Run], None], scratch: Path, *, quick: bool
) -> Report:
    """Run a module's systems in alternating rounds.

    Args:
        module: its `SYSTEMS` have the names of `TITLES`.
        what: the title of the table of steps.
        check: checks that a run did what all of them do.
    """
    rounds = run_rounds(TITLES, workloads, 1 if quick else 3, scratch, module)
    report = Report([rounds.steps_table(what)], numbers=rounds.to_json())
    for each in rounds.runs:
        check(each)
    for workload in rounds.workloads:
        report.goals += rounds.compare_step(workload, HEAP, PEER, at_most=None if quick else AT_MOST)
        report.goals += rounds.compare_step(workload, OWN_ROCKSDB, PEER)
    return report
