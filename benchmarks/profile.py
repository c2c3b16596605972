"""Show where the time of a step goes, phase by phase: `make profile`.

    python -m benchmarks.profile run WORK       what is profiled, in a process of its own

A stream with `Aggregate`, each micro-batch a checkpoint with a sink, loads its state and warms up. A second run, with
its working state at hand, goes on under py-spy. That samples the stacks of all threads of the driver and of Spark's
Python workers, `RATE` times a second, whether they run or wait. What lies below one function of Siltstone is a phase
(`benchmarks.flames`). Spark's event log says what a step's job waits for, as medians over the steps.

py-spy reads other processes' memory: a container may have to allow that (`--cap-add SYS_PTRACE`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from rich.console import Console
from rich.table import Table

import siltstone as st
from benchmarks.flames import by_phase, draw, phase_table, read_stacks
from benchmarks.goals import table_of
from benchmarks.systems import CORES, OPERATOR, SPARK, source
from benchmarks.workload import FILES_A_STEP, KEY, VALUE, Workload
from siltstone.aggregates.operator import Aggregate, Count, Max, Min, Sum
from siltstone.spark.session import spark_session

RATE = 50
"""samples per second: more slow down what they measure"""
INPUTS, LATER, EVENTS = "inputs", "later", "events"


def profile(work: Path, workload: Workload) -> Path:
    """Load, warm up, and run the steps under py-spy; return the file of stacks.

    Raises:
        RuntimeError: a run failed, or py-spy may not read the processes; the message ends with its output.
    """
    inputs, later, stacks = work / INPUTS, work / LATER, work / "stacks.txt"
    workload.write(inputs)
    later.mkdir()
    for path in sorted(inputs.iterdir())[workload.first_measured * FILES_A_STEP :]:
        path.rename(later / path.name)
    run_stream = [sys.executable, "-m", "benchmarks.profile", "run", str(work)]
    _succeed(run_stream)
    for path in later.iterdir():
        path.rename(inputs / path.name)
    spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--subprocesses", "--idle", "--nonblocking"]
    spy += ["--rate", str(RATE), "--format", "raw", "--output", str(stacks)]
    _succeed([*spy, "--", *run_stream])
    return stacks


def _succeed(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def run(work: Path) -> None:
    """Run the stream over the input that is there."""
    events = work / EVENTS
    events.mkdir(exist_ok=True)
    log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
    functions = [Count("rows"), Sum("total", of=VALUE), Min("least", of=VALUE), Max("most", of=VALUE)]
    operators = [Aggregate(OPERATOR, key={KEY: pa.int64()}, aggregates=functions)]
    stream = st.Stream("profiled", None, operators, sinks={OPERATOR: take})
    spark = spark_session(f"local[{CORES}]", {**SPARK, **log, "spark.eventLog.rolling.enabled": "false"}, steps=True)
    settings = {"warehouse": str(work / "warehouse"), "parallelism": CORES}
    rows = source(spark, str(work / INPUTS))
    st.write_stream(rows, stream, trigger={"availableNow": True}, **settings).await_termination()
    spark.stop()


def take(rows: DataFrame, _: int) -> None:
    """Take the rows as Arrow: the sink."""
    rows.toArrow()


def job_table(events: Path, steps: int, title: str) -> Table:
    """Make a table of what the jobs of the last `steps` steps waited for, from Spark's event log: medians."""
    jobs = list(read_jobs(events))
    widest = max(len(job["stages"]) for job in jobs)
    found = [parts_of(job) for job in jobs if len(job["stages"]) == widest and job["tasks"]][-steps:]
    table = table_of(title, "part", "ms")
    for name in found[-1]:
        table.add_row(name, f"{median(parts[name] for parts in found if name in parts):.1f}")
    return table


def read_jobs(events: Path) -> Iterator[dict[str, Any]]:
    """Read jobs from an event log: when they began and ended, and the tasks of their stages (ms since the epoch)."""
    jobs: dict[int, dict[str, Any]] = {}
    of_stage: dict[int, dict[str, Any]] = {}
    for line in events.read_text().splitlines():
        event = json.loads(line)
        match event["Event"]:
            case "SparkListenerJobStart":
                job = {"began": event["Submission Time"], "stages": sorted(event["Stage IDs"]), "tasks": []}
                jobs[event["Job ID"]] = job
                of_stage |= dict.fromkeys(event["Stage IDs"], job)
            case "SparkListenerTaskEnd":
                info, metrics = event["Task Info"], event["Task Metrics"]
                ran, unpacked = metrics["Executor Run Time"], metrics["Executor Deserialize Time"]
                task = (event["Stage ID"], info["Launch Time"], info["Finish Time"], ran, unpacked)
                of_stage[event["Stage ID"]]["tasks"].append(task)
            case "SparkListenerJobEnd":
                jobs[event["Job ID"]]["ended"] = event["Completion Time"]
                yield jobs[event["Job ID"]]


def parts_of(job: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each part of a job."""
    parts, before = dict[str, float](), job["began"]
    for number, stage in enumerate(job["stages"], 1):
        tasks = [task for task in job["tasks"] if task[0] == stage]
        if not tasks:
            continue
        name = f"stage {number}"
        began, ended = min(task[1] for task in tasks), max(task[2] for task in tasks)
        parts |= {f"until {name} begins": began - before, f"{name}, from its first task to its last": ended - began}
        parts |= {f"{name}: its slowest task runs": max(task[3] for task in tasks)}
        parts |= {f"{name}: a task is unpacked": max(task[4] for task in tasks)}
        before = ended
    return parts | {"until the job ends": job["ended"] - before, "the job": job["ended"] - job["began"]}


def main(arguments: list[str] | None = None) -> int:
    """Profile, print and draw."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:
        run(Path(arguments[1]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description="Show where a step's time goes.")
    parser.add_argument("--rows", type=int, default=300_000, help="keys of the state (default: 300,000)")
    parser.add_argument("--step-rows", type=int, default=10_000, help="keys per step (default: 10,000)")
    parser.add_argument("--steps", type=int, default=100, help="steps that are profiled (default: 100)")
    parser.add_argument("--directory", type=Path, help="temporary files: a disk, not memory (default: the system's)")
    parser.add_argument("--picture", type=Path, default=Path("profile.png"), help="PNG or SVG file (profile.png)")
    options = parser.parse_args(arguments)
    workload = Workload(options.rows, options.step_rows, warm_up=20, measured=options.steps)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(prefix="siltstone-profile-", dir=options.directory) as scratch:
        work = Path(scratch)
        phases = by_phase(read_stacks(profile(work, workload)))
        newest = max((work / EVENTS).iterdir(), key=lambda path: path.stat().st_mtime)
        console.print(phase_table(phases, RATE, options.steps, f"where a step's time goes, {workload.name}: means"))
        console.print(job_table(newest, options.steps, "the job of a step, from Spark's event log: medians"))
    draw(phases, RATE, options.steps, options.picture, f"a step of {workload.name}, {options.steps} steps")
    console.print(f"picture: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
