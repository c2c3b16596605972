"""Measure what it costs to check values where they enter, and to digest rows: with and without, in one process.

A step of K rows of distinct random keys, with three texts, two numbers and a decimal, changes the last value of each
key in a state of S keys, puts a row out for each, and ends in a checkpoint. Four sides take turns, step by step, over
the same rows: with neither, with the checks, with the digests, and with both, which is how every stream runs. A ratio
is the median of the ratios of the turns. What a side leaves out is replaced by a function that does nothing.

It runs without Spark (`tests.region_run`), so no side has the cost of the shuffle and the micro-batch: in a run under
Spark the ratio is closer to 1. The checks and the digests of 100,000 rows are also timed alone.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.outputs import OPERATOR, Steps
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.run import processing
from siltstone.state import access
from siltstone.state.columns import find_broken
from siltstone.state.rows_digest import DigestedRows

SIZES = ((1_000_000, 10_000), (1_000_000, 100_000))
"""(keys of the state, keys of a step)"""
STEPS, WARM_UP, ALONE = 30, 5, 20
SIDES = ("neither", "checks", "digests", "both")
ALONE_ROWS = 100_000
CHECKS_AT_MOST_MS = 2.0
"""milliseconds of the checks of `ALONE_ROWS` rows alone"""
_VALUES = {"page": pa.string(), "agent": pa.string(), "n": pa.int64(), "x": pa.float64(), "price": pa.decimal128(12, 2)}


class Latest(Operator):
    """Keeps the newest row of each key, and puts it out."""

    name = OPERATOR
    key = pa.schema({"user": pa.string()})
    inputs = tuple(_VALUES)
    output = pa.schema({"user": pa.string(), **_VALUES})
    latest = ValueState(_VALUES)

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Put the rows."""
        newest = np.empty(len(rows.keys), np.int64)
        newest[rows.key_index] = np.arange(len(rows))
        state.latest.put(rows.keys, rows.table.select(list(_VALUES)).take(pa.array(newest)))
        return rows.table.select(["user", *_VALUES])


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    sizes, steps = ([(state // 10, rows // 10) for state, rows in SIZES], 8) if quick else (SIZES, STEPS)
    found = {f"{short(state)}, {short(rows)}": measure(scratch, state, rows, steps) for state, rows in sizes}
    return report_of(found, _measure_alone())


def measure(scratch: Path, state_rows: int, step_rows: int, steps: int) -> Mapping[str, list[float]]:
    """Measure the seconds of each step of each side."""
    draw = np.random.default_rng(1)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        sides: dict[str, Steps] = {}
        for side in SIDES:
            place = OpenWarehouse.open_writable(str(scratch / f"{state_rows}-{step_rows}-{side}"))
            sides[side] = Steps(stack.enter_context(place), sink=True, operator=Latest())
        for turn in range(1 + WARM_UP + steps):
            keys = draw.permutation(state_rows) if not turn else draw.choice(state_rows, step_rows, replace=False)
            rows = _rows_of(keys, draw)
            # The order changes, because the first one has colder caches.
            for side in np.roll(SIDES, turn).tolist():
                with _only(side):
                    seconds = sides[side].step(rows)
                if turn > WARM_UP:
                    found[side].append(seconds)
            assert len({each.digest for each in sides.values()}) == 1, "all have the same state"
    return found


def _rows_of(keys: np.ndarray, draw: np.random.Generator) -> pa.Table:
    values = draw.integers(0, 10**9, len(keys))
    columns = {
        "user": pa.array([f"user-{key:09d}" for key in keys.tolist()]),
        "page": pa.array([f"/shop/items/{value % 50_000}" for value in values.tolist()]),
        "agent": pa.array([f"Mozilla/5.0 (X11; Linux x86_64) {value % 97}" for value in values.tolist()]),
        "n": pa.array(values),
        "x": pa.array(draw.random(len(keys))),
        "price": pa.array(values // 1000).cast(pa.decimal128(21, 2)).cast(pa.decimal128(12, 2)),
    }
    return pa.table(columns)


@contextmanager
def _only(side: str) -> Iterator[None]:
    """Leave out what a side has not."""
    with ExitStack() as stack:
        if side in ("neither", "digests"):
            stack.enter_context(patch.object(processing, "find_broken_rows", lambda *_: ()))
            stack.enter_context(patch.object(access, "check_values", lambda *_: None))
        if side in ("neither", "checks"):
            stack.enter_context(patch.object(DigestedRows, "of", lambda rows, told=None: DigestedRows(rows.num_rows)))
        yield


def _measure_alone() -> Mapping[str, list[float]]:
    """Measure the milliseconds of the checks and of the digest of some rows."""
    rows = _rows_of(np.arange(ALONE_ROWS), np.random.default_rng(1))
    found: dict[str, list[float]] = {"checks": [], "digests": []}
    for _ in range(ALONE):
        began = time.perf_counter()
        assert not any(find_broken(column).any() for column in rows.columns)
        checked = time.perf_counter()
        DigestedRows.of(rows)
        found["checks"].append(1000 * (checked - began))
        found["digests"].append(1000 * (time.perf_counter() - checked))
    return found


def report_of(found: Mapping[str, Mapping[str, Sequence[float]]], alone: Mapping[str, Sequence[float]]) -> Report:
    """Make the report of size -> side -> seconds, and of what was measured alone, in milliseconds."""
    table = table_of("a step with checks and digests of its rows", "S, K", "side", "median s", "ratio", left=2)
    report = Report([table])
    for size, sides in found.items():
        for side, took in sides.items():
            ratios = np.divide(took, sides["neither"]).tolist()
            table.add_row(size, side, f"{statistics.median(took):.4f}", f"{statistics.median(ratios):.3f}")
            if side != "neither":
                what = f"input: a step of {size} with {side} over one with neither"
                report.goals.append(Goal(what, statistics.median(ratios)))
        report.numbers[size] = {side: list(took) for side, took in sides.items()}
    for what, took in alone.items():
        bound = CHECKS_AT_MOST_MS if what == "checks" else None
        report.goals.append(Goal.of_rounds(f"input: ms of the {what} of {short(ALONE_ROWS)} rows alone", took, bound))
    report.numbers["alone_ms"] = {what: list(took) for what, took in alone.items()}
    return report
