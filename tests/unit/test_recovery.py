"""Recovery without Spark: whatever object is damaged or gone, the stream goes on, and comes to where it would have."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, Fenced, LossRefused, UnknownCheckpoint, UnknownStream
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import SweepOptions, sweep
from tests.catalog_cases import beginnings
from tests.examples import long_form
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, in_order
from tests.recovery_cases import (
    CHECKPOINTS,
    NAME,
    alter,
    check_goes_on,
    cut,
    delete,
    digests,
    new_run,
    objects,
    write_checkpoints,
)

DAMAGE = pytest.mark.parametrize("damage", [delete, long_form(alter), long_form(cut)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("recovery") / "w")


@pytest.mark.slow
@DAMAGE
def test_the_newest_manifest(place: OpenWarehouse, damage: Callable) -> None:
    before = digests(place)
    [manifest] = objects(place, CHECKPOINTS, ObjectKind.MANIFEST)
    damage(place, manifest)
    with pytest.raises(CorruptObject):
        new_run(place)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.proven, done.given_up, done.rebuilt) == (8, True, (9,), ())
    assert [(f.checkpoint, f.object) for f in done.failures] == [(9, manifest)]
    assert "gave up checkpoint 9; the next run begins with checkpoint 8" in done.summary
    runs = place.catalog.runs.list(NAME)
    assert [r.outcome for r in runs[-2:]] == ["failed", "recovered"]
    [record] = place.catalog.rollbacks.list(NAME)
    assert (record.checkpoint, record.newest, record.epoch) == (8, 9, runs[-1].epoch) and manifest in record.reason
    check_goes_on(place, done, before)
    assert not failures(place, NAME)


@pytest.mark.slow
def test_a_delta_in_the_middle(place: OpenWarehouse) -> None:
    """Without the newest base, which lies after it."""
    before = digests(place)
    alter(place, *objects(place, 9, ObjectKind.BASE)[:1], *objects(place, 7, ObjectKind.SEGMENT)[:1])
    told: list[str] = []
    done = recover(place, NAME, run=in_order, tell=told.append)
    assert (done.checkpoint, done.given_up) == (6, (7, 8, 9))
    assert [f.checkpoint for f in done.failures] == [9, 8, 7] and all(f.object for f in done.failures)
    assert told[0] == "proving checkpoint 9" and "proving checkpoints 7 to 8" in told
    check_goes_on(place, done, before)
    assert not failures(place, NAME)


@pytest.mark.slow
def test_a_base(place: OpenWarehouse) -> None:
    before = digests(place)
    delete(place, *objects(place, 9, ObjectKind.BASE))
    delete(place, objects(place, 5, ObjectKind.BASE)[0])
    done = recover(place, NAME, run=in_order, accept_loss=True)
    assert (done.checkpoint, done.given_up) == (4, (5, 6, 7, 8, 9))
    check_goes_on(place, done, before)


@pytest.mark.slow
def test_everything(place: OpenWarehouse) -> None:
    """Then the stream begins from nothing, with its logged input."""
    before = digests(place)
    place.catalog.savepoints.add(NAME, 2, "precious", 3)
    shutil.rmtree(place.warehouse.local.objects / NAME)
    with pytest.raises(LossRefused, match="1 to 9: the whole stream, more than 3 checkpoints, savepoint precious"):
        recover(place, NAME, run=in_order)
    assert digests(place) == before and len(place.catalog.runs.list(NAME)) == 2, (
        "nothing was given up, no run was fenced"
    )
    done = recover(place, NAME, run=in_order, accept_loss=True)
    assert (done.checkpoint, done.proven, done.given_up) == (0, None, tuple(range(1, 10)))
    assert (
        done.savepoints == ("precious",) and "begins from nothing; lost with them: savepoint precious" in done.summary
    )
    again = recover(place, NAME, run=in_order)  # as after a kill
    assert (again.checkpoint, again.given_up) == (0, ()) and "gave nothing up" in again.summary
    check_goes_on(place, done, before)
    assert not failures(place, NAME)


@pytest.mark.slow
def test_everything_for_good_and_once_more_as_after_a_kill(place: OpenWarehouse) -> None:
    """Of a stream whose oldest input is not logged any more nothing is left, and that is no mistake of who asks."""
    delete_checkpoints(place, NAME, range(1, CHECKPOINTS - 1))
    place.catalog.input_log.prune(NAME, 2, at_least=1)
    shutil.rmtree(place.warehouse.local.objects / NAME)
    done = recover(place, NAME, run=in_order, accept_loss=True)
    assert done.checkpoint == 0 and place.catalog.input_log.list_logged(NAME) == []
    again = recover(place, NAME, run=in_order)
    assert (again.checkpoint, again.proven, again.given_up) == (0, None, ())
    assert "gave nothing up; the next run begins from nothing" in again.summary


@pytest.mark.slow
def test_what_is_damaged_below_stays_and_is_said_to_be(place: OpenWarehouse) -> None:
    delete(place, *objects(place, 2, ObjectKind.SEGMENT), objects(place, 9, ObjectKind.MANIFEST)[0])
    delete(place, *objects(place, 8, ObjectKind.SEGMENT))
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up) == (7, (8, 9))
    assert {f.checkpoint for f in failures(place, NAME)} == {2, 3, 4}


@pytest.mark.slow
def test_a_stream_that_is_well_is_left_as_it_is(place: OpenWarehouse) -> None:
    before = digests(place)
    for _ in range(2):
        done = recover(place, NAME, run=in_order)
        assert (done.checkpoint, done.given_up, done.failures) == (9, (), ()) and "gave nothing up" in done.summary
    assert digests(place) == before and place.catalog.rollbacks.list(NAME) == []


@pytest.mark.slow
def test_the_run_at_work_is_fenced_where_something_is_damaged(place: OpenWarehouse) -> None:
    run = new_run(place)
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])
    done = recover(place, NAME, run=in_order)
    with pytest.raises(Fenced):
        run.step(purchases()[CHECKPOINTS])
    assert done.given_up == (9,) and done.fenced


@pytest.mark.slow
def test_working_state_that_went_on_is_not_taken_over(place: OpenWarehouse) -> None:
    """It is at a checkpoint that is no more; and what is wrong with the checkpoint may be wrong with it."""
    before = digests(place)
    alter(place, *objects(place, 9, ObjectKind.BASE)[:1])
    done = recover(place, NAME, run=in_order)
    run = new_run(place)
    assert run.region.oldest_epoch == run.region.epoch - 1 == 3 and run.region.completed_epoch == 2
    run.step(purchases()[8])
    assert digests(place)[9] == before[9] and done.checkpoint == 8
    assert run.region.oldest_epoch == run.region.epoch


def test_a_dry_run_changes_nothing(place: OpenWarehouse) -> None:
    place.catalog.savepoints.add(NAME, 2, "newest", 9)
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])

    def everything() -> tuple[object, ...]:
        files = sorted(p for p in place.warehouse.local.objects.rglob("*") if p.is_file())
        catalog = place.catalog
        return (
            files,
            catalog.runs.list(NAME),
            catalog.checkpoints.list(NAME),
            catalog.objects.list(NAME),
            catalog.leases.list_live(NAME),
        )

    before = everything()
    done = recover(place, NAME, run=in_order, dry_run=True)
    assert (done.checkpoint, done.given_up, done.savepoints) == (8, (9,), ("newest",))
    assert "would give up checkpoint 9; the next run would begin with checkpoint 8" in done.summary
    assert everything() == before


def test_deletions_under_way_are_completed_and_orphans_swept(place: OpenWarehouse) -> None:
    place.catalog.deletions.mark(NAME, 2, [1, 2, 3, 4])
    orphan = objects(place, 3, ObjectKind.MANIFEST)[0].replace("manifest", "lost").replace(".arrow", ".segment")
    place.warehouse.store.put(orphan, b"lost")
    expected = sum(o.bytes for o in place.catalog.objects.list(NAME, [1, 2, 3, 4]))
    count = len(place.catalog.objects.list(NAME, [1, 2, 3, 4]))
    done = recover(place, NAME, run=in_order)
    assert (done.swept_objects, done.swept_bytes) == (count + 1, expected + 4)
    assert [c.id for c in place.catalog.checkpoints.list(NAME, marked=True)] == [5, 6, 7, 8, 9]


def test_a_damaged_snapshot_is_dropped_and_its_checkpoint_stays(place: OpenWarehouse) -> None:
    store, catalog, before = place.warehouse.store, place.catalog, digests(place)
    for checkpoint in (2, 5, 7, 9):
        prefix = objects(place, checkpoint, ObjectKind.MANIFEST)[0].rpartition("/")[0]
        taken = store.put(f"{prefix}/accounts.totals.00000.test.snapshot.parquet", b"a copy of the state")
        catalog.reference_copies.add(NAME, 2, checkpoint, [taken], 1)
    names = {s.checkpoint: s.objects[0].name for s in catalog.reference_copies.list(NAME)}
    alter(place, names[5])
    delete(place, names[9])
    catalog.checkpoints.record_proof(NAME, 5, False, "its snapshot was altered")  # as verify does
    catalog.checkpoints.record_proof(NAME, 7, False, "something else")
    looked = recover(place, NAME, run=in_order, dry_run=True)
    assert looked.snapshots == (5, 9) and "would drop the damaged snapshot of checkpoint 5, 9" in looked.summary
    assert [s.checkpoint for s in catalog.reference_copies.list(NAME)] == [2, 5, 7, 9]
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.snapshots, done.fenced) == (9, (), (5, 9), False)
    assert [s.checkpoint for s in catalog.reference_copies.list(NAME)] == [2, 7] and digests(place) == before
    sweep(place, NAME, SweepOptions(age_guard=timedelta(0)))
    assert {name for name in store.list("") if name[0].endswith(".snapshot.parquet")} >= {
        (names[2], 19),
        (names[7], 19),
    }
    assert names[5] not in dict(store.list(""))
    assert recover(place, NAME, run=in_order).snapshots == ()


@pytest.mark.slow
def test_what_was_given_up_is_left_for_people_and_swept_in_the_end(place: OpenWarehouse) -> None:
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])
    left = set(objects(place, 9, ObjectKind.BASE) + objects(place, 9, ObjectKind.SEGMENT))
    done = recover(place, NAME, run=in_order)
    kept = sweep(place, NAME)
    assert kept.deleted == 0 and {f.reason for f in kept.reasons} == {"of a checkpoint that was given up lately"}
    assert kept.kept == len(left) and done.swept_objects == 0
    run = new_run(place)
    run.step(purchases()[8])
    gone = sweep(place, NAME, SweepOptions(age_guard=timedelta(0)))
    assert gone.deleted == len(left)
    assert {d.name for d in place.catalog.tombstones.list(NAME)} == left
    assert not failures(place, NAME)


def test_no_stream_and_no_checkpoint_are_said_to_be(place: OpenWarehouse, tmp_path: Path) -> None:
    with pytest.raises(UnknownStream):
        recover(place, "unknown", run=in_order)
    with OpenWarehouse.open_writable(str(tmp_path / "empty")) as empty:
        new_run(empty)
        with pytest.raises(UnknownCheckpoint, match="it has none yet, run it first"):
            recover(empty, NAME, run=in_order)
        assert len(empty.catalog.runs.list(NAME)) == 1


# Materialized bases


def consolidate(place: OpenWarehouse, checkpoint: int, id: str) -> list[str]:
    """Materialize an operator there; the names of its bases."""
    operator = SMALL.operators[0].name
    materialize(place, NAME, operator, checkpoint, id=id, parallelism=2, run=in_order)
    return [n for n in objects(place, checkpoint, ObjectKind.MATERIALIZATION) if f".{id}." in n]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "what"), [(alter, "base"), long_form(delete, "base"), (cut, "manifest")])
def test_a_materialized_base_is_made_again(place: OpenWarehouse, damage: Callable, what: str) -> None:
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])
    recover(place, NAME, run=in_order)
    before = digests(place)
    consolidate(place, 6, "m6")
    names = consolidate(place, 7, "m7")
    chosen = [name for name in names if name.endswith(".materialized.arrow") == (what == "manifest")]
    damage(place, chosen[0])
    foreseen = recover(place, NAME, run=in_order, dry_run=True)
    assert foreseen.rebuilt == (SMALL.operators[0].name,) and foreseen.given_up == (7, 8)
    assert "would try to rebuild the base of" in foreseen.summary
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.rebuilt) == (8, (), foreseen.rebuilt)
    assert digests(place) == before and not failures(place, NAME)
    assert beginnings(place.catalog, NAME, 8)[SMALL.operators[0].name] == 7
    run = new_run(place)
    run.step(purchases()[8])
    assert not failures(place, NAME, [9])


@pytest.mark.slow
def test_without_what_it_was_made_of_the_stream_goes_back(place: OpenWarehouse) -> None:
    names = consolidate(place, 8, "m8")
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])
    delete(place, *names, *objects(place, 6, ObjectKind.SEGMENT))
    done = recover(place, NAME, run=in_order, accept_loss=True)
    assert (done.checkpoint, done.given_up, done.rebuilt) == (5, (6, 7, 8, 9), ())
