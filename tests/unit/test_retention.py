"""Truncation and savepoints: what is kept restores and proves, and store and catalog agree on it."""

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.errors import UnknownCheckpoint, UnknownStream, UsageError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import drop_savepoint, list_savepoints, set_savepoint
from siltstone.retention.truncate import Truncation, truncate
from siltstone.store.filesystem import FilesystemStore
from tests.catalog_cases import firsts
from tests.clock import Clock
from tests.proofs import check_whole, in_order, restored_digest
from tests.region_run import RegionRun
from tests.retention_cases import CHECKPOINTS, DAILY, LAST, friday, visible, write_checkpoints
from tests.stops import Stop, stop
from tests.stored import stream_objects
from tests.sums import NAME, POLICY, STREAM, rows


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with 14 checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("retention") / "w")


@pytest.fixture
def clock() -> Clock:
    """Eight hours after the newest checkpoint."""
    return friday()


def stored(place: OpenWarehouse) -> tuple[object, ...]:
    """All that whoever is refused must leave alone."""
    catalog = place.catalog
    return (
        sorted(stream_objects(place.warehouse.store)),
        catalog.checkpoints.list_retained(NAME),
        catalog.savepoints.list(NAME),
        catalog.runs.list(NAME),
    )


# What is kept


@pytest.mark.slow
def test_what_is_kept_and_why_and_what_happens_to_the_rest(place: OpenWarehouse) -> None:
    set_savepoint(place.catalog, NAME, "stable", at="2")
    before = dict(stream_objects(place.warehouse.store))
    done = truncate(place, NAME, DAILY)
    assert {k.checkpoint: k.reasons for k in done.kept} == {
        2: ("savepoint stable",),
        9: ("daily 2013-07-03",),
        12: ("daily 2013-07-04",),
        14: ("newest", "daily 2013-07-05"),
    }
    assert done.deleted == (3, 4, 5, 6, 7, 8)
    assert [(w.checkpoint, w.needed_by) for w in done.waiting] == [(1, 2), (10, 12), (11, 12), (13, 14)]
    after = dict(stream_objects(place.warehouse.store))
    assert (done.objects, done.bytes) == (len(before) - len(after), sum(before.values()) - sum(after.values()))
    assert done.objects > 0
    check_whole(place, [2, 9, 12, 14])


RULES = [
    {"keep_last": 1},
    {"keep_last": 3, "keep_weekly": 1},
    {"keep_hourly": 4},
    {"keep_within": "25h", "keep_monthly": 2},
    {"keep_last": 0, "min_count": 5},
    {"keep_within": "1h", "min_age": "2d"},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_dry_run_foretells_and_changes_nothing_and_the_second_time_nothing_goes(
    place: OpenWarehouse, rules: dict
) -> None:
    options = RetentionOptions(**rules)
    before = stored(place)
    foretold = truncate(place, NAME, options, dry_run=True)
    assert stored(place) == before
    done = truncate(place, NAME, options)
    assert (foretold.dry_run, done.dry_run) == (True, False)
    assert {**as_dict(foretold), "dry_run": False} == as_dict(done)
    check_whole(place, [k.checkpoint for k in done.kept])
    left = stored(place)
    again = truncate(place, NAME, options)
    assert (again.kept, again.deleted, again.waiting) == (done.kept, (), done.waiting)
    assert (again.objects, again.bytes, stored(place)) == (0, 0, left)


def as_dict(done: Truncation) -> dict[str, object]:
    return {name: getattr(done, name) for name in Truncation.__slots__}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20130701, 9471438])
