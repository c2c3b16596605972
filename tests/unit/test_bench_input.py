"""The benchmark of checks and digests: its sides differ in what they leave out, and in nothing else."""

from pathlib import Path

import pytest

from benchmarks import input as part
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.run.step_digests import decode_digests


@pytest.mark.slow
def test_each_side_leaves_out_what_it_says(tmp_path: Path) -> None:
    found = part.measure(tmp_path, 400, 40, 3)  # which compares the states
    assert {side: len(took) for side, took in found.items()} == dict.fromkeys(part.SIDES, 3)
    digests = {}
    for side in part.SIDES:
        with OpenWarehouse.open_existing(str(tmp_path / f"400-40-{side}")) as place:
            newest = place.catalog.input_log.list("bench", 99)[-1]
        digests[side] = decode_digests(newest.digests)["totals"]
    assert digests["both"] == digests["digests"] and digests["neither"] == digests["checks"]
    read = digests["both"].read
    assert read is not None and (read.rows, bool(read.digest)) == (40, True)
    assert digests["neither"].read is not None and digests["neither"].read.digest == 0
    report = part.report_of({"small": found}, {"checks": [1.0], "digests": [9.0]})
    assert len(report.goals) == 5 and [goal.is_kept for goal in report.goals] == [None, None, None, True, None]
