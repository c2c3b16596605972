"""Measure what cryptographic checksums add to a step: each algorithm compared with xxh3-128, in one process.

A step of K distinct random keys changes four integer aggregates of a state of S keys and ends in a checkpoint: tasks,
uploads, manifest, commit. In one measurement all checkpoints are deltas, in another one bases. The algorithms take
turns, step by step, over the same rows, and a ratio is the median of the ratios of the turns, so that other load
affects all of them. Each step's processor time over all threads is measured, too: it shows the cost of the checksums
even if a free core computes them.

It runs without Spark (`tests.region_run`), so no side has the cost of the shuffle and the micro-batch: in a run under
Spark the ratio is closer to 1.
"""

import os
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.outputs import Steps
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions
from siltstone.store.checksums import DEFAULT, OPTION, Algorithm

DELTAS = PolicyOptions(d_max=1000, size_ratio_max=None, space_amplification_max=None, restore_weight=0.0)
BASES = PolicyOptions(d_max=0)
SIZES = ((1_000_000, 1_000, DELTAS), (1_000_000, 100_000, DELTAS), (1_000_000, 100_000, BASES))
"""(keys of the state, keys of a step, whether checkpoints are deltas or bases)"""
STEPS, WARM_UP = 40, 5
BASELINE = "xxh3-128"
AT_MOST = 1.03
"""most time of a step with the default algorithm, over that with xxh3-128"""

Measured = Mapping[str, Mapping[str, list[float]]]
"""algorithm -> seconds and processor seconds of its steps"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    sizes, steps = ([(s // 10, r // 10, policy) for s, r, policy in SIZES], 8) if quick else (SIZES, STEPS)
    load, found = os.getloadavg()[0], {}
    for state, rows, policy in sizes:
        name = f"{short(state)}, {short(rows)}, {'bases' if policy is BASES else 'deltas'}"
        found[name] = measure(scratch / name.replace(", ", "-"), state, rows, steps, policy)
    return _report(found, load)


def measure(scratch: Path, state_rows: int, step_rows: int, steps: int, policy: PolicyOptions) -> Measured:
    """Measure each step with each algorithm."""
    scratch.mkdir()
    draw = np.random.default_rng(1)
    algorithms = get_args(Algorithm)
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "processor_s": []} for name in algorithms}
    with ExitStack() as stack:
        sides: dict[str, Steps] = {}
        for name in algorithms:
            warehouse = stack.enter_context(OpenWarehouse.open_writable(f"{scratch / name}?{OPTION}={name}"))
            sides[name] = Steps(warehouse, sink=False, policy=policy)
        for turn in range(1 + WARM_UP + steps):
            keys = draw.permutation(state_rows) if not turn else draw.choice(state_rows, step_rows, replace=False)
            rows = pa.table({"key": keys, "value": draw.integers(-1000, 1000, len(keys))})
            # The order changes, because the first one has colder caches.
            for name in np.roll(algorithms, turn).tolist():
                began = time.process_time()
                seconds = sides[name].step(rows)
                processor_s = time.process_time() - began
                if turn > WARM_UP:
                    found[name]["seconds"].append(seconds)
                    found[name]["processor_s"].append(processor_s)
    return found


def _report(found: Mapping[str, Measured], load: float) -> Report:
    title = f"a step by its checksums (load {load:.1f} at the start)"
    table = table_of(title, "S, K, form", "checksums", "median s", "ratio", "processor s", "ratio", left=2)
    report = Report([table], numbers={"load_average": load})
    for size, sides in found.items():
        for name, took in sides.items():
            row: list[str] = []
            for what, values in took.items():
                ratio = statistics.median(np.divide(values, sides[BASELINE][what]).tolist())
                row += [f"{statistics.median(values):.4f}", f"{ratio:.3f}"]
                bound = AT_MOST if name == DEFAULT else None
                if name != BASELINE:
                    report.goals.append(Goal(f"checksums: {what} of a step of {size}, {name}", ratio, bound))
            table.add_row(size, name, *row)
        report.numbers[size] = dict(sides)
    return report
