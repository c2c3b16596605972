"""The benchmarks of the life cycle at tiny sizes: that both sides do the same, and what is counted."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import approaches, chains, housekeeping, outputs, space
from benchmarks.approaches import Resumed
from benchmarks.chains import Load, load, loads, rewrite
from benchmarks.states import SUBTASKS, Balances, always_deltas, new_chain
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions

pytestmark = pytest.mark.slow


def test_the_worst_chain_is_as_long_as_the_bounds_allow(tmp_path: Path) -> None:
    bounds = PolicyOptions(d0=5, d_max=5)
    with new_chain(str(tmp_path / "w"), 20_000, bounds) as chain:
        newest, share = chain.lengthen(bounds)
        assert newest == 6
        assert 1.6 < share <= 2.0
        tasks = loads(chain.warehouse, tmp_path, SUBTASKS)
        assert sum(map(load, tasks)) == 20_000
        assert sum(map(load, loads(chain.warehouse, tmp_path, 8))) == 20_000


def test_the_plain_rewrite_leaves_the_same_rows_in_the_same_form(tmp_path: Path) -> None:
    with new_chain(str(tmp_path / "w"), 2_000, always_deltas()) as chain:
        bases = chains.bases(chain.warehouse)
        assert len(bases) == SUBTASKS
        rewrite((bases[0], tmp_path / "again"))
        one, other = (pq.ParquetFile(path).metadata.row_group(0) for path in (bases[0], tmp_path / "again"))
        encodings = [[set(g.column(i).encodings) for i in range(g.num_columns)] for g in (one, other)]
        assert encodings[0] == encodings[1]
        assert pq.read_table(bases[0]).equals(pq.read_table(tmp_path / "again"))
        whole = loads(chain.warehouse, tmp_path, 1)[0]
        read = Load(whole.warehouse, (), whole.step, whole.groups, tmp_path / "plain", tuple(bases))
        assert load(read) == load(whole) == 2_000


def test_a_sweep_finds_what_was_left_and_lists_once(tmp_path: Path) -> None:
    report = housekeeping.measure_sweep(tmp_path, 600)
    assert (report.numbers["objects"], report.numbers["orphans"], report.numbers["lists"]) == (600, 6, 1)


def test_metadata_is_counted_with_what_truncation_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "TRUNCATED_EVERY", 20)
    numbers = housekeeping.measure_metadata(tmp_path, 40).numbers
    assert numbers["catalog_bytes"] > 40_000 and 1_000 < numbers["manifest_bytes"] < 20_000
    assert numbers["left"] == 40  # one chain


def test_each_way_comes_back_with_every_key(tmp_path: Path) -> None:
    sizes = approaches.Sizes(500, 50, (2,), 1)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        running = approaches.Running(place, tmp_path / "inputs", sizes)
        running.upto(2)
        stored = running.stored()
        assert min(stored.values()) > 0 and "input log" in stored
        resumed = approaches.measure("local", running, tmp_path)
    assert (resumed.approach, resumed.steps) == ("local", 2) and resumed.seconds > 0
    slopes = dict(zip(approaches.APPROACHES, (1, 1, 2), strict=True))
    resumed_by = {name: [Resumed(name, n, n * slope / 50, 1) for n in (2, 4)] for name, slope in slopes.items()}
    approaches.picture(resumed_by, [stored, stored], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    reached = approaches.goals(approaches.Sizes(1, 1, (2, 4)), resumed_by)
    assert [goal.is_kept for goal in reached] == [True, True, True, True]


def test_space_is_counted_for_one_operator(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        found = space.amplification(place, Balances(), space.update_heavy(2_000), 3)
        windows = space.amplification(place, space.Sliding(), space.sliding_window(50), 12)
    assert all(1 <= own < whole for own, whole in zip(found.own, found.all, strict=True))
    assert len(windows.own) == 12


def test_the_stream_with_a_sink_hands_over_every_row_and_the_one_without_none(tmp_path: Path) -> None:
    found = outputs.measure(tmp_path, 500, 50, 2)  # which counts the rows
    assert {name: len(seconds) for name, seconds in found.items()} == {"with": 2, "without": 2, "delivery": 2}
    with (
        OpenWarehouse.open_existing(str(tmp_path / "500-50-with")) as sink,
        OpenWarehouse.open_existing(str(tmp_path / "500-50-without")) as none,
    ):
        assert (
            sink.catalog.checkpoints.get_latest("bench").digest == none.catalog.checkpoints.get_latest("bench").digest
        )
        assert sink.catalog.outbox.list("bench") and not none.catalog.outbox.list("bench")