def test_whatever_happens_what_is_kept_proves_and_nothing_else_is_stored(
    place: OpenWarehouse, clock: Clock, seed: int
) -> None:
    """A run goes on, savepoints come and go, and the stream is truncated by ever other rules."""
    chance, catalog = random.Random(seed), place.catalog
    run, n, names = RegionRun(place, STREAM, POLICY), CHECKPOINTS, 0
    truncate(place, NAME, RetentionOptions(keep_last=8))
    for _ in range(6):
        for _ in range(chance.randint(1, 3)):
            n += 1
            assert run.step(rows(n))
            clock.move(hours=chance.choice([0, 1, 8, 30]))
        for _ in range(chance.randint(0, 2)):
            names += 1
            lasts = chance.choice([None, timedelta(hours=20)])
            set_savepoint(catalog, NAME, f"s{names}", at=str(chance.choice(visible(place))), expires_in=lasts)
        there = [s.name for s in catalog.savepoints.list(NAME)]
        if there and chance.random() < 0.3:
            drop_savepoint(catalog, NAME, chance.choice(there))
        pins = {s.checkpoint for s in catalog.savepoints.list(NAME) if not s.is_expired(clock())}
        first = firsts(catalog, NAME)
        rules: dict[str, Any] = {"keep_last": chance.randint(1, 3), "keep_daily": chance.randint(0, 3)}
        done = truncate(place, NAME, RetentionOptions(**rules, min_count=chance.randint(0, 4)))
        kept = [k.checkpoint for k in done.kept]
        assert pins | {n} <= set(kept)
        assert set(done.deleted) & set(kept) == set()
        needs = {w.checkpoint: [id for id in kept if first[id] <= w.checkpoint < id] for w in done.waiting}
        assert {w.checkpoint: w.needed_by for w in done.waiting} == {id: max(by) for id, by in needs.items()}
        check_whole(place, kept)


