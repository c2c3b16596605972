"""Materialization without Spark: chains begin later, state stays what it was, whoever dies."""

import random
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import Materialized, materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import CorruptObject, Fenced, UnknownCheckpoint, UnknownStream, UsageError
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Kind
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.store.paths import materialization_of
from tests.catalog_cases import beginnings
from tests.clock import Clock
from tests.fault.small_stream import SMALL, purchases
from tests.places import place_at
from tests.proofs import check_restores, failures, in_order, restored_digest
from tests.region_run import RegionRun
from tests.stored import stream_objects

NAME = SMALL.name
LONG = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
"""one base, then deltas"""


def stored(place: OpenWarehouse) -> set[str]:
    """The objects of the stream, but for output that no sink has taken yet."""
    outputs = {o.name for output in place.catalog.outbox.list(NAME) for o in output.objects}
    return {name for name, _ in stream_objects(place.warehouse.store)} - outputs


def consolidate(
    place: OpenWarehouse, operator: str, checkpoint: int, id: str = "m1", parallelism: int = 3
) -> Materialized:
    return materialize(place, NAME, operator, checkpoint, id=id, parallelism=parallelism, run=in_order)


def digests(place: OpenWarehouse) -> dict[int, str]:
    return {c.id: c.digest for c in place.catalog.checkpoints.list(NAME)}


def check(place: OpenWarehouse, *checkpoints: int) -> None:
    """These (none given: all) prove, and restore at any parallelism; of all, only some are restored."""
    if not checkpoints:
        return check_restores(place, NAME, (2, 5, 1))
    assert not failures(place, NAME, checkpoints)
    for checkpoint in checkpoints:
        assert restored_digest(place, NAME, checkpoint, random.choice([1, 2, 5])) == digests(place)[checkpoint]


