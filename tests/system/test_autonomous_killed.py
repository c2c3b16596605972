"""A stream with an autonomous operator is killed at any moment: both go on from checkpoints of their own."""

import time
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from tests.fault.processes import Run
from tests.fault.reference import small
from tests.proofs import failures

NAMES = ("beside", "beside-audit")
KILLS = 2
STEP_S = 1.0
"""within which of a new checkpoint a kill comes"""
MORE = 4


def newest(warehouse: Path) -> list[int]:
    """The newest checkpoint of both."""
    try:
        with OpenWarehouse.open_existing(str(warehouse)) as place:
            return [place.catalog.checkpoints.last_id(name) for name in NAMES]
    except UsageError:  # it has not come so far
        return [0, 0]


def rows(warehouse: Path, stream: str, operator: str) -> pa.Table:
    """What one of them has delivered, as anybody reads it."""
    return pq.read_table(warehouse / "sink" / stream / operator).drop_columns("checkpoint").sort_by("sequence")


def test_both_have_each_row_once(tmp_path: Path) -> None:
    warehouse, chance = tmp_path / "w", Random(5)
    command = ["run", "beside", "--warehouse", str(warehouse), "--parallelism", "2", "--json"]
    for _ in range(KILLS):
        before = newest(warehouse)
        run = Run([command], tmp_path, "local[2]")
        try:
            both = run.until(lambda: all(now > then for now, then in zip(newest(warehouse), before, strict=True)))  # noqa: B023
            assert both, run.wait(10).said
            time.sleep(chance.random() * STEP_S)
        finally:
            run.kill_all()
        with OpenWarehouse.open_existing(str(warehouse)) as place:
            assert not [failure for name in NAMES for failure in failures(place, name)]
    assert newest(warehouse)[0] + MORE <= len(small().digests), "it was killed in the middle"
    run = Run([command], tmp_path, "local[2]")
    try:
        end = run.wait(240)
    finally:
        run.kill_all()
    assert end.code == 0 and end.result is not None, end.said
    assert end.result["digest"] == small().digests[-1]
    [audit] = end.result["autonomous"]
    assert audit["stream"] == "beside-audit" and audit["checkpoints"]
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        assert not [failure for name in NAMES for failure in failures(place, name)]
    region, beside = rows(warehouse, "beside", "accounts"), rows(warehouse, "beside-audit", "audit")
    assert region.num_rows == sum(len(table) for table in small().batches) and beside.equals(region)
