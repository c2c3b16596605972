"""Compare DBSP's three ways to resume after a failure: the bytes each stores, and the seconds it takes.

    input logging           the input of every step is kept; all of it is run again from the start
    checkpoint and deltas   the chain of the newest checkpoint is read into new working state
    persistent state        the working state of the newest checkpoint is on this machine and is opened

A stream with a fixed number of keys runs. At some lengths, a copy of its warehouse is resumed in each of the three
ways, each in a process of its own, by the code of a run (`ConsistentRegion.open`, then one subtask after the other),
without Spark. Seconds are from opening the region to the end of a step without rows. Memory is the process's peak of
anonymous pages; working state is in mapped files. Only the newest checkpoint is retained.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.goals import Goal, Report, table_of
from benchmarks.memory import watch_memory
from benchmarks.states import MAX_PARALLELISM, OPERATOR, SUBTASKS, TABLE, rows_for, stream
from benchmarks.summary import MB
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.model import KeyGroupRange
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.state.backends.named import backend
from siltstone.store.paths import is_base
from tests.region_run import RegionRun

APPROACHES = {
    "replay": "input logging",
    "checkpoint": "checkpoint and deltas",
    "local": "persistent state",
}
FLAT_AT_MOST = 2.0
AT_HAND_AT_MOST_S = 0.2
"""to resume with working state at hand"""
GROWS_AT_LEAST = 0.5
"""fraction of the stream's growth"""
_NEVER = 1_000_000_000
_SUBTASKS = KeyGroupRange(0, MAX_PARALLELISM).split(SUBTASKS)


@dataclass(frozen=True)
class Sizes:
    """Keys, rows per step, the numbers of steps after which to resume, and how often."""

    keys: int = 300_000
    step_rows: int = 20_000
    lengths: tuple[int, ...] = (50, 100, 200, 400)
    rounds: int = 3


QUICK = Sizes(20_000, 2_000, (10, 20, 40, 80), 1)


@dataclass(frozen=True)
class Resumed:
    """The result of one way at one length."""

    approach: str
    steps: int
    seconds: float
    peak_bytes: int


# --- in a process of its own ------------------------------------------------------------------------------------------


def resume(approach: str, warehouse: str, inputs: str, result: str) -> None:
    """Resume in one of the three ways, and write what it took to `result`."""
    files = sorted(Path(inputs).iterdir())
    nothing = pq.read_schema(files[0]).empty_table()
    policy = policy_by_name(DEFAULT_POLICY)
    with OpenWarehouse.open_writable(warehouse) as place:
        began = time.perf_counter()
        run = RegionRun(place, stream(), policy, SUBTASKS, checkpoint_steps=_NEVER)
        if approach == "replay":
            for file in files:
                run.step(pq.read_table(file))
        else:
            run.step(nothing)
        took = time.perf_counter() - began
        work = place.warehouse.local.state(stream().name, run.region.epoch, OPERATOR, 0).parent
        rows = sum(_live_rows(work / f"{number:05d}", groups) for number, groups in enumerate(_SUBTASKS))
    Path(result).write_text(json.dumps({"seconds": took, "rows": rows}))


def _live_rows(directory: Path, groups: KeyGroupRange) -> int:
    state = backend("heap").open(directory, stream().operators[0].tables(), (), groups, MAX_PARALLELISM)
    try:
        return state.tables[TABLE].rows
    finally:
        state.close()


# --- the stream -------------------------------------------------------------------------------------------------------


class Running:
    """The stream: every step's input is kept as a Parquet file, and every step is a checkpoint."""

    def __init__(self, place: OpenWarehouse, inputs: Path, sizes: Sizes) -> None:
        self.place, self.inputs, self.sizes = place, inputs, sizes
        inputs.mkdir()
        self._draw = np.random.default_rng(1)
        self._run = RegionRun(place, stream(), policy_by_name(DEFAULT_POLICY), SUBTASKS)
        self.steps = 0
        self._step(self._draw.permutation(sizes.keys))

    def upto(self, steps: int) -> None:
        """Run up to a number of steps after the first, and keep only the newest checkpoint."""
        while self.steps < steps + 1:
            self._step(self._draw.choice(self.sizes.keys, self.sizes.step_rows, replace=False))
        truncate(self.place, stream().name, RetentionOptions(keep_last=1))

    def _step(self, keys: np.ndarray) -> None:
        rows: pa.Table = rows_for(keys, self._draw)
        pq.write_table(rows, self.inputs / f"{self.steps:06d}.parquet", compression="zstd")
        self._run.step(rows)
        self.steps += 1

    def stored(self) -> dict[str, int]:
        """Return kind -> bytes stored now."""
        name, catalog = stream().name, self.place.catalog
        objects = {stored.name: stored.bytes for stored in catalog.objects.list(name)}
        local = self.place.warehouse.local.work(name, self._run.region.epoch)
        log = sum(
            len(step.offsets) + len(step.sources or "")
            for step in catalog.input_log.list(name, catalog.checkpoints.last_id(name))
        )
        return {
            "input log": sum(path.stat().st_size for path in self.inputs.iterdir()) + log,
            "bases": sum(size for path, size in objects.items() if is_base(path)),
            "deltas and manifests": sum(size for path, size in objects.items() if not is_base(path)),
            "working state": sum(path.stat().st_blocks * 512 for path in local.rglob("*") if path.is_file()),
        }


