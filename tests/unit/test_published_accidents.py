"""Accidents that others have published, each as the operations that led to it there: here they end well.

SlateDB issue 2073 was not to be found when this was written; 352 and 1622 tell of another loss through its collector.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from siltstone.catalog.records.commits import Commits
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.materializations import Materializations
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.errors import CorruptObject, Fenced, StateError, UnknownCheckpoint
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifests
from siltstone.model import StoredObject
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.retention.truncate import truncate
from siltstone.run import pending
from siltstone.settings import Settings
from siltstone.spark.operations import holding, running
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from tests.clock import Clock
from tests.orphans import check_whole, inject, new_run, stored, write
from tests.places import place_at
from tests.proofs import failures, in_order, rebuilt_digest, restored_digest
from tests.region_run import RegionRun
from tests.sums import NAME, STREAM, rows

AT_ONCE = SweepOptions(age_guard=timedelta(0))
"""a sweep with the guard turned off that protects, by age, what is being written"""
NEWEST = RetentionOptions(keep_last=1)


def retire(place: OpenWarehouse) -> None:
    """Retire all that may go: every checkpoint but the newest, every orphan however young."""
    truncate(place, NAME, NEWEST)
    sweep(place, NAME, AT_ONCE)


def manifests_of(place: OpenWarehouse, checkpoint: int) -> Mapping[int, Manifest]:
    """What a restore of the checkpoint begins with."""
    return read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, checkpoint), NAME)


def consolidate(place: OpenWarehouse, checkpoint: int, id: str = "m1") -> None:
    materialize(place, NAME, "by_key", checkpoint, id=id, parallelism=2, run=in_order)


def before(patch: pytest.MonkeyPatch, kind: Any, method: str, happens: Callable[[], None]) -> None:
    """Let something happen once, just before the first call of a method."""
    called, waiting = getattr(kind, method), [happens]

    def late(*arguments: Any, **named: Any) -> Any:
        if waiting:
            waiting.pop()()
        return called(*arguments, **named)

    patch.setattr(kind, method, late)


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param("{w}/", id="slash", marks=pytest.mark.slow),
        pytest.param("{w}/.", id="dot", marks=pytest.mark.slow),
        pytest.param("{w}/../w", id="dots", marks=pytest.mark.slow),
        pytest.param("file://{w}", id="scheme"),
        pytest.param("{link}", id="link"),
    ],
)
def test_iceberg_4346_a_location_spelled_otherwise_makes_no_orphans(tmp_path: Path, spelling: str) -> None:
    """There: metadata named files by one scheme and authority and the listing by another, so that a removal of orphans
    compared strings, took every live file for an orphan and deleted it.

    Here: the warehouse is written under one spelling of its place and swept under another. Names in manifests, catalog
    and listings are relative to the warehouse, so there is nothing to compare wrongly (promise 3).
    """
    with place_at(tmp_path / "w") as place:
        write(place)
        injected = inject(place)
    (tmp_path / "link").symlink_to(tmp_path / "w")
    with OpenWarehouse.open_writable(spelling.format(w=tmp_path / "w", link=tmp_path / "link")) as place:
        assert sweep(place, NAME).deleted == len(injected.orphans)
        check_whole(place, *injected.kept)
        assert new_run(place).step(rows(6))
        assert not failures(place, NAME)


@pytest.mark.slow
def test_iceberg_4194_a_sweep_without_patience_loses_a_step_but_no_state(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: files older than the chosen interval that a long job had written and not yet committed were removed as
    orphans; the job then committed metadata that named them, and the table could not be used any more.

    Here: a sweep without an age guard comes between the writes of a step and its commit. Deletions are written down
    before they happen and a commit that refers to one of them is refused (promise 3); the stream does the step again.
    """
    run, deleted = write(place), list[int]()
    with monkeypatch.context() as patch:
        before(patch, pending, "store_manifest", lambda: deleted.append(sweep(place, NAME, AT_ONCE).deleted))
        with pytest.raises(StateError, match="was deleted by"):
            run.step(rows(6))
    assert deleted[0] > 0
    refused = CheckpointPath(NAME, run.region.epoch, 6).manifest()
    check_whole(place, refused)
    completed = new_run(place).step(rows(6))
    assert completed is not None and completed.id == 6, "its manifest is there, and refused again"
    check_whole(place, refused)


