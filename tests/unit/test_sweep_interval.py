"""Sweeps of what a run has logged for a checkpoint that takes longer than the age guard."""

import os
import time
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.upload_options import UploadOptions
from siltstone.retention.sweep import sweep
from siltstone.store.paths import CheckpointPath
from tests.proofs import check_whole
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY, STREAM, rows


def age(place: OpenWarehouse, prefix: str, days: int) -> None:
    """Let what has been stored under a prefix be this old."""
    for name, _ in list(place.warehouse.store.list(prefix)):
        at = time.time() - days * 86400
        os.utime(place.warehouse.local.objects / name, (at, at))


def test_the_first_steps_of_an_interval_that_is_longer_than_the_age_guard_stay(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        RegionRun(place, STREAM, POLICY).step(rows(1))
        run = RegionRun(place, STREAM, POLICY, checkpoint_steps=3, upload=UploadOptions(inline_bytes=0))
        begun = CheckpointPath(NAME, run.region.epoch, 2).prefix
        run.step(rows(2))
        age(place, begun, days=4)
        run.step(rows(3))
        assert sweep(place, NAME).deleted == 0
        assert run.step(rows(4))
        check_whole(place, [1, 2])


def test_an_interval_in_which_nothing_was_stored_for_the_age_guard_is_abandoned(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        RegionRun(place, STREAM, POLICY).step(rows(1))
        run = RegionRun(place, STREAM, POLICY, checkpoint_steps=3, upload=UploadOptions(inline_bytes=0))
        run.step(rows(2))
        run.step(rows(3))
        age(place, CheckpointPath(NAME, run.region.epoch, 2).prefix, days=4)
        assert sweep(place, NAME).deleted == 2
        check_whole(place, [1])
