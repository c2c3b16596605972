"""Leases: what is read is not deleted meanwhile, and whoever cannot have one reads all the same."""

import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from siltstone.catalog.records.leases import Leases
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, UnknownCheckpoint, UnknownStream, Unreachable
from siltstone.format.manifests import read_manifests
from siltstone.restore.export import restore_unit, unit_tasks, whole_digest
from siltstone.retention.deletion import DeletionResult, delete_checkpoints
from siltstone.retention.leases import LeaseOptions, hold_lease
from tests.catalog_cases import firsts
from tests.clock import Clock
from tests.orphans import check_whole, filesystem, write
from tests.places import place_at
from tests.sums import NAME


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def place(tmp_path: Path, clock: Clock) -> Iterator[OpenWarehouse]:
    """Checkpoints 1 to 5, bases at 1 and 5."""
    with place_at(tmp_path / "w", clock) as opened:
        write(opened)
        assert [*firsts(opened.catalog, NAME).values()] == [1, 1, 1, 1, 5]
        yield opened


def leases(place: OpenWarehouse) -> list[str]:
    return [lease.who for lease in place.catalog.leases.list_live(NAME)]


@pytest.mark.slow
def test_a_restore_under_a_lease_ends_well_though_all_it_reads_is_deleted(place: OpenWarehouse) -> None:
    catalog, store = place.catalog, place.warehouse.store
    recorded = catalog.checkpoints.get(NAME, 3).digest
    with hold_lease(catalog, NAME, [3], what="restores"):
        assert leases(place)[0].endswith(" restores")
        manifests = read_manifests(store, catalog.chains.list_manifests(NAME, 3))
        done = delete_checkpoints(place, NAME, [1, 2, 3, 4], who="a test")
        assert (done.deleted, done.leased, done.marked) == ((4,), (1, 2, 3), ())
        tasks, _ = unit_tasks(manifests, 3, 1, None)
        assert whole_digest([restore_unit(store, task) for task in tasks], 4) == recorded
        with pytest.raises(UnknownCheckpoint), hold_lease(catalog, NAME, [3]):
            raise AssertionError("what is marked cannot be leased")
    assert leases(place) == []
    assert delete_checkpoints(place, NAME, []).deleted == (1, 2, 3)
    check_whole(place)
    recorded = catalog.tombstones.list(NAME)
    assert {d.reason for d in recorded} == {"of a deleted checkpoint"}
    assert {d.who for d in recorded if "/000000000004/" in d.name} == {"a test"}


def test_what_is_missing_of_a_deleted_checkpoint_is_no_damage(place: OpenWarehouse, clock: Clock) -> None:
    """Who slept until the lease was lost, and others had deleted what it read."""
    with (
        pytest.raises(UnknownCheckpoint, match="no checkpoint 3"),
        hold_lease(place.catalog, NAME, [3]),
    ):
        clock.move(hours=24)
        assert delete_checkpoints(place, NAME, [1, 2, 3, 4]).deleted == (1, 2, 3, 4)
        raise CorruptObject("an object of checkpoint 3 is missing")
    with pytest.raises(CorruptObject), hold_lease(place.catalog, NAME, [5]):
        raise CorruptObject("an object of checkpoint 5 is missing")


def test_what_waits_keeps_all_that_is_read_of_it(place: OpenWarehouse) -> None:
    """Its opaque variables and snapshots too, which otherwise go at once."""
    catalog, store = place.catalog, place.warehouse.store
    name = "sums/00000001/000000000002/by_key.totals.00000.s1.snapshot.parquet"
    catalog.reference_copies.add(NAME, 2, 2, [store.put(name, b"rows")], 1)
    with hold_lease(catalog, NAME, [2]):
        assert delete_checkpoints(place, NAME, [2]) == DeletionResult((), (2,), 0, 0, needed_by={2: 4})
    assert delete_checkpoints(place, NAME, []) == DeletionResult((), (2,), 1, 4, needed_by={2: 4})


def test_an_expired_lease_keeps_nothing(place: OpenWarehouse, clock: Clock) -> None:
    place.catalog.leases.take(NAME, [4], id="a", who="a reader that was killed", lasts=timedelta(minutes=2))
    assert delete_checkpoints(place, NAME, [1, 2, 3, 4]).leased == (1, 2, 3, 4)
    clock.move(2)
    assert delete_checkpoints(place, NAME, []).deleted == (1, 2, 3, 4)
    check_whole(place)


@pytest.mark.slow
def test_a_lease_is_renewed_while_its_block_runs(tmp_path: Path) -> None:
    with filesystem(tmp_path) as place:
        write(place)
        options = LeaseOptions(lasts_s=2, renewed_every_s=0.1)
        with hold_lease(place.catalog, NAME, None, options=options):
            time.sleep(2.5)
            assert len(leases(place)) == 1
        assert leases(place) == []
        assert not [t for t in threading.enumerate() if t.name.startswith("siltstone-lease")]


def test_a_lease_ends_with_an_error_too(place: OpenWarehouse) -> None:
    with pytest.raises(KeyError), hold_lease(place.catalog, NAME, [1]):
        raise KeyError
    assert leases(place) == []


def test_who_may_only_read_the_catalog_reads_without_a_lease(
    place: OpenWarehouse, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(connection: object, _: object) -> None:
        connection.execute("PRAGMA query_only = ON")  # type: ignore[attr-defined]

    place.catalog.close()
    event.listen(place.catalog.transactions.engine, "connect", read_only)
    with hold_lease(place.catalog, NAME, [3]):
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 3))
    assert len(manifests) == 3
    assert "no lease: a deletion may remove what is read stream=sums" in "\n".join(caplog.messages)
    assert "readonly" in "\n".join(caplog.messages)


def test_a_lease_that_is_lost_or_not_renewed_is_told_of(
    place: OpenWarehouse, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, tried = LeaseOptions(renewed_every_s=0.02), threading.Event()
    renew = Leases.renew

    def away(*_: object) -> bool:
        tried.set()
        raise Unreachable("the catalog is away")

    with caplog.at_level(logging.WARNING), hold_lease(place.catalog, NAME, [3], options=options):
        monkeypatch.setattr(Leases, "renew", away)
        assert tried.wait(10)
        clock.move(3)
        assert leases(place) == []
        monkeypatch.setattr(Leases, "renew", renew)
        end = time.monotonic() + 10
        while "expired" not in "\n".join(caplog.messages) and time.monotonic() < end:
            time.sleep(0.01)
    assert 'lease not renewed, trying again stream=sums error="the catalog is away"' in "\n".join(caplog.messages)
    assert "lease expired: a deletion may remove what is read stream=sums" in "\n".join(caplog.messages)


def test_what_is_not_there_is_not_read(place: OpenWarehouse) -> None:
    with pytest.raises(UnknownStream), hold_lease(place.catalog, "some", [1]):
        raise AssertionError
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 6"), hold_lease(place.catalog, NAME, [6]):
        raise AssertionError
