"""A stream whose state is more than three times the memory its process may have, from the first row to a restore.

Run as a program, in a new warehouse: fills the state, takes a base, changes some of it, takes a delta, loses the
working state, restores it, and prints what it took as JSON. Anonymous memory (the heap, Arrow's pool, NumPy's
arrays, RocksDB's buffers) is limited by the kernel (RLIMIT_DATA); files that are mapped are not, since the kernel takes
their pages back.

    larger_than_memory.py WAREHOUSE LIMIT_BYTES BACKEND [ROWS]
"""

import json
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.state.backends.heap.layout import Layout
from siltstone.stream import Stream
from tests.region_run import RegionRun

WIDTH = 8
ROWS = {"heap": 5_400_000, "rocksdb": 5_000_000}
"""backend -> rows that take 576 and 480 MiB"""
STEP_ROWS = 100_000
CHANGED_STEPS = 2
GROUPS = 128
LONG = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None))
"""one base, then deltas"""


class Wide(Operator):
    """Keeps a wide row a key."""

    name = "wide"
    key = {"k": pa.int64()}  # noqa: RUF012
    kept = ValueState({f"v{i}": pa.int64() for i in range(WIDTH)})

    def process(self, rows: Rows, state: State) -> None:
        n = rows.table.column("n").combine_chunks()
        first = np.zeros(len(rows.keys), np.int64)
        first[rows.key_index] = n.to_numpy()
        state.kept.put(rows.keys, {f"v{i}": first + i for i in range(WIDTH)})


STREAM = Stream("wide", lambda spark, options: spark.sql(""), [Wide()], max_parallelism=GROUPS)


def anonymous_bytes(field: str = "RssAnon") -> int:
    """Of this process, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def run(warehouse: str, limit_bytes: int, backend: str, rows: int | None = None) -> dict[str, object]:
    """All of it, with `limit_bytes` of memory beyond what the program takes before it begins."""
    rows = rows or ROWS[backend]
    baseline, data = anonymous_bytes(), anonymous_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit_bytes, resource.RLIM_INFINITY))
    peaks: dict[str, int] = {}

    def note(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0), anonymous_bytes() - baseline)

    with OpenWarehouse.open_writable(warehouse) as place:
        first = RegionRun(place, STREAM, LONG, checkpoint_steps=rows // STEP_ROWS, backend=backend)
        for at in range(0, rows, STEP_ROWS):
            first.step(pa.table({"k": np.arange(at, at + STEP_ROWS), "n": np.arange(at, at + STEP_ROWS)}))
            note("fill")
        for step in range(1, CHANGED_STEPS + 1):
            changed = np.arange(step, rows, rows // STEP_ROWS)
            last = first.step(pa.table({"k": changed, "n": changed + 1}), last=step == CHANGED_STEPS)
            note("change")
        assert last is not None
        work = place.warehouse.local.state("wide", 1, "wide", 0)
        held = sum(path.stat().st_size for path in work.rglob("slots" if backend == "heap" else "*.sst"))
        if backend == "heap":  # its files have room for more rows than there are
            held += rows * Layout(STREAM.operators[0].tables()["kept"]).dtype.itemsize
        shutil.rmtree(work)
        again = RegionRun(place, STREAM, LONG, backend=backend)
        restored = again.step(pa.table({"k": np.zeros(0, np.int64), "n": np.zeros(0, np.int64)}))
        note("restore")
        forms = [str(c.forms["wide"]) for c in place.catalog.checkpoints.list("wide")]
    assert restored is not None
    return {
        "state_bytes": held,
        "limit_bytes": limit_bytes,
        "anonymous_bytes": peaks,
        "same": restored.digest == last.digest,
        "rows": restored.state_rows,
        "forms": forms,
    }


if __name__ == "__main__":
    json.dump(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])), sys.stdout)
