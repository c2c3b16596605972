"""Run systems in alternating rounds, each in a process of its own, and compare them.

In each round every system runs a whole workload once, over the same input files; each round turns the order about
(A B, B A). Two times of a step count: Spark's own time of a trigger, and the wall time from the beginning of the first
measured step until the last one's checkpoint is complete, divided by the number of steps, so that nothing hides behind
the trigger. The CPU seconds are those of all processes in that time. A ratio is taken within each round: what else the
machine does meets both sides. Its median counts, and its range over the rounds is its spread.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import watch_cpu
from benchmarks.goals import Goal, spread_of, table_of
from benchmarks.memory import watch_memory
from benchmarks.workload import Workload

MB = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The result of one system under one workload.

    `steps` has the numbers of each micro-batch from `benchmarks.systems`; `base` marks a step that wrote the whole
    state. Memory is by role as in `memory.Peak`; `live_heap_bytes` is the JVM's live heap at the end, after a
    collection. `cpu_seconds` are those of all processes during the measured steps, None where they cannot be sampled.
    """

    system: str
    workload: Workload
    steps: Sequence[dict[str, Any]]
    resident_bytes: dict[str, int]
    anonymous_bytes: dict[str, int]
    live_heap_bytes: int
    load_average: float
    cpu_seconds: float | None = None

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The measured steps."""
        return [s for s in self.steps if s["batch"] >= self.workload.first_measured]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        """The measured steps that wrote only changes; all, if each wrote a base."""
        return [s for s in self.measured if not s["base"]] or self.measured

    @property
    def bases(self) -> int:
        """How many of the measured steps wrote the whole state."""
        return sum(s["base"] for s in self.measured)

    @property
    def delta_s(self) -> float:
        """The median seconds of a step that wrote only changes."""
        return median(s["trigger_ms"] for s in self.deltas) / 1000

    @property
    def trigger_s(self) -> float:
        """The median seconds of any step's trigger."""
        return median(s["trigger_ms"] for s in self.measured) / 1000

    @property
    def mean_s(self) -> float:
        """The mean seconds of any step's trigger."""
        return mean(s["trigger_ms"] for s in self.measured) / 1000

    @property
    def wall_s(self) -> float:
        """Seconds per measured step, until the last one's checkpoint is complete."""
        began, completed = measured_span(self.steps, self.workload)
        return (completed - began) / len(self.measured)

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds of all processes per measured step."""
        return None if self.cpu_seconds is None else self.cpu_seconds / len(self.measured)

    @property
    def delta_bytes(self) -> float:
        """The median bytes of a step that wrote only changes."""
        return median(s["bytes"] for s in self.deltas)

    @property
    def load_s(self) -> float:
        """Seconds of the micro-batches that loaded the keys."""
        return sum(s["trigger_ms"] for s in self.steps if s["batch"] < self.workload.load_steps) / 1000

    def phases_ms(self) -> dict[str, float]:
        """Return the median ms of the phases of a step that wrote only changes: Spark's durations, then our own."""
        found: dict[str, list[float]] = {}
        for step in self.deltas:
            for name, value in step["durations_ms"].items():
                found.setdefault(name, []).append(value)
            for name, value in step.get("phases_s", {}).items():
                found.setdefault(name, []).append(value * 1000)
        return {name: median(values) for name, values in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict, with all that is computed."""
        names = ("load_s", "wall_s", "cpu_s", "delta_s", "trigger_s", "mean_s", "delta_bytes")
        return asdict(self) | {"phases_ms": self.phases_ms()} | {name: getattr(self, name) for name in names}


Side = tuple[str, Workload]
"""a system and its workload"""


@dataclass(frozen=True)
class Rounds:
    """The runs of a comparison, round after round.

    Args:
        titles: system -> what tables call it.
        runs: each system once per round, under each workload.
    """

    titles: Mapping[str, str]
    runs: Sequence[Run]

    @property
    def workloads(self) -> list[Workload]:
        """The workloads, in order."""
        return list(dict.fromkeys(run.workload for run in self.runs))

    def of(self, system: str, workload: Workload) -> list[Run]:
        """Return the runs of one system under one workload, one per round."""
        return [run for run in self.runs if (run.system, run.workload) == (system, workload)]

    def sides(self) -> Iterator[tuple[Workload, str, list[Run]]]:
        """Yield each workload, the title of each of its systems, and its runs."""
        for workload in self.workloads:
            for system, title in self.titles.items():
                yield workload, title, self.of(system, workload)

    def compare(
        self, what: str, value: Callable[[Run], float | None], ours: Side, theirs: Side, **bound: Any
    ) -> Iterator[Goal]:
        """Yield the goal for the ratio of a value, taken within each round; nothing where the value was not sampled."""
        values = [(value(a), value(b)) for a, b in zip(self.of(*ours), self.of(*theirs), strict=True)]
        if ratios := [a / b for a, b in values if a and b]:
            yield Goal.of_rounds(what, ratios, **bound)

    def compare_step(
        self, workload: Workload, one: str, other: str, *, less_is_better: bool = True, **bound: float | None
    ) -> Iterator[Goal]:
        """Yield the goals for a step of `one` over that of `other`: trigger, wall time, and CPU seconds, unbounded."""
        compare = partial(self.compare, ours=(one, workload), theirs=(other, workload), less_is_better=less_is_better)
        named = f"{workload.name}: {self.titles[one]} / {self.titles[other]}"
        yield from compare(f"trigger, {named}", lambda run: run.trigger_s, **bound)
        yield from compare(f"wall time per step, {named}", lambda run: run.wall_s, **bound)
        yield from compare(f"CPU seconds per step, {named}", lambda run: run.cpu_s)

    def steps_table(self, title: str) -> Table:
        """Make the table of whole steps: medians and ranges over the rounds."""
        heads = ("trigger s", "wall s", "CPU s of all processes", "delta MB", "load avg")
        table = table_of(f"{title}: per step, medians and ranges of rounds", "state, step", "system", *heads, left=2)
        for workload, name, runs in self.sides():
            cpus = [run.cpu_s for run in runs if run.cpu_s is not None]
            written = median(run.delta_bytes for run in runs) / MB
            table.add_row(
                workload.name,
                name,
                spread_of([run.trigger_s for run in runs]),
                spread_of([run.wall_s for run in runs]),
                spread_of(cpus) if cpus else "-",
                f"{written:.2f}" if written else "-",
                f"{median(run.load_average for run in runs):.1f}",
            )
        return table

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict for JSON."""
        return {"runs": [run.to_json() for run in self.runs]}


def measured_span(steps: Sequence[Mapping[str, Any]], workload: Workload) -> tuple[float, float]:
    """Return when the first measured step began and when the last one's checkpoint was complete (epoch seconds)."""
    measured = [step for step in steps if step["batch"] >= workload.first_measured]
    return measured[0]["began_s"], max(step["completed_s"] for step in measured)


def in_turn(sides: Iterable[T], number: int) -> list[T]:
    """Return the sides in the order of a round: as they are, or the other way round in every second one."""
    return list(sides)[:: -1 if number % 2 else 1]


@contextmanager
def own_process(module: str, *arguments: str, said: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module in a process of its own; kill it, and all that it has started, when the block ends."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_rounds(
    titles: Mapping[str, str],
    workloads: Sequence[Workload],
    rounds: int,
    scratch: Path,
    module: str = "benchmarks.systems",
) -> Rounds:
    """Run all systems of a module under each workload, in a number of rounds.

    Raises:
        RuntimeError: a run failed.
    """
    progress, runs = Console(stderr=True), list[Run]()
    for workload in workloads:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            inputs = Path(directory) / "input"
            workload.write(inputs)
            for number in range(rounds):
                for system in in_turn(titles, number):
                    progress.print(f"round {number + 1} of {rounds} at {workload.name}: {titles[system]} ...")
                    runs.append(measure(system, workload, inputs, scratch, module))
    return Rounds(titles, runs)


def measure(system: str, workload: Workload, inputs: Path, scratch: Path, module: str) -> Run:
    """Run one system of a module under one workload in a process of its own, and remove its files.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=scratch) as work:
        result = Path(work) / "result.json"
        with (Path(work) / "output").open("w+") as said:
            # Spark's RocksDB state store may keep the JVM alive for ten minutes after its session has stopped.
            with (
                own_process(module, system, str(inputs), work, str(result), said=said) as process,
                watch_memory(process.pid) as peak,
                watch_cpu(process.pid) as cpu,
            ):
                process.wait()
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
