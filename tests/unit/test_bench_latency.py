"""The benchmark of latency: which rows count, from when to when, and what the goal is."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import latency
from benchmarks.latency import OURS, PEER, PENDING


def rows(*arrived: int) -> pa.Table:
    return pa.table({"arrived": pa.array(arrived, pa.int64())})


def test_each_row_counts_once_it_is_visible_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / latency.OUTPUT).mkdir()
    batches = [(9.0, rows(1)), (12.0, rows(10_500, 11_000)), (14.0, rows()), (20.0, rows(2))]
    for number, (now, table) in enumerate(batches):
        monkeypatch.setattr(latency.time, "time", lambda now=now: now)
        latency.deliver(tmp_path, table, number)
    assert sorted(f.name for f in (tmp_path / latency.OUTPUT).iterdir()) == [f"00000{n}.parquet" for n in (0, 1, 3)]
    assert pq.read_table(tmp_path / latency.OUTPUT / "000001.parquet").num_rows == 2
    assert latency.delays(tmp_path, 10.0, 20.0).tolist() == pytest.approx([1.5, 1.0])


def test_p99_has_a_goal_beside_sparks() -> None:
    found = {OURS: [{50: 0.5, 99: 1.0}] * 2, PENDING: [{50: 0.5, 99: 3.0}] * 2, PEER: [{50: 1.0, 99: 2.0}] * 2}
    goals = latency.report_of(found).goals
    assert [(goal.measured, goal.is_kept) for goal in goals] == [(0.5, None), (0.5, True), (0.5, None), (1.5, False)]


def test_a_system_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-system"):
        latency.measure("no-such-system", tmp_path, 0.1, 0.1)
