"""A catalog that is older than its store, and what looks like that."""

import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.recover import recover
from siltstone.errors import WrongWarehouse
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.orphan_rules import Reason
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.store.paths import CheckpointPath
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, in_order
from tests.region_run import RegionRun
from tests.stored import stream_objects

POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3))
BASES = policy_by_name("adjust-d", PolicyOptions(d0=0, d_max=0))


def written(place: OpenWarehouse) -> set[int]:
    """The checkpoints of which something is stored."""
    paths = (CheckpointPath.of(name) for name, _ in place.warehouse.store.list(f"{SMALL.name}/"))
    return {path.checkpoint for path in paths if path}


@pytest.mark.slow
def test_a_backup_of_the_newest_run_is_noticed_although_later_checkpoints_are_deleted(tmp_path: Path) -> None:
    root, rows = tmp_path / "w", purchases()
    with OpenWarehouse.open_writable(str(root)) as place:
        run = RegionRun(place, SMALL, POLICY)
        run.step(rows[0])
        with sqlite3.connect(root / "catalog.db") as now, sqlite3.connect(root / "during.db") as backup:
            now.backup(backup)
        for n in range(1, 8):
            run.step(rows[n])
        newest = place.catalog.checkpoints.last_id(SMALL.name)
        deleted = delete_checkpoints(place, SMALL.name, range(1, newest))
        assert 3 in deleted.deleted, "the manifest two above the backup's newest is gone"
    for path in root.glob("catalog.db*"):
        path.unlink()
    (root / "during.db").rename(root / "catalog.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        before = dict(stream_objects(place.warehouse.store))
        for change in (
            lambda: sweep(place, SMALL.name, SweepOptions(age_guard=timedelta(0))),
            lambda: delete_checkpoints(place, SMALL.name, ()),
            lambda: recover(place, SMALL.name, run=in_order),
        ):
            with pytest.raises(WrongWarehouse, match="older than the store"):
                change()
        assert dict(stream_objects(place.warehouse.store)) == before
        recovered = recover(place, SMALL.name, run=in_order, accept_loss=True)
        assert (recovered.checkpoint, recovered.given_up) == (0, (1,)), "retention has deleted what it needs"
        again = RegionRun(place, SMALL, POLICY)
        again.step(rows[0])
        again.region.close("done")
        assert not failures(place, SMALL.name)


def test_what_a_run_had_pending_is_swept_once_another_has_begun(tmp_path: Path) -> None:
    """A catalog that is older than its store is refused, so nothing ahead of the newest checkpoint can be complete."""
    rows = purchases()
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        killed = RegionRun(place, SMALL, BASES, max_pending=2)
        for n in range(3):
            killed.step(rows[n])  # the third waits until the first is complete
        assert written(place) == {1, 2, 3}
        assert place.catalog.checkpoints.last_id(SMALL.name) == 1
        beside = sweep(place, SMALL.name, SweepOptions(age_guard=timedelta(0)))
        assert any(finding.reason == Reason.AHEAD for finding in beside.reasons), "its run may be at work"
        run = RegionRun(place, SMALL, BASES)
        assert sweep(place, SMALL.name).deleted
        assert written(place) == {1}
        run.step(rows[1])
        run.region.close("done")
        assert not failures(place, SMALL.name)
