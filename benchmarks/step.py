"""Compare a durable step of Siltstone with Spark's RocksDB state store and with no state, the floor.

Each system (`benchmarks.systems`) runs each workload (`benchmarks.workload`) in alternating rounds
(`benchmarks.rounds`). Numbers depend on the machine; compare only the ratios of one run.
"""

from pathlib import Path

from benchmarks.goals import Report
from benchmarks.rounds import run_rounds
from benchmarks.summary import TITLES, Summary, picture
from benchmarks.workload import Workload

FULL = [
    Workload(3_000_000, 10_000, warm_up=5, measured=20),
    Workload(300_000, 100_000, warm_up=3, measured=15),
    Workload(3_000_000, 100_000, warm_up=3, measured=15),
    Workload(10_000_000, 100_000, warm_up=3, measured=15),
    Workload(10_000_000, 1_000_000, warm_up=3, measured=10),
]
QUICK = [Workload(300_000, 10_000, warm_up=4, measured=10)]


def run(scratch: Path, picture_to: Path, *, quick: bool = False) -> Report:
    """Run every system under every workload, and draw a picture."""
    rounds = run_rounds(TITLES, QUICK if quick else FULL, 1 if quick else 3, scratch)
    summary = Summary(rounds)
    picture(rounds, picture_to)
    return Report(list(summary.tables()), list(summary.goals()), rounds.to_json())
