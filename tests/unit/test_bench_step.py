"""The step benchmark's own arithmetic: its input, its medians and ratios, its memory sampler."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import rounds
from benchmarks import workload as w
from benchmarks.memory import watch_memory
from benchmarks.rounds import Rounds, Run
from benchmarks.sampling import PROC
from benchmarks.summary import TITLES, Summary, picture
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
    assert (ours.delta_s, ours.trigger_s, ours.mean_s) == (0.1, 0.1, pytest.approx(2.575))
    assert ours.phases_ms() == {"triggerExecution": 100, "process": 25}
    assert ours.load_s == 1.0
    # Three steps, and one that takes a hundred times as long, and as long again until its checkpoint is complete.
    assert (ours.wall_s, ours.cpu_s) == (pytest.approx((3 * 0.1 + 2 * 10) / 4), 10 / 4)
    summary = Summary(Rounds(TITLES, runs))
    assert [round(goal.measured, 2) for goal in summary.goals()] == [
        *(0.25, 0.25, 0.25, 2.0, 2.0, 2.0, 0.4),
        *(0.22, 0.22, 0.22, 2.2, 2.2, 2.2, 0.44),
        *(1.1, 1.1, 2.0),
    ]
    assert len(list(summary.tables())) == 4
    assert len(summary.rounds.to_json()["runs"]) == 6
    picture(summary.rounds, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_writes_a_base_counts_on_both_sides():
    """Most of our steps write bases here: their trigger is what stands beside Spark's, not that of the others."""
    workload = Workload(1000, 10, 1, 3)
    ours, theirs = run_of("siltstone", workload, 100, 40, 7), run_of("rocksdb", workload, 100, 40, 7)
    ours.steps[-2].update(base=True, trigger_ms=300)
    goals = {goal.what: goal for goal in Rounds(TITLES, [ours, theirs]).compare_step(workload, "siltstone", "rocksdb")}
    assert goals["trigger, 1k, 10: Siltstone / Spark, RocksDB"].measured == pytest.approx(3.0)
    ours.steps[-3]["base"] = True  # each step changes so much that it is a base
    assert (ours.bases, ours.delta_bytes) == (3, 40)


def test_a_ratio_is_taken_within_each_round():
    """A round in which the machine is slow slows both of its sides."""
    workload = Workload(1000, 10, 1, 3)
    pairs = [(100, 200), (1000, 1000), (300, 200)]
    runs = [run_of(("siltstone", "rocksdb")[i], workload, pair[i], 1, 1) for pair in pairs for i in range(2)]
    trigger, *_ = Rounds(TITLES, runs).compare_step(workload, "siltstone", "rocksdb", at_most=0.6)
    assert [trigger.low, trigger.measured, trigger.high] == pytest.approx([0.5, 1.0, 1.5])
    assert (trigger.is_kept, trigger.verdict) == (True, "within the spread")


def test_every_round_turns_the_order_about(tmp_path, monkeypatch):
    def measure(system: str, workload: Workload, inputs: Path, scratch: Path, module: str) -> Run:
        assert len(list(inputs.iterdir())) == workload.batches * FILES_A_STEP
        return run_of(system, workload, 100, 1, 1)

    monkeypatch.setattr(rounds, "measure", measure)
    one, other = Workload(100, 10, 1, 1), Workload(200, 10, 1, 1)
    found = rounds.run_rounds({"a": "A", "b": "B"}, [one, other], 3, tmp_path)
    assert [run.system for run in found.runs if run.workload == one] == ["a", "b", "b", "a", "a", "b"]
    assert found.workloads == [one, other] and len(found.of("a", other)) == 3
    assert not list(tmp_path.iterdir())


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
    ("other", "state_rows", "step_rows", "bound"),
    [
        ("rocksdb", 3_000_000, 100_000, 0.3),
        ("rocksdb", 10_000_000, 1_000_000, 0.06),
        ("stateless", 300_000, 10_000, 1.25),
        ("stateless", 300_000, 100_000, 1.15),
        ("stateless", 10_000_000, 1_000_000, 1.0),
    ],
)
def test_the_time_until_the_last_checkpoint_has_the_bounds_of_a_step(other, state_rows, step_rows, bound):
    """A trigger that is fast enough does not hide a checkpoint that completes late."""
    workload = Workload(state_rows, step_rows, 1, 3)
    late = run_of("siltstone", workload, bound * 100 - 1, 1, 1)
    late.steps[-1]["completed_s"] += 60
    others = [run_of(system, workload, 100, 1, 1) for system in ("rocksdb", "stateless")]
    goals = {goal.what: goal for goal in Summary(Rounds(TITLES, [late, *others])).goals()}
    trigger, wall = (
        goals[f"{what}, {workload.name}: Siltstone / {TITLES[other]}"] for what in ("trigger", "wall time per step")
    )
    assert (trigger.at_most, trigger.is_kept) == (bound, True)
    assert (wall.at_most, wall.is_kept) == (bound, False)
