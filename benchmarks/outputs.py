"""Measure what a sink adds to a step: a stream with a sink compared with the same stream without, in one process.

A step of K distinct random keys changes four integer aggregates of a state of S keys and ends in a checkpoint: tasks,
uploads, manifest, commit. The operator computes its output, one row per key, in both streams. With a sink, the output
is also staged in the store and made outstanding by the commit. The delivery comes after the step and is timed
separately: it checks the fence, reads all staged rows, and marks the output.

It runs without Spark (`tests.region_run`), so neither side has the cost of the shuffle and the micro-batch: in a run
under Spark the ratio is closer to 1.
"""

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.rounds import in_turn
from benchmarks.workload import short
from siltstone.aggregates.operator import Aggregate, Count, Max, Min, Sum
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, PolicyOptions, policy_by_name
from siltstone.format.output import read_output
from siltstone.operator import Operator
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import Stream
from tests.region_run import run_tasks, shuffled

OPERATOR, SUBTASKS = "totals", 2
SIZES = ((1_000_000, 1_000), (1_000_000, 10_000), (1_000_000, 100_000))
"""(keys of the state, keys of a step)"""
STEPS, WARM_UP = 30, 5


class Steps:
    """A stream whose steps are timed; `operator`, named `OPERATOR`, stands in for the four aggregates."""

    def __init__(
        self,
        warehouse: OpenWarehouse,
        *,
        sink: bool,
        policy: PolicyOptions | None = None,
        operator: Operator | None = None,
    ) -> None:
        aggregates = [Count("rows"), Sum("total", "value"), Min("least", "value"), Max("most", "value")]
        operator = operator or Aggregate(OPERATOR, {"key": pa.int64()}, aggregates)
        sinks = {OPERATOR: ParquetSink()} if sink else {}
        stream = Stream("bench", source=lambda spark, _: spark.sql(""), operators=[operator], sinks=sinks)
        chosen, options = policy_by_name(DEFAULT_POLICY, policy), RegionOptions(parallelism=SUBTASKS)
        self._warehouse, self._sink = warehouse, sink
        self._region = ConsistentRegion.open(
            stream, warehouse.warehouse, warehouse.catalog, chosen, options, "a benchmark"
        )
        self.delivered = 0
        """number of delivered rows"""
        self.digest = ""
        """of the newest checkpoint"""
        self.process_s = 0.0
        """seconds of the newest step that its operator took, of all subtasks together"""

    def step(self, rows: pa.Table) -> float:
        """Run one step and its checkpoint; return the seconds, without those of sorting rows by subtask."""
        region = self._region
        task = region.begin_step(Step(region.step + 1, region.step, "v1\n{}\n"))[OPERATOR]
        parts = shuffled(task, rows)
        began = time.perf_counter()
        received = run_tasks(task, parts)[1]
        region.acknowledge(OPERATOR, received)
        completed = region.complete()
        seconds = time.perf_counter() - began
        self.digest, self.process_s = completed.digest, sum(each.seconds["process"] for each in received)
        return seconds

    def deliver(self) -> float:
        """Deliver outstanding outputs to a sink that reads every row; return the seconds."""
        began = time.perf_counter()
        if self._sink:
            self._region.outbox.deliver(self._region.completed, {OPERATOR: self._take}, checked=True)
        return time.perf_counter() - began

    def _take(self, output: OutputRecord) -> None:
        store = self._warehouse.warehouse.store
        self.delivered += sum(b.num_rows for stored in output.objects for b in read_output(store, stored))


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    sizes, steps = ([(state // 10, rows) for state, rows in SIZES[:2]], 8) if quick else (SIZES, STEPS)
    return _report({f"{short(state)}, {short(rows)}": measure(scratch, state, rows, steps) for state, rows in sizes})


def measure(scratch: Path, state_rows: int, step_rows: int, steps: int) -> Mapping[str, list[float]]:
    """Return, by name, the seconds of each step with and without a sink, and of each delivery."""
    draw = np.random.default_rng(1)
    with ExitStack() as stack:
        sides: dict[str, Steps] = {}
        for name in ("with", "without"):
            warehouse = stack.enter_context(
                OpenWarehouse.open_writable(str(scratch / f"{state_rows}-{step_rows}-{name}"))
            )
            sides[name] = Steps(warehouse, sink=name == "with")
        found: dict[str, list[float]] = {"with": [], "without": [], "delivery": []}
        for turn in range(1 + WARM_UP + steps):
            keys = draw.permutation(state_rows) if not turn else draw.choice(state_rows, step_rows, replace=False)
            rows = pa.table({"key": keys, "value": draw.integers(-1000, 1000, len(keys))})
            # The order alternates, because the first one has colder caches.
            took = {name: sides[name].step(rows) for name in in_turn(sorted(sides), turn)}
            took["delivery"] = sides["with"].deliver()
            if turn > WARM_UP:
                for name, seconds in took.items():
                    found[name].append(seconds)
        assert sides["with"].delivered == state_rows + (WARM_UP + steps) * step_rows, "every row, once"
        assert sides["without"].delivered == 0
    return found


def _report(found: Mapping[str, Mapping[str, list[float]]]) -> Report:
    table = table_of("a step with a sink and without one", "S, K", "with s", "without s", "ratio", "delivery s")
    report = Report([table])
    for size, seconds in found.items():
        median = {name: statistics.median(values) for name, values in seconds.items()}
        ratio = median["with"] / median["without"]
        columns = (f"{median[name]:.4f}" for name in ("with", "without"))
        table.add_row(size, *columns, f"{ratio:.2f}", f"{median['delivery']:.4f}")
        report.goals.append(Goal(f"outputs: a step of {size} with a sink over one without", ratio))
        report.numbers[size] = {f"{name}_s": values for name, values in seconds.items()}
    return report
