"""Measure the heap backend in one process: look-ups and updates per second, by kind of key; memory; growth; snapshots.

A table has S rows of four int64 columns. Batches of 100,000 distinct random keys are looked up, then updated, each
update in a step of its own: before-images are kept, digests and changes are followed, the header is written. The times
are those of `get` and of `begin`, `put` and `commit` together; hashing the keys is Spark's part and not included.
Then updates without a snapshot and with one that is open for all of them take turns.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.tables import BATCH, GROUPS, TABLE, keys_of, look_up, random_values, schema_of, update
from benchmarks.workload import short
from siltstone.model import KeyGroupRange
from siltstone.state.backends.heap import HeapBackend, HeapState

TURNS = 30
ROUNDS, STEPS = 5, 6
"""rounds of updates without and with a snapshot, and the steps of each"""
RAW_BYTES = 40
"""of a row of five int64 columns"""


@dataclass(frozen=True)
class Case:
    """A kind of key, and what is asked of it, in millions per second; 0 for no bound."""

    name: str
    keys: Callable[[np.ndarray], pa.Array]
    look_ups: float = 0
    updates: float = 0


def _strings(numbers: np.ndarray) -> pa.Array:
    """16 bytes each."""
    return pa.array(np.char.mod("%016d", numbers))


CASES = (
    Case("int64", lambda numbers: pa.array(numbers, pa.int64()), look_ups=5, updates=3),
    Case("16-byte string", _strings, look_ups=1, updates=1),
)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each kind of key."""
    rows = 1_000_000 if quick else 10_000_000
    heads = (
        "key",
        "rows",
        "look-ups M/s",
        "updates M/s",
        "bytes per row",
        "growth step max / median",
        "snapshot ms",
        "updates with one, M/s",
    )
    report = Report([table := table_of("the heap backend, one process", *heads, left=1)])
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            found = measure(case, Path(directory) / "state", rows)
        table.add_row(
            case.name,
            short(rows),
            f"{found['look_ups']:.2f}",
            f"{found['updates']:.2f}",
            f"{found['row_bytes']:.0f}",
            f"{found['growth']:.1f}",
            f"{median(found['snapshot_ms']):.2f}",
            f"{found['updates'] * median(found['beside_snapshot']):.2f}",
        )
        for what in ("look_ups", "updates"):
            said = f"heap: million {what.replace('_', '-')} per second, {case.name} keys, {short(rows)} rows"
            report.goals.append(Goal(said, found[what], at_least=getattr(case, what)))
        if case.name == "int64":
            report.goals.append(Goal("heap: memory / raw columns", found["row_bytes"] / RAW_BYTES, at_most=1.6))
        report.goals.append(Goal(f"heap: slowest growth step / median, {case.name} keys", found["growth"], at_most=2))
        snapshot, beside = found["snapshot_ms"], found["beside_snapshot"]
        report.goals.append(Goal.of_rounds(f"heap: snapshot, ms, {case.name} keys", snapshot, at_most=5))
        said = f"heap: updates beside an open snapshot / without, {case.name} keys"
        report.goals.append(Goal.of_rounds(said, beside, at_least=0.6))
        report.numbers[case.name] = found
    return report


def measure(case: Case, directory: Path, rows: int) -> dict[str, Any]:
    """Fill a table, then look up and update random keys, and take snapshots."""
    schema = schema_of(case.keys(np.zeros(1, int)).type)
    state = HeapBackend().open(directory, {TABLE: schema}, (), KeyGroupRange(0, GROUPS), GROUPS)
    draw = np.random.default_rng(1)
    order, growth = draw.permutation(rows), list[float]()
    for at in range(0, rows, BATCH):
        took = _change(state, case, order[at : at + BATCH], draw)
        if at >= rows // 10:
            growth.append(took)
    look_ups, updates = [], []
    for _ in range(TURNS):
        chosen = draw.choice(rows, min(BATCH, rows), replace=False)
        look_ups.append(look_up(state, keys_of(case.keys(chosen))))
        updates.append(_change(state, case, chosen, draw))
    size = sum(path.stat().st_blocks * 512 for path in directory.glob("tables/**/*") if path.is_file())
    snapshots = _beside_snapshots(state, case, rows, draw)
    state.close()
    return {
        "look_ups": min(BATCH, rows) / median(look_ups) / 1e6,
        "updates": min(BATCH, rows) / median(updates) / 1e6,
        "row_bytes": size / rows,
        "growth": max(growth) / median(growth),
        **snapshots,
    }


def _beside_snapshots(state: HeapState, case: Case, rows: int, draw: np.random.Generator) -> dict[str, list[float]]:
    """Return per round how long a snapshot took (ms), and how fast updates were beside it, those without being 1."""
    took, ratios = [], []

    def updates() -> float:
        every = [draw.choice(rows, min(BATCH, rows), replace=False) for _ in range(STEPS)]
        return median(_change(state, case, chosen, draw) for chosen in every)

    for _ in range(ROUNDS):
        without = updates()
        began = time.perf_counter()
        snapshot = state.snapshot()
        took.append((time.perf_counter() - began) * 1e3)
        ratios.append(without / updates())
        snapshot.release()
    return {"snapshot_ms": took, "beside_snapshot": ratios}


def _change(state: HeapState, case: Case, numbers: np.ndarray, draw: np.random.Generator) -> float:
    values = random_values(draw, len(numbers))
    return update(state, keys_of(case.keys(numbers)), values)
