"""Measure space amplification: stored bytes of an operator over the bytes of its live state, at every checkpoint.

Two workloads run under the default policy, with one checkpoint per step; after each step the stream is truncated to the
newest checkpoint:

    update-heavy      a tenth of the keys get new values at each step
    sliding window    each step inserts rows and deletes those of ten steps ago; Flink's changelog reached 45 here

Live bytes are those of a base of the live tables, which is computed but not stored. Stored bytes are those of bases and
of segments with their indexes; manifests, which are not of a single operator, are counted separately.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.states import MAX_PARALLELISM, SUBTASKS, Balances, rows_for
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, PolicyOptions, policy_by_name
from siltstone.format.base import write_base
from siltstone.model import KeyGroupRange
from siltstone.operator import Operator, Rows, State, WindowState
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.state.backends.named import backend
from siltstone.stream import Stream
from tests.region_run import RegionRun

FLINK = 45
WINDOW_STEPS = 10
_KEEP = RetentionOptions(keep_last=1)


class Sliding(Operator):
    """Keeps the rows of the last steps, by key."""

    name = "sliding"
    key = {"key": pa.int64()}  # noqa: RUF012
    window = WindowState(value={"step": pa.int64(), "amount": pa.int64()}, order="step")

    def process(self, rows: Rows, state: State) -> None:
        state.window.insert(rows.keys, rows.key_index, rows.table.select(["step", "amount"]))
        newest = int(rows.table.column("step")[0].as_py())
        state.window.evict(rows.keys, newest - WINDOW_STEPS + 1)


def update_heavy(keys: int) -> Callable[[int], pa.Table]:
    """Make the rows of each step: all keys first, then a tenth of them."""
    draw = np.random.default_rng(1)
    return lambda step: rows_for(draw.choice(keys, keys // 10, replace=False) if step else draw.permutation(keys), draw)


def sliding_window(keys: int) -> Callable[[int], pa.Table]:
    """Make the rows of each step: one per key."""
    draw = np.random.default_rng(1)
    return lambda step: pa.table(
        {"key": np.arange(keys), "step": np.full(keys, step), "amount": draw.integers(0, 1_000_000, keys)}
    )


class _Nowhere:
    """A file that only counts bytes."""

    closed = False

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        size = len(memoryview(data))
        self.bytes += size
        return size

    def flush(self) -> None:
        pass


def live_bytes(warehouse: OpenWarehouse, run: RegionRun, operator: Operator) -> int:
    """Compute the bytes of a base of the live state."""
    out = _Nowhere()
    for subtask, groups in enumerate(KeyGroupRange(0, MAX_PARALLELISM).split(SUBTASKS)):
        directory = warehouse.warehouse.local.state(run.region.stream.name, run.region.epoch, operator.name, subtask)
        state = backend("heap").open(directory, operator.tables(), (), groups, MAX_PARALLELISM)
        for table in state.tables.values():
            write_base(out, table.schema, table.scan(groups))  # type: ignore[arg-type]
        state.close()
    return out.bytes


@dataclass(frozen=True)
class Found:
    """Space amplification at each checkpoint: of the operator's objects, and including the manifests."""

    own: list[float]
    all: list[float]


def amplification(warehouse: OpenWarehouse, operator: Operator, rows: Callable[[int], pa.Table], steps: int) -> Found:
    """Measure each checkpoint after the first."""
    no_source = lambda spark, options: spark.sql("")  # noqa: E731
    stream = Stream(operator.name, source=no_source, operators=[operator], max_parallelism=MAX_PARALLELISM)
    run = RegionRun(warehouse, stream, policy_by_name(DEFAULT_POLICY), SUBTASKS)
    found = Found([], [])
    for step in range(steps + 1):
        run.step(rows(step))
        truncate(warehouse, stream.name, _KEEP)
        if step:
            live, objects = live_bytes(warehouse, run, operator), warehouse.catalog.objects.list(stream.name)
            found.all.append(sum(stored.bytes for stored in objects) / live)
            found.own.append(sum(o.bytes for o in objects if o.kind is not ObjectKind.MANIFEST) / live)
    return found


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Run both workloads."""
    keys, steps = (50_000, 15) if quick else (500_000, 60)
    cap = PolicyOptions().space_amplification_max
    workloads = {
        "update-heavy": (Balances(), update_heavy(keys)),
        "sliding window": (Sliding(), sliding_window(keys // WINDOW_STEPS)),
    }
    heads = ("workload", "checkpoints", "median", "most", "most, with manifests")
    report = Report([table_of("space amplification: stored over live bytes, one checkpoint retained", *heads)])
    with OpenWarehouse.open_writable(str(scratch / "space")) as warehouse:
        for name, (operator, rows) in workloads.items():
            found = amplification(warehouse, operator, rows, steps)
            cells = [f"{value:.2f}" for value in (median(found.own), max(found.own), max(found.all))]
            report.tables[0].add_row(name, str(steps), *cells)
            report.goals.append(Goal(f"space amplification, {name}: most", max(found.own), at_most=cap))
            report.numbers[name] = vars(found)
    report.tables[0].add_row("Flink's changelog on windows, as reported", "", "", str(FLINK), "")
    return report
