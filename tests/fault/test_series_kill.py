"""A restore of many checkpoints is killed: what appeared is whole, the rest comes with the next, nothing is left."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.restore.series import RestoredLabel, read_label
from siltstone.settings import Settings
from siltstone.spark.operations import series
from siltstone.store import scratch
from tests.fault.small_stream import SMALL, purchases
from tests.region_run import RegionRun

CHECKPOINTS = 5
LABELS = {f"day-{n}": min(n, CHECKPOINTS) for n in range(1, CHECKPOINTS + 2)}
"""the last two show the same checkpoint"""
SOME_CHAINS = policy_by_name("adjust-d", PolicyOptions(d0=3, size_ratio_max=None, space_amplification_max=None))


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    url = str(tmp_path / "w")
    with OpenWarehouse.open_writable(url) as place:
        run = RegionRun(place, SMALL, SOME_CHAINS, parallelism=2)
        for rows in purchases()[:CHECKPOINTS]:
            run.step(rows)
    return url


def restore(
    warehouse: str, patch: pytest.MonkeyPatch, on_piece: Callable[[], None], on_label: Callable[[RestoredLabel], None]
) -> series.SeriesResult:
    """Restore all, two checkpoints at once, tasks one after the other in this process."""

    def run(_: Any, function: Callable[[Any], Any], pieces: Sequence[Any], **__: Any) -> list[Any]:
        results = []
        for piece in pieces:
            results.append(function(piece))
            on_piece()
        return results

    patch.setattr(series, "spark_map", run)
    patch.setattr(series, "spark_session", lambda *_: None)
    patch.setattr(series, "AT_ONCE", 2)
    patch.setattr(scratch, "NEW_S", 0.0)
    return series.restore_series(Settings(warehouse=warehouse), SMALL.name, LABELS, on_label)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def victim(warehouse: str, where: str, after: int) -> None:
    """Restores, and kills itself after so many pieces of work, or labels."""
    done = {"piece": 0, "label": 0}

    def count(what: str) -> None:
        done[what] += 1
        if (what, done[what]) == (where, after):
            die()

    restore(warehouse, pytest.MonkeyPatch(), lambda: count("piece"), lambda _: count("label"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("where", "after"), [("piece", 1), ("piece", 15), ("label", 1), ("label", 3), ("label", 6)])
def test_killed_and_run_again(warehouse: str, monkeypatch: pytest.MonkeyPatch, where: str, after: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=victim, args=(warehouse, where, after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL

    with OpenWarehouse.open_existing(warehouse) as place:
        digests = {record.id: record.digest for record in place.catalog.checkpoints.list(SMALL.name)}
        rows = {record.id: record.rows for record in place.catalog.checkpoints.list(SMALL.name)}
        root = place.warehouse.local.restored_series(SMALL.name)
    appeared = {path.name for path in root.iterdir() if not path.name.startswith(".")}
    assert (where == "piece" and after == 1) == (not appeared)
    for label in appeared:
        found = read_label(root, label)
        assert found is not None and found.digest == digests[LABELS[label]]
        assert sum(pq.read_table(t).num_rows for t in tables(root / label)) == rows[LABELS[label]]
    before = contents(root)

    told: list[str] = []
    result = restore(warehouse, monkeypatch, lambda: None, lambda label: told.append(label.label))
    assert not result.failed
    assert {label.label for label in result.kept} == appeared
    assert set(told) == {label.label for label in result.restored} == LABELS.keys() - appeared
    assert {path.name for path in root.iterdir()} == LABELS.keys(), "nothing may be left of the killed one"
    after_it = contents(root)
    assert all(after_it[name] == content for name, content in before.items() if not name.startswith("."))
    for label, checkpoint in LABELS.items():
        assert read_label(root, label) == RestoredLabel(label, checkpoint, digests[checkpoint], rows[checkpoint])
        assert sum(pq.read_table(t).num_rows for t in tables(root / label)) == rows[checkpoint]


def tables(label: Path) -> list[Path]:
    """Its tables; an opaque variable holds bytes, not rows."""
    return [path for path in label.glob("*/*") if path.is_dir() and path.name != "amounts"]


def test_one_that_is_at_work_keeps_what_it_writes(warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenWarehouse.open_existing(warehouse) as place:
        root = place.warehouse.local.restored_series(SMALL.name)
    with series.make_staging_directory(root) as other:
        (other / "1").mkdir()
        assert len(restore(warehouse, monkeypatch, lambda: None, lambda _: None).restored) == len(LABELS)
        assert (other / "1").is_dir()
    assert not other.exists()


def test_damage_costs_only_the_checkpoints_behind_it(warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenWarehouse.open_existing(warehouse) as place:
        damaged = [o for o in place.catalog.objects.list(SMALL.name) if o.kind is ObjectKind.SEGMENT][-1]
        path = place.warehouse.local.objects / damaged.name
        root = place.warehouse.local.restored_series(SMALL.name)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    result = restore(warehouse, monkeypatch, lambda: None, lambda _: None)
    failed = {failure.checkpoint for failure in result.failed}
    assert damaged.checkpoint in failed and min(failed) == damaged.checkpoint
    assert any(damaged.name in failure.reason for failure in result.failed)
    whole = {label for label, checkpoint in LABELS.items() if checkpoint not in failed}
    assert {label.label for label in result.restored} == whole == {path.name for path in root.iterdir()}
