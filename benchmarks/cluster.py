"""Compare a cluster with one machine, and kill workers of the cluster: `make bench-cluster`.

    python -m benchmarks cluster [--quick] [--rounds N] [--kills N] [--directory DIR] [--json PATH]

The cluster is that of `tests.cluster`: Spark standalone on loopback, two workers of one core that share no disk with
each other or with the driver. It needs root for their mount namespaces. One machine is `local[2]`, in namespaces of its
own, too. Both run the same stream through `siltstone run`'s own function: the same input files, a new warehouse in the
same S3 server (versitygw), a new schema of the same PostgreSQL, two subtasks, a checkpoint in each step. Both keep
working state, shuffle and temporary files in memory (tmpfs). They have the same Spark settings, except that the local
JVM has the memory of driver and executors together.

    a step      rounds in which both run one after the other, in new processes, and take turns to be first. The wall
                time per step is that from the last checkpoint of the warm-up to the last of the run, over the steps
                between. The ratio is taken within each round. Digests must be equal at the end.
    a death     workers are killed with SIGKILL in the middle of a step, one after the other, at 1/4, 1/2 and 3/4 of a
                median step. Time counts from the kill until the first checkpoint is complete for which the lost share
                was restored. What that subtask took to restore it is known from the checkpoint's statistics. Then a new
                worker takes the place of the killed one, and the next kill is of the older one.

All of it shares this machine: master, workers, S3 server and database have no cores of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from sqlalchemy import URL

from benchmarks.cluster_run import STREAM
from benchmarks.cluster_summary import CLUSTER, LOCAL, Death, SideRun, deaths_report, steps_report
from benchmarks.cpu import watch_cpu
from benchmarks.goals import Report, goals_table
from benchmarks.rounds import in_turn
from benchmarks.systems import OPERATOR
from benchmarks.workload import Workload
from siltstone.catalog.warehouse import OpenWarehouse
from tests.cluster.cluster import ROOT, Cluster, find_obstacle
from tests.postgres_server import new_schema, postgres_server
from tests.servers import use_test_credentials, versitygw
from tests.store_cases_s3 import fresh_bucket

HOSTS = ("127.0.0.2", "127.0.0.3")
MEASURED = 40
FULL = Workload(3_000_000, 100_000, warm_up=150, measured=150)
QUICK = Workload(300_000, 10_000, warm_up=3, measured=150)
"""A run of the steps reads the first of these. A stream runs for days, and its first minute counts for little: until
about the 150th step each JVM compiles its methods, and a cluster has three of them on the cores where one machine has
one. Around the 30th step a quarter of a cluster's CPU seconds are the compilers'."""
_KILL_AT = (0.25, 0.5, 0.75)
_STEPS_BETWEEN = 3
_MOST_CHECKPOINTS = 100
"""completed without a restore before a kill counts as failed"""
_MOST_S = 900.0
"""most seconds of one run"""


@dataclass(frozen=True)
class Machines:
    """What both sides run on."""

    cluster: Cluster
    database: URL
    inputs: Path

    @contextmanager
    def start(self, side: str, batches: int | None) -> Iterator[tuple[subprocess.Popen, dict[str, Any]]]:
        """Run the stream in a process; yield it with its settings, and kill it at the end of the block.

        Raises:
            RuntimeError: it ended by an error or did not end in time; the message ends with its output.
        """
        settings: dict[str, Any] = self._settings(side)
        order = {"settings": settings, "inputs": str(self.inputs), "batches": batches, "executors": 0}
        if side == CLUSTER:
            order["executors"] = len(self.cluster.workers)
        command = self.cluster.alone([sys.executable, "-m", "benchmarks.cluster_run"])
        own = {**os.environ, **self.cluster.private_variables()}
        with new_schema(self.database) as catalog, tempfile.TemporaryFile("w+") as log:
            settings["catalog"] = catalog
            process = subprocess.Popen(
                command, cwd=ROOT, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            timer = threading.Timer(_MOST_S, process.kill)
            timer.start()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(order))
                process.stdin.close()
                yield process, settings
            except Exception as error:
                process.kill()
                log.seek(0)
                raise RuntimeError(f"{side}: {error}; its output:\n{log.read()[-4000:]}") from error
            finally:
                timer.cancel()
                process.kill()
                process.wait()

    def _settings(self, side: str) -> dict[str, Any]:
        private = self.cluster.private
        _, bucket = fresh_bucket(versitygw())
        spark = {
            **self.cluster.settings(),
            # Without what makes a JVM of the tests start fast and run slowly. A worker is a machine of one core.
            "spark.executor.extraJavaOptions": f"-XX:-UsePerfData -XX:ActiveProcessorCount=1 "
            f"-Djava.io.tmpdir={private}/tmp",
            # As in the driver: by default executors log a dozen lines per task, which their worker copies one by one.
            "spark.log.level": "ERROR",
            "spark.driver.memory": "1g" if side == CLUSTER else "2g",
        }
        return {
            "warehouse": f"s3://{bucket}/state?endpoint={versitygw().endpoint}&region=us-east-1"
            f"&local={private / 'warehouse'}",
            "master": self.cluster.master if side == CLUSTER else LOCAL,
            "parallelism": len(HOSTS),
            "spark": spark,
        }


def checkpoints_of(process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """Read the checkpoints that a process reports, as they come.

    Raises:
        RuntimeError: it ended by an error.
    """
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    if process.wait():
        raise RuntimeError(f"the stream ended with {process.returncode}")


def run_side(machines: Machines, side: str, workload: Workload, measured: int) -> SideRun:
    """Run one side through load, warm-up and the measured steps."""
    first = workload.first_measured
    with machines.start(side, first + measured) as (process, _):
        roots = [process.pid, *(machines.cluster.processes if side == CLUSTER else [])]
        with watch_cpu(*roots) as cpu:
            found = list(checkpoints_of(process))
    if len(found) != first + measured:
        raise RuntimeError(f"{side} completed {len(found)} checkpoints, not {first + measured}")
    completed_s = [each["completed_s"] for each in found[first - 1 :]]
    return SideRun(side, completed_s, cpu.between(completed_s[0], completed_s[-1]), found[-1]["digest"])


def run_rounds(machines: Machines, workload: Workload, rounds: int, measured: int) -> list[dict[str, SideRun]]:
    """Run both sides in each round; who is first alternates."""
    progress, found = Console(stderr=True), []
    for number in range(rounds):
        runs = {}
        for side in in_turn((LOCAL, CLUSTER), number):
            progress.print(f"round {number + 1}: {side} at {workload.name} ...")
            runs[side] = run_side(machines, side, workload, measured)
        if len({each.digest for each in runs.values()}) != 1:
            raise RuntimeError("the two sides came to different states")
        found.append(runs)
    return found


def run_deaths(machines: Machines, workload: Workload, kills: int) -> list[Death]:
    """Kill worker after worker of one run."""
    cluster, progress, found = machines.cluster, Console(stderr=True), list[Death]()
    with machines.start(CLUSTER, None) as (process, settings):
        checkpoints = checkpoints_of(process)
        seen = [next(checkpoints) for _ in range(workload.first_measured + _STEPS_BETWEEN + 1)]
        step_s = median(np.diff([each["completed_s"] for each in seen[workload.first_measured :]]).tolist())
        with OpenWarehouse.open_existing(settings["warehouse"], settings["catalog"]) as place:
            for number in range(kills):
                lost, part = cluster.workers[0], _KILL_AT[number % len(_KILL_AT)]
                time.sleep(part * step_s)
                killed_s = time.time()
                cluster.remove(lost)
                restored, restore_s = next_restore(place, checkpoints, killed_s)
                found.append(Death(part, restored["completed_s"] - killed_s, restore_s))
                progress.print(f"kill {number + 1}: {found[-1].seconds:.1f} s, restore {restore_s:.1f} s ...")
                if number + 1 < kills:
                    cluster.add_worker(lost.host)
                    next_restore(place, checkpoints, time.time())  # of what moves to the new worker
                    for _ in range(_STEPS_BETWEEN):
                        next(checkpoints)
    return found


def next_restore(
    place: OpenWarehouse, checkpoints: Iterator[dict[str, Any]], after_s: float
) -> tuple[dict[str, Any], float]:
    """Wait for a checkpoint after a time for which a subtask was restored, or rolled forward where its host had older
    state of it; return it with the seconds that this took.

    Raises:
        RuntimeError: many checkpoints had neither, or the input has ended.
    """
    for _ in range(_MOST_CHECKPOINTS):
        if (checkpoint := next(checkpoints, None)) is None:
            raise RuntimeError("the input ended before a subtask was restored")
        statistics = place.catalog.checkpoints.get(STREAM.name, checkpoint["id"]).statistics
        seconds = statistics["operators"][OPERATOR]["seconds"]
        restore_s = seconds.get("restore", seconds.get("forward"))
        if restore_s is not None and checkpoint["completed_s"] > after_s:
            return checkpoint, restore_s
    raise RuntimeError("no subtask was restored or rolled forward")


def measure(scratch: Path, workload: Workload, rounds: int, kills: int, measured: int) -> Iterator[tuple[str, Report]]:
    """Start servers and cluster, and measure both parts."""
    use_test_credentials()
    with postgres_server() as database, Cluster(scratch) as cluster:
        for host in HOSTS:
            cluster.add_worker(host)
        machines = Machines(cluster, database, cluster.shared / "input")
        workload.write(machines.inputs)
        if rounds:
            yield "steps", steps_report(workload, run_rounds(machines, workload, rounds, measured))
        if kills:
            yield "deaths", deaths_report(workload, run_deaths(machines, workload, kills))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cluster", description="A cluster and one machine.")
    parser.add_argument("--quick", action="store_true", help="a small state")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the comparison (default: 3)")
    parser.add_argument("--kills", type=int, default=3, help="workers to kill (default: 3)")
    parser.add_argument("--directory", type=Path, help="temporary files (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("bench-cluster.json"), help="file for the numbers")
    options = parser.parse_args(arguments)
    if obstacle := find_obstacle():
        parser.exit(1, f"{obstacle}\n")
    console, reports = Console(width=None if sys.stdout.isatty() else 150), dict[str, Report]()
    with tempfile.TemporaryDirectory(prefix="siltstone-cluster-", dir=options.directory) as scratch:
        workload = QUICK if options.quick else FULL
        for name, report in measure(Path(scratch), workload, options.rounds, options.kills, MEASURED):
            reports[name] = report
            for table in report.tables:
                console.print(table)
    options.json.write_text(json.dumps({name: report.numbers for name, report in reports.items()}, indent=1))
    goals = [goal for report in reports.values() for goal in report.goals]
    console.print(goals_table(goals, "cluster: goals"))
    console.print(f"numbers: {options.json}")
    return 1 if any(goal.is_kept is False for goal in goals) else 0
