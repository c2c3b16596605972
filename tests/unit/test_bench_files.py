"""The benchmark of checkpoints as files: both sides come to the same, and one of them restores files."""

from pathlib import Path

import pytest

from benchmarks import files
from benchmarks.files import Side
from siltstone.chains.policies import DEFAULT_POLICY, FILES_POLICY


@pytest.mark.slow
def test_both_sides_take_checkpoints_and_are_restored(tmp_path: Path) -> None:
    sides = files.measure(tmp_path, 400, 30, 3)
    for side in sides.values():
        assert len(side.sizes) == len(side.seconds) == 4 and side.restore_s > 0
    assert sides[FILES_POLICY].sizes != sides[DEFAULT_POLICY].sizes


def test_the_goal_is_for_restores() -> None:
    sides = {FILES_POLICY: Side([9, 4, 2], [1, 1, 1], 1.0), DEFAULT_POLICY: Side([6, 1, 1], [1, 1, 1], 4.0)}
    restore, size = files.report_of(sides, "10 of 100 keys").goals
    assert (restore.measured, restore.is_kept, size.measured, size.is_kept) == (0.25, True, 3.0, None)
