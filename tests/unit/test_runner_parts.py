"""The parts of the stream runner that need no Spark session."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.records.input_log import InputLog
from siltstone.catalog.records.steps import StepRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import StateError
from siltstone.operator import Operator, ValueState
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.spark.runner import StreamRunner
from siltstone.stream import Stream
from tests import sums
from tests.region_run import RegionRun


class Kept(Operator):
    name = "kept"
    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState(value={"n": pa.int64()})


STREAM = Stream("kept", source=lambda spark, options: spark.sql(""), operators=[Kept()])
NO_SPARK: Any = None


def test_a_run_that_failed_takes_no_last_checkpoint(tmp_path: Path) -> None:
    """Its input log names a batch that no operator has seen to its end."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        policy = policy_by_name("marginal-cost", PolicyOptions())
        options = RegionOptions(checkpoint_steps=9)
        region = ConsistentRegion.open(STREAM, place.warehouse, place.catalog, policy, options, "a test")
        runner = StreamRunner(NO_SPARK, region)
        offsets = Path(runner.checkpoint_location.removeprefix("file://")) / "offsets" / "0"
        offsets.parent.mkdir(parents=True)
        offsets.write_text("v1\n{}\n0")
        with pytest.raises(AttributeError):
            runner(NO_SPARK, 0)
        for go_on in (runner.finish, lambda: runner(NO_SPARK, 1)):
            with pytest.raises(StateError, match="this run of kept has failed; open the region again"):
                go_on()
        assert place.catalog.checkpoints.last_id("kept") == 0


def test_after_the_last_checkpoint_no_batch_is_taken(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        policy = policy_by_name("marginal-cost", PolicyOptions())
        region = ConsistentRegion.open(STREAM, place.warehouse, place.catalog, policy, RegionOptions(), "a test")
        runner = StreamRunner(NO_SPARK, region)
        runner.finish()
        runner(NO_SPARK, 0)
        assert runner.failure is None and region.step == 0


def test_the_log_of_what_comes_next_is_read_once_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be long: the outbox and the runner need the same of it."""
    reads, read = [], InputLog.list_logged

    def counted(self: InputLog, stream: str) -> list[StepRecord]:
        reads.append(stream)
        return read(self, stream)

    monkeypatch.setattr(InputLog, "list_logged", counted)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        policy = policy_by_name("marginal-cost", PolicyOptions())
        region = ConsistentRegion.open(STREAM, place.warehouse, place.catalog, policy, RegionOptions(), "a test")
        StreamRunner(NO_SPARK, region)
        assert reads == ["kept"]


def test_what_has_come_again_is_no_longer_to_come(place: OpenWarehouse) -> None:
    run = RegionRun(place, sums.STREAM, sums.POLICY)
    for n in range(1, 5):
        run.step(sums.rows(n))
    place.catalog.rollbacks.roll_back(sums.NAME, place.catalog.runs.begin(sums.NAME, "a test"), 2, "a test", "a test")
    again = RegionRun(place, sums.STREAM, sums.POLICY)
    for n in (3, 4):
        assert [s.checkpoint for s in again.region.logged_steps()] == list(range(n, 5))
        assert again.region.logged_steps() == place.catalog.input_log.list_logged(sums.NAME)
        again.step(sums.rows(n))
    assert again.region.logged_steps() == place.catalog.input_log.list_logged(sums.NAME) == []
