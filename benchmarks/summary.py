"""Summarize the step benchmark: medians and goals, as tables and a picture."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.goals import Goal, spread_of, table_of
from benchmarks.rounds import MB, Rounds, Run
from benchmarks.workload import Workload

OURS, STORE, FLOOR = "siltstone", "rocksdb", "stateless"
TITLES = {OURS: "Siltstone", STORE: "Spark, RocksDB", FLOOR: "Spark, no state"}
"""the systems of the step benchmark"""
STORE_AT_MOST = {(3 * MB, MB // 100): 0.6, (3 * MB, MB // 10): 0.3, (10 * MB, MB): 0.06}
"""(keys in the state, keys per step) -> the fraction of the time of Spark's store that a step may take"""
FLOOR_AT_MOST = {MB // 100: 1.25, MB // 10: 1.15, MB: 1.0}
"""keys per step -> how many times the floor's time a step may take"""
BYTES_AT_MOST, GROWTH_AT_MOST = 0.3, 1.25


class Summary:
    """The summary of all runs."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def goals(self) -> Iterator[Goal]:
        """Compute the ratios to Spark and over the size of the state, each with its bound."""
        for workload in self.rounds.workloads:
            at_most = STORE_AT_MOST.get((workload.state_rows, workload.step_rows))
            yield from self.rounds.compare_step(workload, OURS, STORE, at_most=at_most)
            yield from self.rounds.compare_step(workload, OURS, FLOOR, at_most=FLOOR_AT_MOST.get(workload.step_rows))
            what = f"delta bytes, {workload.name}: Siltstone / RocksDB changelog"
            sides = (OURS, workload), (STORE, workload)
            yield from self.rounds.compare(what, lambda run: run.delta_bytes, *sides, at_most=BYTES_AT_MOST)
        by_step: dict[int, list[Workload]] = {}
        for workload in sorted(self.rounds.workloads, key=lambda workload: workload.state_rows):
            by_step.setdefault(workload.step_rows, []).append(workload)
        for alike in by_step.values():
            if len(alike) > 1:
                yield from self._growth(alike[0], alike[-1])

    def _growth(self, small: Workload, great: Workload) -> Iterator[Goal]:
        """Compute what a greater state with the same steps costs."""
        values: dict[str, Callable[[Run], float | None]] = {
            "step": lambda run: run.delta_s,
            "delta bytes": lambda run: run.delta_bytes,
            "driver's Python memory": lambda run: run.anonymous_bytes.get("driver"),
        }
        for what, value in values.items():
            named = f"{what} growth, {small.name} to {great.name}"
            yield from self.rounds.compare(named, value, (OURS, great), (OURS, small), at_most=GROWTH_AT_MOST)

    def tables(self) -> Iterator[Table]:
        """Make the tables to print."""
        yield self.rounds.steps_table("a durable step")
        yield self._deltas()
        yield self._memory()
        yield self._phases()

    def _deltas(self) -> Table:
        title = "triggers of steps that wrote only changes, and of all: medians and ranges of rounds"
        heads = ("delta step s", "mean s of all", "bases", "load s")
        table = table_of(title, "state, step", "system", *heads, left=2)
        for workload, system, runs in self.rounds.sides():
            table.add_row(
                workload.name,
                system,
                spread_of([run.delta_s for run in runs]),
                spread_of([run.mean_s for run in runs]),
                f"{sum(run.bases for run in runs)} of {sum(len(run.measured) for run in runs)}",
                f"{median(run.load_s for run in runs):.1f}",
            )
        return table

    def _memory(self) -> Table:
        title = "peak memory of one process, MB (anonymous: without memory-mapped files), most of the rounds"
        heads = ("driver anon", "worker anon", "worker resident", "JVM resident", "JVM live heap")
        table = table_of(title, "state, step", "system", *heads, left=2)
        for workload, system, runs in self.rounds.sides():
            anonymous, resident = most_of([r.anonymous_bytes for r in runs]), most_of([r.resident_bytes for r in runs])
            sizes = [anonymous.get("driver"), anonymous.get("worker"), resident.get("worker"), resident.get("jvm")]
            sizes.append(max(run.live_heap_bytes for run in runs))
            table.add_row(workload.name, system, *("-" if size is None else f"{size / MB:.0f}" for size in sizes))
        return table

    def _phases(self) -> Table:
        workloads = self.rounds.workloads
        title = "where Siltstone's delta step spends its time, ms (medians of rounds)"
        table = table_of(title, "phase", *(workload.name for workload in workloads))
        found = [[run.phases_ms() for run in self.rounds.of(OURS, workload)] for workload in workloads]
        for name in dict.fromkeys(name for rounds in found for phases in rounds for name in phases):
            values = ([phases[name] for phases in rounds if name in phases] for rounds in found)
            table.add_row(name, *(f"{median(each):.0f}" if each else "-" for each in values))
        return table


def most_of(rounds: list[dict[str, int]]) -> Mapping[str, int]:
    """Return the most of each number in any round."""
    return {name: max(found.get(name, 0) for found in rounds) for found in rounds for name in found}


def picture(rounds: Rounds, path: Path) -> None:
    """Draw step times and bytes by workload and system, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = rounds.workloads
    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    width = 0.8 / len(TITLES)
    for i, (system, title) in enumerate(TITLES.items()):
        where = [x + i * width for x in range(len(workloads))]
        found = [[run.trigger_s for run in rounds.of(system, workload)] for workload in workloads]
        middle = [median(each) for each in found]
        spread = [[abs(m - edge(each)) for m, each in zip(middle, found, strict=True)] for edge in (min, max)]
        bars = times.bar(where, middle, width, yerr=spread, capsize=2, label=title)
        times.bar_label(bars, fmt="%.2f", padding=2)
        if system != FLOOR:
            written = [median(run.delta_bytes for run in rounds.of(system, each)) / MB for each in workloads]
            bars = sizes.bar(where, written, width, label=title)
            sizes.bar_label(bars, fmt="%.2f", padding=2)
    for axes, title in ((times, "Seconds per durable step (median, range)"), (sizes, "MB written by a delta step")):
        axes.set_title(title)
        axes.set_xticks([x + width for x in range(len(workloads))], [w.name for w in workloads])
        axes.set_xlabel("keys in the state, keys per step")
        axes.set_ylim(0)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
