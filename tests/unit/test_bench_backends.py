"""The benchmarks of backends alone, at sizes at which numbers say nothing: they measure what they have goals for."""

from pathlib import Path

import pytest

from benchmarks import heap, rocksdb


@pytest.mark.slow
def test_the_heap_is_measured_with_and_without_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "BATCH", 1000)
    for name, least in (("TURNS", 2), ("ROUNDS", 2), ("STEPS", 2)):
        monkeypatch.setattr(heap, name, least)
    for case in heap.CASES:
        found = heap.measure(case, tmp_path / case.name, 20_000)
        assert len(found["snapshot_ms"]) == len(found["beside_snapshot"]) == 2
        assert all(each > 0 for each in (*found["snapshot_ms"], *found["beside_snapshot"], found["look_ups"]))


def test_both_sides_of_rocksdb_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb, "QUICK_ROWS", 3000)
    monkeypatch.setattr(rocksdb, "BATCH", 1000)
    monkeypatch.setattr(rocksdb, "ROUNDS", 3)
    report = rocksdb.run(tmp_path, quick=True)
    assert all(len(of["ratios"]) == 3 and min(of["ratios"]) > 0 for of in report.numbers.values())
    assert [goal.at_least for goal in report.goals] == [0.8, 0.8, None]
