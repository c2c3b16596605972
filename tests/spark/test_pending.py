"""Checkpoints that are pending while a stream runs in Spark."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.records.commits import CheckpointCommit, Commits, Committed
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.run.consistency import DrainResult
from siltstone.run.outbox import Give
from siltstone.run.pending import PendingCheckpoint
from siltstone.run.region import ConsistentRegion
from siltstone.spark.operations import RunRequest, run, write_stream
from siltstone.spark.sources import open_input
from siltstone.spark.stream_run import RunResult
from tests.examples import long_form
from tests.spark_runs import at, check_proven, digests
from tests.spark_streams import COUNTS, FILES, LITTLE

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("spark")


def delivered(warehouse: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the sinks got, with the checkpoint that it came with."""
    files = (warehouse / "sink").rglob("checkpoint=*/*.parquet")
    return sorted(((f.parent.name, row) for f in files for row in pq.ParquetFile(f).read().to_pylist()), key=str)


@pytest.fixture(scope="module")
def waits(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """LITTLE from end to end, its checkpoints stored one after the other: the warehouse, and what the run says."""
    path = tmp_path_factory.mktemp("waits") / "w"
    return path, run(at(path), LITTLE, RunRequest())


@pytest.mark.parametrize("max_pending", [long_form(1), 2])
def test_state_and_outputs_are_those_of_a_run_that_waits(
    waits: tuple[Path, RunResult], tmp_path: Path, max_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although one checkpoint cannot be stored at first, so that the run goes back to the newest complete one."""
    store, failed = PendingCheckpoint.store, list[int]()

    def failing_once(self: PendingCheckpoint, *args: Any) -> None:
        if self.id == 3 and not failed:
            failed.append(self.id)
            raise Unreachable("the test says so")
        store(self, *args)

    warehouse, waited = waits
    monkeypatch.setattr(PendingCheckpoint, "store", failing_once)
    seen: list[int] = []
    settings = at(tmp_path / "goes-on", max_pending=max_pending, recovery={"reset_delay_s": 0.01})
    goes_on = run(settings, LITTLE, RunRequest(), on_checkpoint=lambda done: seen.append(done.id))
    assert (waited.resets, goes_on.resets, failed) == (0, 1, [3])
    assert goes_on.checkpoints == waited.checkpoints == seen and len(seen) == FILES
    assert digests(settings, "little") == digests(at(warehouse), "little")
    check_proven(settings, "little")
    assert delivered(tmp_path / "goes-on") == delivered(warehouse) != []


def test_a_delivery_that_fails_while_the_next_checkpoint_commits_loses_neither(
    waits: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog has the checkpoint when the sink of the one before fails: the run goes back to it, no further."""
    add, deliver = Commits.add, ConsistentRegion.deliver
    committed, failed = threading.Event(), threading.Event()

    def add_and_wait(self: Commits, stream: str, epoch: int, commit: CheckpointCommit) -> Committed:
        done = add(self, stream, epoch, commit)
        if commit.id == 3:
            committed.set()
            assert failed.wait(LIMIT_S)
        return done

    def failing_once(give: Give) -> Give:
        def give_or_fail(output: OutputRecord) -> None:
            if output.checkpoint == 2 and not failed.is_set():
                assert committed.wait(LIMIT_S)
                raise Unreachable("the sink is away")
            give(output)

        return give_or_fail

    def deliver_or_fail(self: ConsistentRegion, sinks: Mapping[str, Give], *, checked: bool = False) -> None:
        try:
            deliver(self, {name: failing_once(give) for name, give in sinks.items()}, checked=checked)
        except Unreachable:
            failed.set()  # by now the region knows
            raise

    warehouse, waited = waits
    monkeypatch.setattr(Commits, "add", add_and_wait)
    monkeypatch.setattr(ConsistentRegion, "deliver", deliver_or_fail)
    settings = at(tmp_path / "goes-on", max_pending=2, recovery={"reset_delay_s": 0.01})
    goes_on = run(settings, LITTLE, RunRequest())
    assert failed.is_set() and (goes_on.resets, goes_on.digest) == (1, waited.digest)
    assert digests(settings, "little") == digests(at(warehouse), "little")
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        epochs = {record.id: record.epoch for record in place.catalog.checkpoints.list("little")}
    assert epochs == {id: 1 if id <= 3 else 2 for id in range(1, FILES + 1)}
    check_proven(settings, "little")
    assert delivered(tmp_path / "goes-on") == delivered(warehouse)


def test_a_query_that_is_stopped_cancels_no_delivery_behind_it(tmp_path: Path) -> None:
    """Spark cancels all jobs of a query's group with it, also those of threads that the query's thread has begun."""
    slow, begun = SlowSink(), list[str]()
    stream = replace(LITTLE, sinks={name: slow for name in LITTLE.sinks})
    settings = at(tmp_path / "w", max_pending=2)
    result = run(settings, stream, RunRequest(batches=2), on_checkpoint=lambda done: begun.append(str(done.id)))
    assert (result.checkpoints, result.resets, begun) == ([1, 2], 0, ["1", "2"])
    assert len(slow.delivered) == 2 * len(LITTLE.sinks)


class SlowSink:
    """Takes a second for each output, in a task of Spark."""

    def __init__(self) -> None:
        self.delivered: list[str] = []

    def __call__(self, rows: DataFrame, sink_id: str) -> None:
        def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            time.sleep(1.5)
            yield from batches

        rows.mapInArrow(slowly, rows.schema).collect()
        self.delivered.append(sink_id)


@pytest.mark.parametrize("max_pending", [0, 2])
def test_a_run_is_made_consistent_when_asked(spark: SparkSession, tmp_path: Path, max_pending: int) -> None:
    settings = at(tmp_path / "w", checkpoint_steps=1000, max_pending=max_pending)
    with OpenWarehouse.open_writable(settings.warehouse) as place:
        rows = open_input(spark, COUNTS, place.warehouse, {}).rows
        with write_stream(settings, replace(COUNTS, source=None), rows, RunRequest()) as begun:
            while not place.catalog.checkpoints.last_id("counts"):
                assert begun.make_consistent(LIMIT_S)
            assert begun.make_consistent_nonblocking(LIMIT_S) in (
                DrainResult.CHECKPOINT_PENDING,
                DrainResult.COMPLETED,
            )
            assert begun.is_active
        assert not begun.make_consistent() and begun.make_consistent_nonblocking() is DrainResult.FAILED
    check_proven(settings, "counts")
