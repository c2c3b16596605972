"""What timers cost: a step in which they fire, beside one that touches as many keys; the time index in a restore.

Without Spark (`tests.region_run`), so the shuffle and the micro-batch's own cost are in neither side. Each step ends in
a checkpoint. The sides take turns:

    touches   a step with a row for each of K keys, which reads and writes their state
    sets      the same, and sets a timer for each of them
    fires     a step without rows, in which the timers of K keys fire: `on_timer` reads and writes their state

Then the working state is lost, and the next step restores S keys with a timer each. The phase `index` is part of what
that costs (`restore` and `index`).
"""

import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.goals import Goal, Report, table_of
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.operator import Due, Operator, Rows, State, Timer, ValueState
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.stream import Stream
from tests.region_run import run_tasks, shuffled

SUBTASKS, STATE_ROWS, STEP_ROWS = 2, 1_000_000, 100_000
TURNS, WARM_UP = 12, 2
BACKENDS = ("heap", "rocksdb")
_LATER = pa.scalar(1_000_000, pa.duration("us"))


class Touches(Operator):
    """Counts the rows of each key."""

    name = "touches"
    key = {"key": pa.int64()}  # noqa: RUF012
    counts = ValueState({"rows": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        old = state.counts.get(rows.keys)
        state.counts.put(rows.keys, {"rows": rows.count(initial=old["rows"])})


class Fires(Touches):
    """The same with a timer of one second for each key, in which it counts once more."""

    name = "fires"
    due = Timer("processing")

    def process(self, rows: Rows, state: State) -> None:
        super().process(rows, state)
        state.due.set(rows.keys, pc.add(pa.scalar(state.clock.now, pa.timestamp("us", "UTC")), _LATER))

    def on_timer(self, due: Due, state: State) -> None:
        old = state.counts.get(due.keys)
        state.counts.put(due.keys, {"rows": pc.add(old["rows"], 1)})


class Side:
    """A stream of one operator, with a time of day that is set by hand."""

    def __init__(self, place: OpenWarehouse, operator: Operator, backend: str) -> None:
        self.place, self.stream, self.backend = place, Stream("bench", None, [operator]), backend
        self.now_us = 1_800_000_000_000_000
        self.seconds: Mapping[str, float] = {}
        """phase -> seconds of all subtasks together, in the newest step"""
        self.open()

    def open(self) -> None:
        """Begin a run."""
        options = RegionOptions(SUBTASKS, self.backend, time_us=lambda: self.now_us)
        policy = policy_by_name(DEFAULT_POLICY)
        place, catalog = self.place.warehouse, self.place.catalog
        self.region = ConsistentRegion.open(self.stream, place, catalog, policy, options, "a benchmark")

    def lose(self) -> None:
        """End the run, and lose its working state."""
        self.region.close("done")
        shutil.rmtree(self.place.warehouse.local.work("bench", self.region.epoch).parent)
        self.open()

    def step(self, keys: np.ndarray | None) -> float:
        """Take a step with a row for each key, or without rows, and its checkpoint; return the seconds."""
        [(name, task)] = self.region.begin_step().items()
        parts = {} if keys is None else shuffled(task, pa.table({"key": keys}))
        began = time.perf_counter()
        received = run_tasks(task, parts)[1]
        self.region.acknowledge(name, received)
        self.region.complete()
        phases = {phase for each in received for phase in each.seconds}
        self.seconds = {phase: sum(each.seconds.get(phase, 0) for each in received) for phase in phases}
        return time.perf_counter() - began


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure both backends."""
    state, rows, turns = (STATE_ROWS // 10, STEP_ROWS // 10, 4) if quick else (STATE_ROWS, STEP_ROWS, TURNS)
    table = table_of(
        f"timers: {short(rows)} of {short(state)} keys", "backend", "touches s", "sets s", "fires s", "index / restore"
    )
    report = Report([table])
    for backend in BACKENDS:
        found, parts = measure(scratch / backend, backend, state, rows, turns)
        medians = {name: statistics.median(values) for name, values in found.items()}
        table.add_row(
            backend,
            *(f"{medians[name]:.3f}" for name in ("touches", "sets", "fires")),
            f"{statistics.median(parts):.2f}",
        )
        ratios = [one / other for one, other in zip(found["fires"], found["touches"], strict=True)]
        what = f"timers: a step of {short(rows)} that fire over one that touches as many keys, {backend}"
        report.goals.append(Goal.of_rounds(what, ratios, at_most=1.6))
        report.goals.append(Goal.of_rounds(f"timers: the time index of a restore, {backend}", parts, at_most=0.3))
        report.numbers[backend] = {f"{name}_s": values for name, values in found.items()} | {"index": parts}
    return report


def measure(
    scratch: Path, backend: str, state_rows: int, step_rows: int, turns: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each kind of step, and the part of the index in each of some restores."""
    scratch.mkdir(parents=True)
    draw, found = np.random.default_rng(1), dict[str, list[float]]()
    with (
        OpenWarehouse.open_writable(str(scratch / "touches")) as one,
        OpenWarehouse.open_writable(str(scratch / "fires")) as other,
    ):
        touches, fires = Side(one, Touches(), backend), Side(other, Fires(), backend)
        for side in (touches, fires):
            side.step(np.arange(state_rows))
        for turn in range(WARM_UP + turns):
            fires.now_us += 3600_000_000  # what is due fires in this step, so that only the next one's timers are left
            fires.step(None)
            keys = draw.choice(state_rows, step_rows, replace=False)
            took = {"touches": touches.step(keys), "sets": fires.step(keys)}
            fires.now_us += 3600_000_000
            took["fires"] = fires.step(None)
            if turn >= WARM_UP:
                for name, seconds in took.items():
                    found.setdefault(name, []).append(seconds)
        fires.step(np.arange(state_rows))
        parts = list[float]()
        for _ in range(turns):
            fires.lose()
            fires.step(None)
            index = fires.seconds["index"]
            parts.append(index / (fires.seconds["restore"] + index))
        return found, parts
