"""Summarize the step benchmark: medians and goals, as tables, JSON and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.goals import Goal, table_of
from benchmarks.workload import Workload

MB = 1_000_000
STEP_AT_MOST = {(3 * MB, MB // 10): 0.5, (10 * MB, MB): 0.07}
"""(keys in the state, keys per step) -> the fraction of Spark's time that a step may take"""
TITLES = {"siltstone": "Siltstone", "rocksdb": "Spark, RocksDB", "stateless": "Spark, no state"}
"""the systems of the step benchmark"""


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
        """The measured steps that wrote only changes."""
        return [s for s in self.measured if not s["base"]]

    @property
    def delta_s(self) -> float:
        """The median seconds of a step that wrote only changes."""
        return median(s["trigger_ms"] for s in self.deltas) / 1000

    @property
    def all_s(self) -> float:
        """The median seconds of any step."""
        return median(s["trigger_ms"] for s in self.measured) / 1000

    @property
    def mean_s(self) -> float:
        """The mean seconds of any step."""
        return sum(s["trigger_ms"] for s in self.measured) / len(self.measured) / 1000

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


def measured_span(steps: Sequence[Mapping[str, Any]], workload: Workload) -> tuple[float, float]:
    """Return when the first measured step began and when the last one's checkpoint was complete (epoch seconds)."""
    measured = [step for step in steps if step["batch"] >= workload.first_measured]
    return measured[0]["began_s"], max(step["completed_s"] for step in measured)