def measure(approach: str, running: Running, scratch: Path) -> Resumed:
    """Resume a copy of the current warehouse.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    root, copy, result = running.place.warehouse.local.root, scratch / "copy", scratch / "resumed.json"
    copy.mkdir()
    if approach != "replay":
        leave = shutil.ignore_patterns("work") if approach == "checkpoint" else None
        shutil.copytree(root, copy, ignore=leave, dirs_exist_ok=True)
    os.sync()  # otherwise the first commit waits until the copy is on the disk
    code = "import sys; from benchmarks.approaches import resume; resume(*sys.argv[1:])"
    command = [sys.executable, "-c", code, approach, str(copy), str(running.inputs), str(result)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with watch_memory(process.pid) as peak:
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"resuming by {approach} failed:\n{said[-4000:]}")
    found = json.loads(result.read_text())
    shutil.rmtree(copy)
    assert found["rows"] == running.sizes.keys, f"{approach} came back with {found['rows']} rows"
    return Resumed(approach, running.steps - 1, found["seconds"], peak.together)


def run(scratch: Path, picture_to: Path, *, quick: bool = False) -> Report:
    """Measure all three ways at every length, and draw a picture."""
    sizes = QUICK if quick else Sizes()
    found: dict[str, list[Resumed]] = {approach: [] for approach in APPROACHES}
    stored: list[dict[str, int]] = []
    with OpenWarehouse.open_writable(str(scratch / "warehouse")) as place:
        running = Running(place, scratch / "inputs", sizes)
        for length in sizes.lengths:
            running.upto(length)
            stored.append(running.stored())
            for approach, resumed in found.items():
                tries = [measure(approach, running, scratch) for _ in range(sizes.rounds)]
                seconds, peak = median(t.seconds for t in tries), max(t.peak_bytes for t in tries)
                resumed.append(Resumed(approach, length, seconds, peak))
    picture(found, stored, picture_to)
    numbers = {"resumed": {a: [vars(r) for r in resumed] for a, resumed in found.items()}, "stored_bytes": stored}
    return Report(_tables(sizes, found, stored), goals(sizes, found), numbers)


def goals(sizes: Sizes, found: dict[str, list[Resumed]]) -> list[Goal]:
    """Compare what resuming took in each way with its goals."""
    grown = sizes.lengths[-1] / sizes.lengths[0]
    reached = []
    for approach, resumed in found.items():
        what = f"resume by {APPROACHES[approach]}: growth while the stream grows {grown:g} times"
        growth = resumed[-1].seconds / resumed[0].seconds
        if approach == "replay":
            reached.append(Goal(what, growth, at_least=GROWS_AT_LEAST * grown))
        else:
            reached.append(Goal(what, growth, at_most=FLAT_AT_MOST))
    longest_s = max(resumed.seconds for resumed in found["local"])
    reached.append(Goal(f"resume by {APPROACHES['local']}: seconds, longest", longest_s, at_most=AT_HAND_AT_MOST_S))
    return reached


def _tables(sizes: Sizes, found: dict[str, list[Resumed]], stored: list[dict[str, int]]) -> list[Any]:
    of = f"{sizes.keys:,} keys, {sizes.step_rows:,} rows per step"
    resuming = table_of(f"resuming a stream of {of}", "steps", *(f"{t}, s" for t in APPROACHES.values()), left=0)
    memory = table_of("peak memory of that, MB", "steps", *APPROACHES.values(), left=0)
    storage = table_of("stored, MB, with one checkpoint retained", "steps", *stored[0], left=0)
    for i, length in enumerate(sizes.lengths):
        resuming.add_row(str(length), *(f"{resumed[i].seconds:.3f}" for resumed in found.values()))
        memory.add_row(str(length), *(f"{resumed[i].peak_bytes / MB:.0f}" for resumed in found.values()))
        storage.add_row(str(length), *(f"{size / MB:.1f}" for size in stored[i].values()))
    return [resuming, storage, memory]


def picture(found: dict[str, list[Resumed]], stored: list[dict[str, int]], path: Path) -> None:
    """Draw seconds to resume and bytes stored over the length of the stream, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    lengths = [resumed.steps for resumed in next(iter(found.values()))]
    for approach, resumed in found.items():
        times.plot(lengths, [r.seconds for r in resumed], marker="o", label=APPROACHES[approach])
    for kind in stored[0]:
        sizes.plot(lengths, [sizes_of[kind] / MB for sizes_of in stored], marker="o", label=kind)
    for axes, title in ((times, "Seconds to resume"), (sizes, "MB stored")):
        axes.set_title(title)
        axes.set_xlabel("steps of the stream")
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
