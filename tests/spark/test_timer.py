"""Checkpoints that complete although no further input comes."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.operations import RunRequest, run, write_stream
from siltstone.stream import DIRECTORY
from tests.spark_runs import at, check_proven
from tests.spark_streams import COUNTS, STEPS, source_of, write_files


@pytest.mark.parametrize("interval", [{"checkpoint_steps": 99, "checkpoint_idle_s": 0.5}, {"checkpoint_s": 1.0}])
def test_the_last_steps_of_a_quiet_source_get_a_checkpoint(
    interval: dict[str, float], spark: SparkSession, tmp_path: Path
) -> None:
    settings, files = at(tmp_path / "w", **interval), tmp_path / "files"
    rows = source_of(STEPS[:3])(spark, {DIRECTORY: str(files)})
    completed = threading.Condition()

    def notify(_: object) -> None:
        with completed:
            completed.notify_all()

    def batches() -> int:
        with OpenWarehouse.open_existing(settings.warehouse) as place:
            return place.catalog.input_log.get_position(
                "counts", place.catalog.checkpoints.last_id("counts")
            ).next_batch

    with write_stream(settings, replace(COUNTS, source=None), rows, RunRequest(), on_checkpoint=notify) as begun:
        for arrived in (3, 4):
            write_files(files, STEPS[:arrived])
            with completed:
                assert completed.wait_for(lambda n=arrived: batches() == n or not begun.is_active, timeout=60)
            assert begun.is_active, "the run goes on"
    run(at(tmp_path / "steady"), COUNTS, RunRequest())
    with (
        OpenWarehouse.open_existing(settings.warehouse) as place,
        OpenWarehouse.open_existing(str(tmp_path / "steady")) as steady,
    ):
        assert (
            place.catalog.checkpoints.get_latest("counts").digest
            == steady.catalog.checkpoints.get_latest("counts").digest
        )
    check_proven(settings, "counts")
