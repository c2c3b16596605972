"""A durable step of Siltstone beside Spark's RocksDB state store and beside no state at all: `make bench`.

    python -m benchmarks [--quick] [--directory DIR] [--json PATH] [--picture PATH]

Each system runs each workload in a fresh process, on two cores, over the same input files (`benchmarks.workload`,
`benchmarks.systems`), one after the other. Numbers depend on the machine; ratios of one run are what counts.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.memory import watched
from benchmarks.summary import Run, Summary, picture
from benchmarks.systems import SYSTEMS
from benchmarks.workload import Workload

FULL = [
    Workload(300_000, 100_000, warm_up=3, measured=15),
    Workload(3_000_000, 100_000, warm_up=3, measured=15),
    Workload(10_000_000, 100_000, warm_up=3, measured=15),
    Workload(10_000_000, 1_000_000, warm_up=3, measured=10),
]
QUICK = [
    Workload(30_000, 10_000, warm_up=2, measured=8),
    Workload(300_000, 10_000, warm_up=2, measured=8),
]


def measure(system: str, workload: Workload, inputs: Path, scratch: Path) -> Run:
    """One system under one workload, in a process of its own; all it wrote is gone afterwards.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=scratch) as work:
        result = Path(work) / "result.json"
        command = [sys.executable, "-m", "benchmarks.systems", system, str(inputs), work, str(result)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with watched(process.pid) as peak:
            said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{system} at {workload.name} failed:\n{said[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    return Run(
        system=system,
        workload=workload,
        steps=found["steps"],
        resident_bytes=peak.resident,
        anonymous_bytes=peak.anonymous,
        live_heap_bytes=found["live_heap_bytes"],
        load_average=load,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, draw; the exit code does not depend on what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Durable steps, side by side.")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two")
    parser.add_argument("--directory", type=Path, help="where to work: a disk, not memory (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the numbers go")
    parser.add_argument("--picture", type=Path, default=Path("bench.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    progress = Console(stderr=True)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="siltstone-bench-", dir=options.directory) as scratch:
        for workload in QUICK if options.quick else FULL:
            with tempfile.TemporaryDirectory(dir=scratch) as inputs:
                workload.write(Path(inputs) / "input")
                for system in SYSTEMS:
                    progress.print(f"{system} at {workload.name} ...")
                    runs.append(measure(system, workload, Path(inputs) / "input", Path(scratch)))
    summary = Summary(runs)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    numbers = {"machine": machine, "quick": options.quick, **summary.to_json()}
    options.json.write_text(json.dumps(numbers, indent=1))
    picture(runs, options.picture)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for table in summary.tables():
        console.print(table)
    console.print(f"numbers: {options.json}, picture: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
