"""Compare a durable step of Siltstone with Spark's RocksDB state store and with no state.

Each system runs each workload in a fresh process, on two cores, over the same input files (`benchmarks.workload`,
`benchmarks.systems`), one after the other. Three measures of a step: Spark's own time of a trigger; the wall time from
the beginning of the first measured step until the last one's checkpoint is complete; the CPU seconds of all processes
in that time. The latter two are divided by the number of steps. Numbers depend on the machine; compare only the ratios
of one run.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cpu import watch_cpu
from benchmarks.goals import Report
from benchmarks.memory import watch_memory
from benchmarks.summary import TITLES, Run, Summary, measured_span, picture
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


def measure(system: str, workload: Workload, inputs: Path, scratch: Path, module: str = "benchmarks.systems") -> Run:
    """Run one system of a module under one workload in a process of its own, and remove its files.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=scratch) as work:
        result = Path(work) / "result.json"
        command = [sys.executable, "-m", module, system, str(inputs), work, str(result)]
        with (Path(work) / "output").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            with watch_memory(process.pid) as peak, watch_cpu(process.pid) as cpu:
                process.wait()
            # Spark's RocksDB state store may keep the JVM alive for ten minutes after its session has stopped.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode:
                said.seek(0)
                raise RuntimeError(f"{system} at {workload.name} failed:\n{said.read()[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    return Run(
        system=system,
        workload=workload,
        steps=found["steps"],
        resident_bytes=peak.resident,
        anonymous_bytes=peak.anonymous,
        live_heap_bytes=found["live_heap_bytes"],
        cpu_seconds=cpu.between(*measured_span(found["steps"], workload)),
        load_average=load,
    )


def run(scratch: Path, picture_to: Path, *, quick: bool = False) -> Report:
    """Run every system under every workload, and draw a picture."""
    progress = Console(stderr=True)
    runs: list[Run] = []
    for workload in QUICK if quick else FULL:
        with tempfile.TemporaryDirectory(dir=scratch) as inputs:
            workload.write(Path(inputs) / "input")
            for system in TITLES:
                progress.print(f"{system} at {workload.name} ...")
                runs.append(measure(system, workload, Path(inputs) / "input", scratch))
    summary = Summary(runs)
    picture(runs, picture_to)
    return Report(list(summary.tables()), list(summary.goals()), summary.to_json())
