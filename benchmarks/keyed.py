"""What code for one key at a time costs: a `KeyedProcessor` beside an `Operator` that does the same, in one process.

Both keep a count and a sum per key. A step brings R rows of distinct random keys out of S, each key as many times,
and ends in a checkpoint: tasks, uploads, manifest, commit. The sides take turns, step by step, over the same rows, and
after the last step their digests must be equal. A ratio is taken within each turn, so that what else the machine does
meets both sides; its median and its quartiles are shown. Beside whole steps, what the operator takes of them is taken
alone: reading and writing state included, without checkpoint and commit.

Without Spark (`tests.region_run`), so the shuffle and the micro-batch's own cost are in neither side: in a run under
Spark the ratio is nearer to 1.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.goals import Goal, Report, table_of
from benchmarks.outputs import OPERATOR, Steps
from benchmarks.rounds import in_turn
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.keyed import KeyedProcessor, Record
from siltstone.operator import Operator, Rows, State, ValueState

SIZES = ((200_000, 200_000, 1), (200_000, 200_000, 10), (200_000, 20_000, 1))
"""(keys of the state, rows of a step, rows of a key in a step)"""
STEPS, WARM_UP = 15, 2
KEYED, VECTORIZED = "KeyedProcessor", "Operator"

Measured = Mapping[str, Mapping[str, list[float]]]
"""side -> seconds of its steps, and those that its operator took of them"""


class KeyedSums(KeyedProcessor):
    """A count and a sum per key, one key at a time."""

    name = OPERATOR
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    totals = ValueState({"rows": pa.int64(), "sum": pa.int64()})

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> Iterable[Record] | None:
        """Add the rows of a key."""
        old = state.totals.get() or {"rows": 0, "sum": 0}
        state.totals.put({"rows": old["rows"] + len(rows), "sum": old["sum"] + sum(row["value"] for row in rows)})
        return None


class VectorizedSums(Operator):
    """The same for all keys of a call at once."""

    name = OPERATOR
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    totals = ValueState({"rows": pa.int64(), "sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Add the rows of every key."""
        old = state.totals.get(rows.keys)
        added = {"rows": rows.count(), "sum": rows.sum("value")}
        state.totals.put(rows.keys, {name: pc.add(pc.fill_null(old[name], 0), added[name]) for name in added})


OPERATORS: Mapping[str, type[Operator]] = {KEYED: KeyedSums, VECTORIZED: VectorizedSums}


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    sizes, steps = ([(s // 10, r // 10, n) for s, r, n in SIZES], 5) if quick else (SIZES, STEPS)
    load, found = os.getloadavg()[0], {}
    for keys, rows, rows_per_key in sizes:
        name = f"{short(keys)}, {short(rows)}, {rows_per_key}"
        found[name] = measure(scratch / name.replace(", ", "-"), keys, rows, rows_per_key, steps)
    return _report(found, load)


def measure(scratch: Path, keys: int, step_rows: int, rows_per_key: int, steps: int) -> Measured:
    """What each step takes, one key at a time and vectorized."""
    scratch.mkdir()
    draw = np.random.default_rng(1)
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "process_s": []} for name in OPERATORS}
    with ExitStack() as stack:
        sides: dict[str, Steps] = {}
        for name, operator in OPERATORS.items():
            place = stack.enter_context(OpenWarehouse.open_writable(str(scratch / name)))
            sides[name] = Steps(place, sink=False, operator=operator())
        for turn in range(1 + WARM_UP + steps):
            rows = _rows(draw, keys, step_rows, rows_per_key, every_key=not turn)
            # Which of them goes first alternates: the first meets colder caches.
            for name in in_turn(sorted(sides), turn):
                seconds = sides[name].step(rows)
                if turn > WARM_UP:
                    found[name]["seconds"].append(seconds)
                    found[name]["process_s"].append(sides[name].process_s)
        assert sides[KEYED].digest == sides[VECTORIZED].digest, "both keep the same state"
    return found


def _rows(draw: np.random.Generator, keys: int, count: int, rows_per_key: int, *, every_key: bool) -> pa.Table:
    """The rows of a step: every key once, or `count` rows, `rows_per_key` of each of their keys."""
    some = draw.permutation(keys)
    if not every_key:
        some = draw.permutation(np.repeat(some[: count // rows_per_key], rows_per_key))
    return pa.table({"key": some, "value": draw.integers(-1000, 1000, len(some))})


def _report(found: Mapping[str, Measured], load: float) -> Report:
    title = f"one key at a time beside vectorized (load {load:.1f} at the start)"
    heads = ("S, R, rows per key", "median seconds of", KEYED, VECTORIZED, "ratio", "quartiles")
    report = Report([table := table_of(title, *heads, left=2)], numbers={"load_average": load})
    for size, sides in found.items():
        for what, label in (("seconds", "a whole step"), ("process_s", "the operator alone")):
            both = [np.array(sides[name][what]) for name in (KEYED, VECTORIZED)]
            low, ratio, high = np.percentile(both[0] / both[1], (25, 50, 75)).tolist()
            medians = (f"{np.median(values):.4f}" for values in both)
            table.add_row(size, label, *medians, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}")
            report.goals.append(Goal(f"keyed: {label}, {size}: {KEYED} over {VECTORIZED}", ratio))
        report.numbers[size] = dict(sides)
    return report