class Summary:
    """The summary of all runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._by = {(run.system, run.workload.name): run for run in runs}

    def goals(self) -> Iterator[Goal]:
        """Compute the ratios to Spark and over the size of the state, each with its bound."""
        workloads = list(dict.fromkeys(run.workload for run in self.runs))
        for workload in workloads:
            ours, theirs = (self._by[system, workload.name] for system in ("siltstone", "rocksdb"))
            at_most = STEP_AT_MOST.get((workload.state_rows, workload.step_rows))
            yield Goal(f"trigger, {workload.name}: Siltstone / RocksDB", ours.delta_s / theirs.all_s, at_most)
            yield Goal(
                f"wall time per step, {workload.name}: Siltstone / RocksDB", ours.wall_s / theirs.wall_s, at_most
            )
            if ours.cpu_s and theirs.cpu_s:
                yield Goal(f"CPU seconds per step, {workload.name}: Siltstone / RocksDB", ours.cpu_s / theirs.cpu_s)
            bytes_ratio = ours.delta_bytes / theirs.delta_bytes
            yield Goal(f"delta bytes, {workload.name}: Siltstone / RocksDB changelog", bytes_ratio, 0.5)
        fewest = min(workload.step_rows for workload in workloads)
        alike = sorted((w for w in workloads if w.step_rows == fewest), key=lambda w: w.state_rows)
        small, great = (self._by["siltstone", w.name] for w in (alike[0], alike[-1]))
        between = f"{small.workload.name} to {great.workload.name}"
        yield Goal(f"step growth, {between}", great.delta_s / small.delta_s, 1.25)
        yield Goal(f"delta bytes growth, {between}", great.delta_bytes / small.delta_bytes, 1.25)
        if small.anonymous_bytes:
            ratio = great.anonymous_bytes["driver"] / small.anonymous_bytes["driver"]
            yield Goal(f"driver's Python memory growth, {between}", ratio, 1.25)

    def tables(self) -> Iterator[Table]:
        """Make the tables to print."""
        yield self._steps()
        yield self._whole()
        yield self._memory()
        yield self._phases()

    def _steps(self) -> Table:
        table = Table(title="one durable step (triggerExecution)")
        heads = (
            "state, step",
            "system",
            "delta step s",
            "min to max",
            "any step s",
            "mean s",
            "bases",
            "delta MB",
            "load s",
        )
        for head in (*heads, "load avg"):
            table.add_column(head, justify="left" if head in heads[:2] else "right")
        for run in self.runs:
            times = [s["trigger_ms"] / 1000 for s in run.deltas]
            table.add_row(
                run.workload.name,
                TITLES[run.system],
                f"{run.delta_s:.3f}",
                f"{min(times):.3f} to {max(times):.3f}",
                f"{run.all_s:.3f}",
                f"{run.mean_s:.3f}",
                f"{len(run.measured) - len(run.deltas)} of {len(run.measured)}",
                f"{run.delta_bytes / MB:.2f}",
                f"{run.load_s:.1f}",
                f"{run.load_average:.1f}",
            )
        return table

    def _whole(self) -> Table:
        title = "all measured steps until the last checkpoint is complete, per step"
        table = table_of(title, "state, step", "system", "steps", "wall s", "CPU s of all processes", left=2)
        for run in self.runs:
            cpu = "-" if run.cpu_s is None else f"{run.cpu_s:.3f}"
            table.add_row(run.workload.name, TITLES[run.system], str(len(run.measured)), f"{run.wall_s:.3f}", cpu)
        return table

    def _memory(self) -> Table:
        table = Table(title="peak memory of one process, MB (anonymous: without memory-mapped files)")
        heads = (
            "state, step",
            "system",
            "driver anon",
            "worker anon",
            "worker resident",
            "JVM resident",
            "JVM live heap",
        )
        for head in heads:
            table.add_column(head, justify="left" if head in heads[:2] else "right")
        for run in self.runs:
            anonymous, resident = run.anonymous_bytes, run.resident_bytes
            sizes = [anonymous.get("driver"), anonymous.get("worker"), resident.get("worker"), resident.get("jvm")]
            cells = ["-" if size is None else f"{size / MB:.0f}" for size in [*sizes, run.live_heap_bytes]]
            table.add_row(run.workload.name, TITLES[run.system], *cells)
        return table

    def _phases(self) -> Table:
        ours = [run for run in self.runs if run.system == "siltstone"]
        table = Table(title="where Siltstone's delta step spends its time, ms (medians)")
        table.add_column("phase")
        for run in ours:
            table.add_column(run.workload.name, justify="right")
        phases = [run.phases_ms() for run in ours]
        for name in dict.fromkeys(name for found in phases for name in found):
            table.add_row(name, *(f"{found[name]:.0f}" if name in found else "-" for found in phases))
        return table

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict for JSON."""
        runs = []
        for run in self.runs:
            plain = asdict(run) | {"phases_ms": run.phases_ms(), "load_s": run.load_s}
            plain |= {"wall_step_s": run.wall_s, "cpu_step_s": run.cpu_s}
            plain |= {"delta_step_s": run.delta_s, "any_step_s": run.all_s, "mean_step_s": run.mean_s}
            runs.append(plain | {"delta_bytes": run.delta_bytes})
        return {"runs": runs}


def picture(runs: Sequence[Run], path: Path) -> None:
    """Draw step times and bytes by workload and system, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(run.workload for run in runs))
    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    width = 0.8 / len(TITLES)
    for i, (system, title) in enumerate(TITLES.items()):
        of_system = {run.workload: run for run in runs if run.system == system}
        found = [of_system[w] for w in workloads]
        where = [x + i * width for x in range(len(workloads))]
        middle = [run.delta_s for run in found]
        spread = [[f(s["trigger_ms"] for s in run.deltas) / 1000 for run in found] for f in (min, max)]
        low, high = ([abs(m - e) for m, e in zip(middle, edge, strict=True)] for edge in spread)
        bars = times.bar(where, middle, width, yerr=[low, high], capsize=2, label=title)
        times.bar_label(bars, fmt="%.2f", padding=2)
        if system != "stateless":
            bars = sizes.bar(where, [run.delta_bytes / MB for run in found], width, label=title)
            sizes.bar_label(bars, fmt="%.2f", padding=2)
    for axes, title in ((times, "Seconds per durable step (median, range)"), (sizes, "MB written by a delta step")):
        axes.set_title(title)
        axes.set_xticks([x + width for x in range(len(workloads))], [w.name for w in workloads])
        axes.set_xlabel("keys in the state, keys per step")
        axes.set_ylim(0)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
