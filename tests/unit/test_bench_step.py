"""The step benchmark's own arithmetic: its input, its medians and ratios, its memory sampler."""

import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import workload as w
from benchmarks.memory import watch_memory
from benchmarks.sampling import PROC
from benchmarks.summary import Run, Summary, picture
from benchmarks.workload import FILES_A_STEP, KEY, Workload, short


def test_input_loads_every_key_once_and_then_steps_through_distinct_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(w, "LOAD_ROWS", 400)
    workload = Workload(1000, 50, warm_up=1, measured=2)
    workload.write(tmp_path / "input")
    files = sorted((tmp_path / "input").iterdir())
    assert [f.stat().st_mtime for f in files] == sorted({f.stat().st_mtime for f in files})
    assert len(files) == workload.batches * FILES_A_STEP
    parts = [pq.read_table(f).column(KEY).to_numpy() for f in files]
    batches = [np.concatenate(parts[i : i + FILES_A_STEP]) for i in range(0, len(parts), FILES_A_STEP)]
    loads, steps = batches[: workload.load_steps], batches[workload.load_steps :]
    assert len(loads) == 3 and len(steps) == 3 and workload.first_measured == 4
    assert sorted(np.concatenate(loads)) == list(range(1000))
    assert all(len(np.unique(step)) == 50 for step in steps)


def test_counts_are_named_briefly():
    assert [short(n) for n in (10_000_000, 300_000, 1234)] == ["10M", "300k", "1234"]


def run_of(system: str, workload: Workload, step_ms: float, size: int, driver: int) -> Run:
    """Warm-up steps take ten times as long; the last step is a base and takes a hundred times as long.

    A step's trigger begins when the one before has ended, and its checkpoint is complete as long again after the end.
    """
    steps, began_s = [], 1_000.0
    for batch in range(workload.batches):
        warm, last = batch < workload.first_measured, batch == workload.batches - 1
        trigger = step_ms * (10 if warm else 100 if last else 1)
        durations = {"triggerExecution": trigger}
        steps.append(
            {"batch": batch, "trigger_ms": trigger, "bytes": size, "base": last, "durations_ms": durations}
            | {"phases_s": {"process": step_ms / 4000}}
            | {"began_s": began_s, "completed_s": began_s + 2 * trigger / 1000}
        )
        began_s += trigger / 1000
    return Run(system, workload, steps, {}, {"driver": driver}, 5, 1.0, cpu_seconds=step_ms / 10)


@pytest.mark.slow
def test_only_measured_delta_steps_count(tmp_path):
    small, large = Workload(1000, 10, 2, 4), Workload(30000, 10, 2, 4)
    runs = [
        run_of("siltstone", small, 100, 40, 7),
        run_of("rocksdb", small, 400, 100, 7),
        run_of("stateless", small, 50, 0, 7),
        run_of("siltstone", large, 110, 44, 14),
        run_of("rocksdb", large, 500, 100, 9),
        run_of("stateless", large, 50, 0, 9),
    ]
    ours = runs[0]
    assert (ours.delta_s, ours.all_s, ours.mean_s) == (0.1, 0.1, pytest.approx(2.575))
    assert ours.phases_ms() == {"triggerExecution": 100, "process": 25}
    assert ours.load_s == 1.0
    # Three steps, and one that takes a hundred times as long, and as long again until its checkpoint is complete.
    assert (ours.wall_s, ours.cpu_s) == (pytest.approx((3 * 0.1 + 2 * 10) / 4), 10 / 4)
    summary = Summary(runs)
    assert [round(goal.measured, 2) for goal in summary.goals()] == [
        *(0.25, 0.25, 0.25, 0.4),
        *(0.22, 0.22, 0.22, 0.44),
        *(1.1, 1.1, 2.0),
    ]
    assert len(list(summary.tables())) == 4
    assert len(summary.to_json()["runs"]) == 6
    picture(runs, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_peak_memory_of_a_process_and_its_workers():
    child = "x = bytearray(80 << 20); import time; time.sleep(0.6)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    with watch_memory(process.pid) as peak:
        process.wait()
    if not PROC.is_dir():
        assert not peak.anonymous  # and the benchmark prints a dash
        return
    assert peak.anonymous["worker"] > 80 << 20 > peak.anonymous["driver"]
    assert peak.resident["worker"] >= peak.anonymous["worker"]


@pytest.mark.parametrize(
    ("state_rows", "step_rows", "bound"), [(3_000_000, 100_000, 0.5), (10_000_000, 1_000_000, 0.07)]
)
def test_the_time_until_the_last_checkpoint_has_the_bounds_of_a_step(state_rows, step_rows, bound):
    """A trigger that is fast enough does not hide a checkpoint that completes late."""
    workload = Workload(state_rows, step_rows, 1, 3)
    late = run_of("siltstone", workload, bound * 100 - 1, 1, 1)
    late.steps[-1]["completed_s"] += 60
    goals = {goal.what: goal for goal in Summary([late, run_of("rocksdb", workload, 100, 1, 1)]).goals()}
    trigger, wall = (
        goals[f"{what}, {workload.name}: Siltstone / RocksDB"] for what in ("trigger", "wall time per step")
    )
    assert (trigger.at_most, trigger.is_kept) == (bound, True)
    assert (wall.at_most, wall.is_kept) == (bound, False)
