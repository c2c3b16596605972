"""The benchmarks of stores and changelog at tiny sizes: what they count and how they put it, not their speed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import changelog, checkpoints, stores
from benchmarks.checkpoints import Deployment, simulate
from benchmarks.goals import Goal, Report, goals_table
from siltstone.changelog.upload_options import UploadOptions
from siltstone.model import Form, KeyGroupRange
from siltstone.store.open import open_store


def test_a_goal_is_met_or_missed_or_has_no_bound():
    goals = [Goal("a", 1.0, at_most=1), Goal("b", 1.1, at_most=1), Goal("c", 0.9, at_least=0.9), Goal("d", 5.0)]
    assert [goal.is_kept for goal in goals] == [True, False, True, None]
    assert [goal.bound for goal in goals] == ["<= 1", "<= 1", ">= 0.9", "-"]
    assert goals_table(goals).row_count == 4


def test_a_goal_is_missed_only_by_more_than_the_spread():
    def verdict(*rounds: float, **bound: float) -> tuple[bool | None, str]:
        goal = Goal.of_rounds("a", rounds, **bound)
        return goal.is_kept, goal.verdict

    assert verdict(0.8, 1.0, 1.4, at_most=1) == (True, "met")
    assert verdict(0.9, 1.2, 1.4, at_most=1) == (True, "within the spread")
    assert verdict(1.1, 1.2, 1.4, at_most=1) == (False, "missed")
    assert verdict(3.0, 4.0, 5.5, at_least=5) == (True, "within the spread")
    assert verdict(3.0, 4.0, 4.5, at_least=5) == (False, "missed")
    assert verdict(1.0, 2.0) == (None, "")


@pytest.mark.server
@pytest.mark.parametrize("of_store", stores.STORES, ids=lambda of_store: of_store.__name__)
def test_each_contest_moves_the_same_bytes_both_ways(of_store: Callable, tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    with of_store(tmp_path, data) as contests:
        outcomes = [stores.run_contest(contest, len(data), 2) for contest in contests]
        reading = [contest for contest in contests if contest.what.startswith("read")]
        assert [bytes(contest.ours(0)) for contest in reading] == [data]
        assert [contest.raw(0) for contest in reading] == [data]
    assert all(len(outcome.ours_s) == len(outcome.raw_s) == 2 for outcome in outcomes)
    assert {outcome.what.split()[0] for outcome in outcomes} == {"read", "write"}


def test_ratios_are_of_pairs():
    outcome = stores.Outcome("s", "write", 1, [1.0, 2.0, 10.0], [2.0, 2.0, 5.0])
    assert (outcome.ratios, outcome.best_ratio) == ([2.0, 1.0, 0.5], 2.0)


def test_batches_share_objects_and_single_segments_do_not(tmp_path: Path) -> None:
    parts = changelog.segments(30, changelog.SEGMENT_BYTES)
    assert all(9_000 < len(part.pack()) < 11_500 for part in parts)
    store = open_store(str(tmp_path))
    slow = UploadOptions(persist_delay_s=10)  # the last writer sends it
    assert changelog.store_segments(store, parts, slow, 1)["objects"] == 1
    single = changelog.store_segments(store, parts, UploadOptions(size_threshold_bytes=1, hedging=False), 2)
    assert (single["objects"], single["requests"]) == (30, 30)
    assert list(store.list("")) == []


@pytest.mark.server
def test_all_that_is_read_for_one_variable_is_counted(tmp_path: Path) -> None:
    with changelog.warehouses(tmp_path) as urls:
        assert len(urls) == 4
        for number, (where, url) in enumerate(urls.items()):
            found = changelog.restore_one(url, tmp_path / f"{number}.db", 500, 50, 2)
            assert found["checkpoints"] == 3
            assert 8 * found["own_bytes"] < found["whole_bytes"] < 12 * found["own_bytes"], where
            assert found["read_bytes"] >= found["own_bytes"] + found["manifest_bytes"] > found["own_bytes"], where


def test_a_checkpoint_is_as_late_as_its_slowest_request():
    def draw(n: int) -> np.ndarray:
        return np.tile([1.0, 2.0, 3.0, 4.0], n // 4 + 1)[:n]

    at_once, sent = simulate(draw, Deployment(4, 2, 2), 10, hedged=False)
    assert (at_once == 4).all() and sent == 0
    by_turns, _ = simulate(draw, Deployment(4, 1, 1), 10, hedged=False)
    assert (by_turns == 10).all()
    assert Deployment(4, 1, 1).concurrency == 1 and Deployment(500, 200, 5).concurrency == 500


def test_hedging_within_its_budget_shortens_simulated_checkpoints():
    def draw(n: int) -> np.ndarray:
        return np.where(np.random.default_rng(1).random(n) < 0.01, 30.0, 1.0 + np.random.default_rng(2).random(n) / 10)

    plain, _ = simulate(draw, Deployment(100, 5, 20), 100, hedged=False)
    hedged, sent = simulate(draw, Deployment(100, 5, 20), 100, hedged=True)
    assert 0 < sent <= 0.05
    assert np.mean(hedged) < 0.8 * np.mean(plain)


@pytest.mark.server
def test_latencies_are_measured_one_by_one():
    name, seconds = checkpoints.measured_latencies(2)
    assert name.startswith("S3") and len(seconds) == 2 and (seconds > 0).all()


@pytest.mark.slow
def test_indexes_hold_their_entries_in_few_bytes():
    for form in (Form.BASE, Form.DELTA):
        found = changelog.entries(form, 10, KeyGroupRange(4, 8), 1)
        assert [entry.form for entry in found] == [form] * 10
    report = changelog.measure_indexes(max_parallelism=64)
    assert len(report.numbers) == 12
    assert [goal.is_kept for goal in report.goals] == [True, True]


def test_parts_run_alone_or_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def part(name: str) -> bench.Part:
        def run(scratch: Path, options: object) -> Report:
            ran.append(name)
            return Report(goals=[Goal(name, 1.0, at_most=2)])

        return run

    monkeypatch.setattr(bench, "PARTS", {name: part(name) for name in bench.PARTS})
    out = ["--json", str(tmp_path / "bench.json")]
    assert bench.main(out) == 0
    every = ["step", "stores", "changelog", "hedging", "lifecycle", "sensors", "startup", "outputs", "checksums"]
    every += [
        "input",
        "operators",
        "keyed",
        "timers",
        "ttl",
        "joins",
        "windows",
        "rolling",
        "backends",
        "heap",
        "rocksdb",
        "files",
        "pending",
        "uploads",
        "throughput",
        "python",
        "latency",
    ]
    assert ran == every
    assert bench.main(["stores", *out]) == 0
    assert ran[len(every) :] == ["stores"]
    assert '"stores"' in (tmp_path / "bench.json").read_text()
    with pytest.raises(SystemExit):
        bench.main(["memory"])


def test_a_missed_goal_is_named_and_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    report = Report(goals=[Goal("seconds", 2.0, at_most=1), Goal("rows", 1.0, at_most=1), Goal("bytes", 3.0)])
    monkeypatch.setattr(bench, "PARTS", {"step": lambda scratch, options: report})
    assert bench.main(["--json", str(tmp_path / "bench.json")]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "missed:" in line] == ["missed: seconds"]


def test_hedging_is_held_to_the_goals_of_the_flip():
    runs = {"without": {"p99.9_s": 2.0, "p50_s": 1.0, "requests": 100}, "with": {"p99.9_s": 1.0, "p50_s": 1.02}}
    runs["with"]["requests"] = 106
    assert [goal.is_kept for goal in bench.hedging_report(runs).goals] == [True, True, False]