@pytest.mark.slow
def test_iceberg_4194_by_default_what_is_being_written_is_too_young_to_go(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the guard that every sweep has unless told otherwise: the step completes."""
    run, deleted = write(place), list[int]()
    with monkeypatch.context() as patch:
        before(patch, Commits, "add", lambda: deleted.append(sweep(place, NAME).deleted))
        assert run.step(rows(6))
    assert deleted == [0]
    check_whole(place)


@pytest.mark.slow
def test_slatedb_604_a_reader_keeps_what_a_compaction_replaced(place: OpenWarehouse) -> None:
    """There: a read held a snapshot with a table, a compaction replaced the table, and the collector, which asked only
    the newest manifest, deleted it under the reader.

    Here: a reader leases checkpoint 4, whose chain is then materialized, truncated and swept. A lease keeps what a
    restore of its checkpoints reads (promise 3); once it ends, the next deletion takes it.
    """
    run = write(place)
    digest = place.catalog.checkpoints.get(NAME, 4).digest
    with hold_lease(place.catalog, NAME, [4]):
        manifests = manifests_of(place, 4)
        chain = {o.name for o in place.catalog.objects.list(NAME, [1, 2, 3, 4])}
        consolidate(place, 4)
        retire(place)
        assert chain <= stored(place)
        assert rebuilt_digest(place, manifests, 4) == digest
    run.region.close("done")  # its steps might have restored that chain
    retire(place)
    assert not chain & stored(place)
    check_whole(place)


def test_slatedb_604_a_finished_compaction_is_not_collected_before_it_is_recorded(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too: the output of a compaction lay in the store, no manifest named it yet, and an eager collector deleted
    it before the manifest came to name it.

    Here: a materialization has written its bases, and a truncation and a sweep without an age guard come before its
    transaction. What it writes bears its id, and its lease keeps that (promise 3).
    """
    write(place)
    with monkeypatch.context() as patch:
        before(patch, Materializations, "complete", lambda: retire(place))
        consolidate(place, 5)
    assert place.catalog.chains.list_checkpoints(NAME, 5) == [5]
    retire(place)
    check_whole(place)


@pytest.mark.slow
def test_slatedb_352_and_1622_a_stalled_writer_finds_no_free_name_where_a_fence_was(place: OpenWarehouse) -> None:
    """There: a newer writer fenced an older one by taking its next log file's name; the collector deleted that file;
    the older writer woke up, could create it, and acknowledged a write that no recovery reads.

    Here: an older run stalls, a newer one takes over, and all of the older one's objects go. The fence is the writer
    epoch in the catalog, which nothing collects (promise 5): the older run finds that its checkpoint is gone, and why.
    """
    stalled = new_run(place)
    for n in (1, 2):
        stalled.step(rows(n))
    newer = new_run(place)
    for n in (3, 4, 5, 6, 7):
        newer.step(rows(n))
    delete_checkpoints(place, NAME, [1, 2])
    retire(place)
    assert not stored(place, f"{NAME}/00000001/")
    with pytest.raises(Fenced):
        stalled.step(rows(3))
    assert newer.step(rows(8))
    sweep(place, NAME)
    check_whole(place)


def test_slatedb_352_and_1622_a_stalled_writer_does_not_take_its_loss_for_damage(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fenced run misses is retired, not damaged: it ends, rather than recover and so fence the newer run."""
    newer = write(place)
    monkeypatch.setattr(holding, "cores", lambda _: 2)
    settings = Settings(warehouse=str(tmp_path / "w"), materialization=MaterializationOptions(enabled=False))
    spark = Mock(sparkContext=Mock(master="local[2]"))
    with pytest.raises(Fenced, match="another run has taken over"), running.stream_runner(settings, STREAM, spark):
        newer = new_run(place)
        raise CorruptObject("an object is missing")
    assert newer.step(rows(6))
    check_whole(place)


@pytest.mark.slow
def test_litestream_771_every_kept_moment_can_be_restored_after_compactions(tmp_path: Path) -> None:
    """There: a compacted file got the time of its compaction, the files it was made of were deleted, and no moment
    between the two could be restored any more: seconds were left of a retention of days.

    Here: a checkpoint every minute, a materialization after every fourth, a truncation after each. A materialization
    changes where chains begin, never a checkpoint's time or digest: each minute of the last ten restores (promise 1).
    """
    clock, digests = Clock(), {}
    kept = RetentionOptions(keep_within=timedelta(minutes=10))
    with place_at(tmp_path / "w", clock) as place:
        run = new_run(place)
        for n in range(1, 17):
            completed = run.step(rows(n))
            assert completed is not None
            digests[clock.time] = completed.digest
            clock.move(minutes=1)
            if n % 4 == 0:
                consolidate(place, n - 1, f"m{n}")
            truncate(place, NAME, kept)
            sweep(place, NAME, AT_ONCE)
        moments = [time for time in digests if time >= clock.time - timedelta(minutes=10)]
        assert len(moments) == 10
        for time in moments:
            at = place.catalog.checkpoints.resolve(NAME, (time + timedelta(seconds=59)).isoformat())
            assert restored_digest(place, NAME, at) == digests[time]
        assert len(place.catalog.checkpoints.list(NAME)) < 16


def test_litestream_1270_what_was_planned_and_is_gone_is_said_and_the_next_plan_holds(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: retention deleted a file between the plan of a restore and its opening; the restore failed with a missing
    file, though compacted files held the same.

    Here: all older checkpoints go between the plan and the lease. The lease is refused, in the same transaction that
    sees the deletion, before a byte is read; the newest checkpoint restores.
    """
    write(place)
    with monkeypatch.context() as patch:
        before(patch, Leases, "take", lambda: retire(place))
        with pytest.raises(UnknownCheckpoint, match="no checkpoint 4"), hold_lease(place.catalog, NAME, [4]):
            raise AssertionError("what is gone cannot be leased")
    with hold_lease(place.catalog, NAME, [5]):
        assert restored_digest(place, NAME, 5) == place.catalog.checkpoints.get(NAME, 5).digest
    check_whole(place)


def test_litestream_1307_a_restore_longer_than_any_interval_loses_nothing(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: a restore planned once and read file after file; a new snapshot raised the mark up to which retention
    deletes, and files of the plan went before they were opened.

    Here: before every read of a restore the stream goes on, its chain is materialized, everything else retired. A lease
    lasts as long as what is read, not as long as an interval (promise 3).
    """
    run = write(place)
    digest = place.catalog.checkpoints.get(NAME, 3).digest
    reads: list[bool] = []
    """for each time that the world moved on: whether it is still moving"""
    read, read_range = FilesystemStore.read, FilesystemStore.read_range

    def meanwhile() -> None:
        if len(reads) < 3 and not any(reads[-1:]):
            reads.append(True)
            n = 6 + len(reads)
            run.step(rows(n))
            consolidate(place, place.catalog.checkpoints.last_id(NAME), f"m{n}")
            retire(place)
            reads[-1] = False

    def whole(self: FilesystemStore, stored: StoredObject) -> pa.Buffer:
        meanwhile()
        return read(self, stored)

    def part(self: FilesystemStore, name: str, offset: int, length: int) -> pa.Buffer:
        meanwhile()
        return read_range(self, name, offset, length)

    with hold_lease(place.catalog, NAME, [3]), monkeypatch.context() as patch:
        manifests = manifests_of(place, 3)
        patch.setattr(FilesystemStore, "read", whole)
        patch.setattr(FilesystemStore, "read_range", part)
        assert rebuilt_digest(place, manifests, 3) == digest
    assert len(reads) == 3
    retire(place)
    check_whole(place)


def test_spark_54697_a_late_upload_refers_to_nothing_that_was_deleted(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: a snapshot was made, reusing files of older versions, and uploaded much later; meanwhile another
    executor's maintenance had deleted those versions with their files, and the uploaded snapshot could not be loaded.

    Here: a step builds on the chain of base 5; before its commit everything older is retired, and its own chain is
    materialized. The newest checkpoint is never retired, nor what its chain needs, so what the step builds on is there;
    what the step refers to is looked at in the transaction that commits it (promise 3).
    """
    run: RegionRun = write(place)

    def meanwhile() -> None:
        consolidate(place, 5)
        truncate(place, NAME, NEWEST)
        sweep(place, NAME)

    with monkeypatch.context() as patch:
        before(patch, Commits, "add", meanwhile)
        completed = run.step(rows(6))
    assert completed is not None
    assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [5, 6]
    assert restored_digest(place, NAME, 6) == completed.digest
    check_whole(place)