@pytest.mark.slow
def test_without_a_rule_nothing_goes_but_what_was_deleted_before(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.catalog.streams.set_retention(NAME, None)
    before = stored(place)
    done = truncate(place, NAME, RetentionOptions(min_count=1))
    assert {k.reasons for k in done.kept} == {("no rule is set",)}
    assert (len(done.kept), done.deleted, done.waiting, done.objects, stored(place)) == (14, (), (), 0, before)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(FilesystemStore, "delete", stop)
        delete_checkpoints(place, NAME, [1, 2, 3, 4])
    assert truncate(place, NAME, RetentionOptions()).deleted == (1, 2, 3, 4)
    check_whole(place, range(5, 15))


@pytest.mark.slow
def test_what_somebody_reads_waits_for_them(place: OpenWarehouse) -> None:
    with hold_lease(place.catalog, NAME, [7]):
        foretold = truncate(place, NAME, LAST, dry_run=True)
        done = truncate(place, NAME, LAST)
        assert foretold.leased == done.leased == (5, 6, 7)
        assert done.deleted == (1, 2, 3, 4, 8, 9, 10, 11, 12)
        check_whole(place, [5, 6, 7, 13, 14])  # who has only just begun still finds them
    assert truncate(place, NAME, LAST).deleted == (5, 6, 7)
    check_whole(place, [13, 14])


def test_after_a_materialization_nothing_before_it_waits(place: OpenWarehouse) -> None:
    newest = RetentionOptions(keep_last=1)
    set_savepoint(place.catalog, NAME, "stable", at="6")
    assert [w.checkpoint for w in truncate(place, NAME, newest, dry_run=True).waiting] == [5, 13]
    materialize(place, NAME, "by_key", 14, id="m1", parallelism=2, run=in_order)
    place.catalog.runs.end(NAME, place.catalog.streams.get(NAME).epoch, "done")
    done = truncate(place, NAME, newest)
    assert done.deleted == (1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13)
    assert [(w.checkpoint, w.needed_by) for w in done.waiting] == [(5, 6)]
    check_whole(place, [6, 14])
    assert RegionRun(place, STREAM, POLICY).step(rows(15))
    check_whole(place, [6, 14, 15])


# What is refused


@pytest.mark.parametrize(
    "rules", [{"keep_last": 0}, {"keep_within": "1h"}, {"keep_daily": 0, "keep_hourly": 0}], ids=str
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_rules_that_keep_none_are_refused(place: OpenWarehouse, rules: dict, dry_run: bool) -> None:
    set_savepoint(place.catalog, NAME, "stable", at="3")
    before = stored(place)
    with pytest.raises(UsageError, match=r"keep none of 14 checkpoints \(keep_.*\): keep more"):
        truncate(place, NAME, RetentionOptions(**rules), dry_run=dry_run)
    assert stored(place) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_there_is_nothing_to_truncate(place: OpenWarehouse, dry_run: bool) -> None:
    place.catalog.streams.register("idle", 4, {})
    with pytest.raises(UnknownStream, match="it has idle, sums"):
        truncate(place, "nosuch", LAST, dry_run=dry_run)
    with pytest.raises(UnknownCheckpoint, match="stream idle: it has none yet"):
        truncate(place, "idle", LAST, dry_run=dry_run)
    for call in (lambda: set_savepoint(place.catalog, "idle", "a"), lambda: drop_savepoint(place.catalog, "idle", "a")):
        with pytest.raises(UnknownCheckpoint, match="stream idle: it has none yet"):
            call()
    assert list_savepoints(place.catalog, "idle") == []


# Savepoints


def test_a_savepoint_outlives_every_rule_until_it_expires(place: OpenWarehouse, clock: Clock) -> None:
    digest = place.catalog.checkpoints.get(NAME, 7).digest
    made = set_savepoint(place.catalog, NAME, "release-1", at="7", expires_in=timedelta(days=1))
    assert (made.checkpoint, made.expires_at) == (7, clock() + timedelta(days=1))
    with pytest.raises(UsageError, match=r"checkpoint 7 of stream sums is kept by its savepoint release-1: .*drop"):
        delete_checkpoints(place, NAME, [6, 7])
    assert visible(place) == list(range(1, 15))
    assert truncate(place, NAME, LAST).deleted == (1, 2, 3, 4, 8, 9, 10, 11, 12)
    check_whole(place, [7, 13, 14])
    assert restored_digest(place, NAME, place.catalog.checkpoints.resolve(NAME, "release-1")) == digest
    assert [s["expired"] for s in list_savepoints(place.catalog, NAME)] == [False]
    clock.move(hours=24)
    assert list_savepoints(place.catalog, NAME) == [
        {
            "name": "release-1",
            "checkpoint": 7,
            "created_at": "2013-07-05T16:00:00+00:00",
            "expires_at": "2013-07-06T16:00:00+00:00",
            "expired": True,
        }
    ]
    assert truncate(place, NAME, LAST).deleted == (5, 6, 7)
    assert list_savepoints(place.catalog, NAME) == []
    check_whole(place, [13, 14])


def test_a_dropped_savepoint_keeps_nothing(place: OpenWarehouse) -> None:
    for name, at in (("first", "1"), ("second", "first"), ("third", "2013-07-01T17:00")):
        set_savepoint(place.catalog, NAME, name, at=at)
    assert [(s.name, s.checkpoint) for s in place.catalog.savepoints.list(NAME)] == [
        ("first", 1),
        ("second", 1),
        ("third", 3),
    ]
    drop_savepoint(place.catalog, NAME, "first")
    assert [k.checkpoint for k in truncate(place, NAME, LAST).kept] == [1, 3, 13, 14]
    drop_savepoint(place.catalog, NAME, "second")
    done = truncate(place, NAME, LAST)
    assert ([k.checkpoint for k in done.kept], [w.checkpoint for w in done.waiting]) == ([3, 13, 14], [1, 2])
    check_whole(place, [3, 13, 14])
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 2"):
        set_savepoint(place.catalog, NAME, "fourth", at="2")


@pytest.mark.slow
def test_a_savepoint_set_meanwhile_is_not_lost(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Deletions.mark

    def too_late(deletions: Deletions, *arguments: Any, **named: Any) -> tuple[int, ...]:
        set_savepoint(place.catalog, NAME, "stable", at="6")
        return mark(deletions, *arguments, **named)

    with (
        monkeypatch.context() as patch,
        pytest.raises(UsageError, match=r"checkpoint 6 .* is kept by its savepoint stable"),
    ):
        patch.setattr(Deletions, "mark", too_late)
        truncate(place, NAME, LAST)
    check_whole(place, range(1, 15))
    truncate(place, NAME, LAST)
    check_whole(place, [6, 13, 14])