@pytest.mark.slow
def test_chains_begin_with_it_and_the_run_goes_on(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    rows = iter(purchases())
    for _ in range(5):
        run.step(next(rows))
    before = digests(place)
    for operator in SMALL.operators:
        made = consolidate(place, operator.name, 4, f"m-{operator.name}")
        assert made.bytes > 0 and made.checkpoint == 4
    assert place.catalog.chains.list_checkpoints(NAME, 5) == [4, 5] and place.catalog.chains.list_checkpoints(
        NAME, 4
    ) == [4]
    assert place.catalog.chains.list_checkpoints(NAME, 3) == [1, 2, 3]
    check(place)
    for _ in range(2):
        completed = run.step(next(rows))
        assert completed is not None and set(completed.forms.values()) == {Form.DELTA}
    assert place.catalog.chains.list_checkpoints(NAME, 7) == [4, 5, 6, 7]
    assert {state.deltas for of in run.region.chains.policies.values() for state in of.values()} == {3}
    check(place, 6, 7)
    assert before.items() <= digests(place).items()
    task = run.region.begin_step()[SMALL.operators[0].name]
    assert task.restore.manifests[-1].name.endswith(".materialized.arrow")
    again = RegionRun(place, SMALL, LONG, parallelism=3)
    assert {state.deltas for of in again.region.chains.policies.values() for state in of.values()} == {3}
    again.step(next(rows))
    result = delete_checkpoints(place, NAME, [1, 2, 3])
    assert result.deleted == (1, 2, 3) and not result.marked
    again.step(next(rows))
    check(place)
    assert stored(place) == {o.name for o in place.catalog.objects.list(NAME)}


class Killed(BaseException):
    """The process ends here, as far as the engine can tell."""


@pytest.mark.slow
def test_whoever_dies_in_it_changes_nothing(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    for rows in purchases()[:4]:
        run.step(rows)
    operator = SMALL.operators[0].name

    def dies(function, tasks):
        function(tasks[0])
        raise Killed

    before = {o.name for o in place.catalog.objects.list(NAME)}
    with pytest.raises(Killed):
        materialize(place, NAME, operator, 4, id="m1", parallelism=2, run=dies)
    assert {o.name for o in place.catalog.objects.list(NAME)} == before
    assert place.catalog.chains.list_checkpoints(NAME, 4) == [1, 2, 3, 4]
    [failed] = place.catalog.materializations.list(NAME)
    assert (failed.outcome, failed.error) == ("failed", "Killed: no message")
    left = stored(place) - before
    assert left and {materialization_of(name) for name in left} == {"m1"}
    check(place)
    consolidate(place, operator, 4, "m2")
    assert beginnings(place.catalog, NAME, 4)[operator] == 4
    check(place)


@pytest.mark.slow
def test_at_most_one_at_a_time_and_a_lease_that_expired_is_taken_over(tmp_path: Path) -> None:
    clock = Clock()
    with place_at(tmp_path / "w", clock) as place:
        run = RegionRun(place, SMALL, LONG)
        for rows in purchases()[:3]:
            run.step(rows)
        operator, other = (op.name for op in SMALL.operators[:2])
        minute = timedelta(seconds=60)
        place.catalog.leases.take(NAME, [3], id="m1", who="slow", lasts=minute)
        place.catalog.materializations.begin(NAME, operator, 3, id="m1", who="slow")
        with pytest.raises(UsageError, match=r"is being materialized at checkpoint 3 by slow"):
            consolidate(place, operator, 3, "m2")
        consolidate(place, other, 3, "m3")
        clock.move(seconds=50)
        assert place.catalog.leases.renew("m1", minute)
        clock.move(seconds=50)
        with pytest.raises(UsageError, match="being materialized"):
            consolidate(place, operator, 3, "m4")
        clock.move(seconds=11)
        manifest = place.catalog.checkpoints.get(NAME, 3).manifest
        with pytest.raises(Fenced, match=r"m1 of stream .* has lost its lease"):
            place.catalog.materializations.complete(NAME, "m1", manifest, [], (), (), rows_=0, bytes_=0, seconds=0)
        consolidate(place, operator, 2, "m5")
        assert [m.outcome for m in place.catalog.materializations.list(NAME)] == ["failed", "done", "done"]
        assert beginnings(place.catalog, NAME, 3) == {
            **beginnings(place.catalog, NAME, 3),
            operator: 2,
            other: 3,
        }
        check(place)


@pytest.mark.slow
def test_the_stream_goes_on_meanwhile_with_deltas_and_with_a_base(place: OpenWarehouse) -> None:
    short = policy_by_name("adjust-d", PolicyOptions(d0=4, size_ratio_max=None, space_amplification_max=None))
    run = RegionRun(place, SMALL, short, parallelism=2)
    rows = iter(purchases())
    for _ in range(3):
        run.step(next(rows))
    operator = SMALL.operators[0].name

    def meanwhile(function, tasks):
        parts = [function(task) for task in tasks]
        for _ in range(4):  # one of these is a base
            run.step(next(rows))
        return parts

    materialize(place, NAME, operator, 3, id="m1", parallelism=2, run=meanwhile)
    forms = {c.id: c.forms[operator] for c in place.catalog.checkpoints.list(NAME)}
    based = max(id for id, form in forms.items() if form is Form.BASE)
    assert based > 3
    assert {id: beginnings(place.catalog, NAME, id)[operator] for id in range(1, 8)} == {
        id: 1 if id < 3 else 3 if id < based else based for id in range(1, 8)
    }
    check(place)
    # What the run restores from while it goes on is never what a deletion may take.
    delete_checkpoints(place, NAME, range(1, 7))
    shutil.rmtree(place.warehouse.local.work(NAME, 1) / "state")
    run.step(next(rows))
    check(place)


@pytest.mark.slow
def test_a_damaged_chain_is_not_materialized(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    for rows in purchases()[:3]:
        run.step(rows)
    operator = SMALL.operators[0].name
    [handle, *_] = [
        h
        for h in read_manifest(place.warehouse.store, place.catalog.checkpoints.get(NAME, 2).manifest).handles
        if h.operator == operator and h.kind is Kind.INCREMENTAL
    ]
    path = place.warehouse.local.objects / handle.object
    data = bytearray(path.read_bytes())
    data[handle.offset + handle.length // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptObject, match=handle.object):
        consolidate(place, operator, 3)
    [record] = place.catalog.materializations.list(NAME)
    assert record.outcome == "failed" and handle.object in str(record.error)
    assert 1 in place.catalog.chains.list_checkpoints(NAME, 3)


def test_what_is_not_there_is_not_materialized(place: OpenWarehouse) -> None:
    with pytest.raises(UnknownStream):
        consolidate(place, "x", 1)
    run = RegionRun(place, SMALL, LONG)
    for rows in purchases()[:3]:
        run.step(rows)
    with pytest.raises(UsageError, match="has no operator 'x': it has"):
        consolidate(place, "x", 3)
    with pytest.raises(UnknownCheckpoint):
        consolidate(place, SMALL.operators[0].name, 9)
    assert place.catalog.materializations.list(NAME) == []


@pytest.mark.slow
def test_what_it_reads_and_writes_is_kept_from_deletions_and_sweeps(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    for rows in purchases()[:5]:
        run.step(rows)
    operator = SMALL.operators[0].name

    def meanwhile(function, tasks):
        parts = [function(tasks[0])]
        result = delete_checkpoints(place, NAME, [1, 2, 3])
        assert not result.deleted and sweep(place, NAME).deleted == 0
        return parts + [function(task) for task in tasks[1:]]

    materialize(place, NAME, operator, 3, id="m1", parallelism=2, run=meanwhile)
    check(place)

    def dies(function, tasks):
        function(tasks[0])
        raise Killed

    with pytest.raises(Killed):
        materialize(place, NAME, SMALL.operators[1].name, 4, id="m2", parallelism=2, run=dies)
    swept = sweep(place, NAME)
    assert swept.deleted > 0
    check(place)
    for name in (op.name for op in SMALL.operators):
        consolidate(place, name, 4, f"m-{name}")
    run.region.close("done")
    assert delete_checkpoints(place, NAME, []).deleted == (1, 2, 3)
    assert stored(place) == {o.name for o in place.catalog.objects.list(NAME)}
    check(place)


@pytest.mark.slow
def test_a_run_that_waited_long_restores_from_what_is_there_by_then(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    rows = iter(purchases())
    for _ in range(4):
        run.step(next(rows))
    for operator in SMALL.operators:
        consolidate(place, operator.name, 4, f"m-{operator.name}")
    gone = [stored.name for stored in place.catalog.objects.list(NAME, [1, 2, 3])]
    assert delete_checkpoints(place, NAME, [1, 2, 3]).deleted == (), "a step that began before may restore them"
    shutil.rmtree(place.warehouse.local.work(NAME, 1) / "state")
    place.warehouse.store.delete(gone)  # as if by a process that does not know that
    run.step(next(rows))
    assert delete_checkpoints(place, NAME, []).deleted == (1, 2, 3)
    check(place)


@pytest.mark.slow
def test_a_damaged_materialization_is_noticed_by_restore_and_proof(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    for rows in purchases()[:5]:
        run.step(rows)
    consolidate(place, SMALL.operators[0].name, 4, parallelism=1)  # an object of each kind and table
    written = [o for o in place.catalog.objects.list(NAME) if o.kind is ObjectKind.MATERIALIZATION]
    assert {stored.name.rpartition(".")[2] for stored in written} == {"arrow", "opaque", "parquet"}
    for stored in written:
        path = place.warehouse.local.objects / stored.name
        whole = path.read_bytes()
        at = random.randrange(len(whole))
        path.unlink()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found = failures(place, NAME, [3, 4, 5])
        assert {f.checkpoint for f in found} == {4, 5} and {f.object for f in found} == {stored.name}
        with pytest.raises(CorruptObject, match=stored.name):
            restored_digest(place, NAME, random.choice([4, 5]))
        path.write_bytes(whole)
    check(place)
