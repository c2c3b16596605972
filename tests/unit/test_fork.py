"""Forks: they share objects, go their own way, and whatever is deleted on either side, the other proves."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records import forks
from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.fork import fork
from siltstone.errors import StateError, UnknownCheckpoint
from siltstone.format.manifests import read_manifests
from siltstone.retention.deletion import delete_checkpoints, foresee
from siltstone.retention.sweep import sweep
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.store.filesystem import FilesystemStore
from tests.examples import long_form
from tests.fork_cases import NEW, names_of, stored, write_parent
from tests.orphans import filesystem, new_run
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun, clock_of
from tests.stops import Stop, stop
from tests.sums import NAME, POLICY, STREAM, rows


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent's five checkpoints."""
    return write_parent(tmp_path_factory.mktemp("forks"))


def run_of(place: OpenWarehouse, name: str, parallelism: int = 2) -> RegionRun:
    return RegionRun(place, replace(STREAM, name=name), POLICY, parallelism=parallelism)


def check_whole(place: OpenWarehouse, *streams: str, orphans: set[str] | None = None) -> None:
    """All that is to be seen proves, and some of it restores; the store holds what these streams refer to, and the
    orphans."""
    for stream in streams:
        check_restores(place, stream)
    assert set(stored(place)) == names_of(place, *streams) | (orphans or set())


def consolidate(place: OpenWarehouse, stream: str, checkpoint: int, id: str) -> None:
    options: dict[str, Any] = {"parallelism": 2, "run": in_order}
    materialize(place, stream, "by_key", checkpoint, id=id, **options)


@pytest.mark.slow
def test_a_fork_copies_no_object_and_restores_to_the_same(place: OpenWarehouse) -> None:
    before, parent = stored(place), place.catalog.streams.get(NAME)
    made = fork(place, NAME, NEW, "3")
    at = place.catalog.checkpoints.get(NAME, 3)
    assert (made.stream, made.forked_from, made.forked_at, made.digest) == (NEW, NAME, 3, at.digest)
    assert stored(place) == before
    shared = names_of(place, NEW)
    assert shared == {o.name for o in place.catalog.objects.list(NAME, [1, 2, 3])}
    assert (made.objects, made.bytes) == (len(shared), sum(before[name] for name in shared))
    assert [c.id for c in place.catalog.checkpoints.list(NEW)] == [3]
    assert place.catalog.chains.list_checkpoints(NEW, 3) == [1, 2, 3]
    assert place.catalog.checkpoints.get(NEW, 3) == replace(at, stream=NEW)
    assert place.catalog.input_log.list(NEW, 99) == place.catalog.input_log.list(NAME, 3)
    assert place.catalog.input_log.get_clock(NEW, 3) == clock_of(3) == place.catalog.input_log.get_clock(NAME, 3)
    record = place.catalog.streams.get(NEW)
    assert (record.epoch, record.definition, record.forked_from) == (parent.epoch, parent.definition, NAME)
    assert place.catalog.streams.get(NAME) == parent
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NEW, 3), NEW)
    assert {m.stream for m in manifests.values()} == {NEW}
    check_whole(place, NAME, NEW)


@pytest.mark.slow
def test_a_fork_goes_its_own_way(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    ours, theirs = run_of(place, NEW, parallelism=1), new_run(place)
    assert list(ours.region.input_position().newest) == place.catalog.input_log.list(NAME, 3)[-2:]
    again = [ours.step(rows(n)) for n in (4, 5)]
    digests = [place.catalog.checkpoints.get(NAME, id).digest for id in (4, 5)]
    assert [c and (c.id, c.digest) for c in again] == list(zip((4, 5), digests, strict=True)), "the same input"
    other, further = ours.step(rows(60)), theirs.step(rows(6))
    assert other and further and (other.id, further.id) == (6, 6) and other.digest != further.digest
    own = names_of(place, NEW) - names_of(place, NAME)
    assert own and all(name.startswith(f"{NEW}/00000003/") for name in own)
    check_whole(place, NAME, NEW)


def test_a_fork_that_is_taken_back_behind_its_beginning_says_nothing_twice(place: OpenWarehouse) -> None:
    """It does again what its parent did, whose sinks have that; its own begin where it began."""
    fork(place, NAME, NEW, "3")
    epoch = place.catalog.runs.begin(NEW, "a test")
    place.catalog.rollbacks.roll_back(NEW, epoch, 0, "a test", "a test")
    ours, theirs = run_of(place, NEW), new_run(place)
    assert (ours.region.completed, theirs.region.completed) == (0, 5)
    assert [s.checkpoint for s in ours.region.logged_steps()] == [1, 2, 3]


@pytest.mark.slow
def test_what_the_parent_deletes_stays_for_the_fork(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    kept, before = names_of(place, NEW), stored(place)
    ahead = foresee(place.catalog, NAME, [1, 2, 3, 4])
    done = delete_checkpoints(place, NAME, [1, 2, 3, 4])
    gone = before.keys() - stored(place).keys()
    assert (done.deleted, done.objects, done.bytes) == ((1, 2, 3, 4), len(gone), sum(before[n] for n in gone))
    assert {o.name for o in ahead.objects} == gone and not gone & kept
    assert {d.name for d in place.catalog.tombstones.list(NAME)} == gone
    assert sweep(place, NAME).found == 0
    assert [c.id for c in place.catalog.checkpoints.list_retained(NAME)] == [5]
    check_whole(place, NAME, NEW)
    assert run_of(place, NEW).step(rows(4)), "it resumes from there"
    check_whole(place, NAME, NEW)


@pytest.mark.slow
def test_a_fork_becomes_independent_and_the_last_one_deletes(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "4")
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    run = run_of(place, NEW)
    shared = {name for name in names_of(place, NEW) if name.startswith(f"{NAME}/")}
    if place.catalog.chains.list_checkpoints(NEW, 4) != [4]:
        consolidate(place, NEW, 4, "m1")
    made = {o.name for o in place.catalog.objects.list(NEW, [4])} - shared
    assert made and all(name.startswith(f"{NEW}/") for name in made), "named after the fork"
    assert run.step(rows(5))
    consolidate(place, NEW, 5, "m2")
    before = stored(place)
    done = delete_checkpoints(place, NEW, [4])
    gone = before.keys() - stored(place).keys()
    assert shared <= gone and (done.objects, done.bytes) == (len(gone), sum(before[n] for n in gone))
    assert all(name.startswith(f"{NEW}/") for name in names_of(place, NEW))
    assert sweep(place, NAME).found == sweep(place, NEW).found == 0
    check_whole(place, NAME, NEW)
    assert run.step(rows(6))


def test_a_fork_that_lets_go_leaves_the_parent_whole(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "4")
    run = run_of(place, NEW)
    run.step(rows(5))
    consolidate(place, NEW, 5, "m1")
    done = delete_checkpoints(place, NEW, [4])
    assert (done.deleted, done.objects) == ((1, 2, 3, 4), 0)
    check_whole(place, NAME, NEW)


@pytest.mark.slow
def test_a_fork_begins_with_materialized_bases(place: OpenWarehouse) -> None:
    consolidate(place, NAME, 3, "m1")
    consolidate(place, NAME, 4, "m2")
    fork(place, NAME, NEW, "3")
    fork(place, NAME, "later", "4")
    assert place.catalog.chains.list_checkpoints(NEW, 3) == [3] and place.catalog.chains.list_checkpoints(
        "later", 4
    ) == [4]
    assert not any(".m2." in name for name in names_of(place, NEW))
    assert {m.id for m in place.catalog.materializations.list(NEW)} == {"m1"}
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    check_whole(place, NAME, NEW, "later")
    assert run_of(place, NEW).step(rows(4)) and run_of(place, "later").step(rows(5))
    check_whole(place, NAME, NEW, "later")


@pytest.mark.slow
def test_a_fork_of_a_fork(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    run_of(place, NEW).step(rows(4))
    fork(place, NEW, "again")
    assert place.catalog.forks.get_lineage("again") == ["again", NEW, NAME]
    assert [c.id for c in place.catalog.checkpoints.list("again")] == [4]
    run_of(place, NEW).step(rows(5))
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    delete_checkpoints(place, NEW, [3, 4])
    for stream in (NAME, NEW, "again"):
        assert sweep(place, stream).found == 0
    check_whole(place, NAME, NEW, "again")
    assert run_of(place, "again").step(rows(50))
    check_whole(place, NAME, NEW, "again")


def test_two_that_let_go_at_once_leave_an_orphan_which_a_sweep_finds(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees that the other still refers to it; the second is whole while the first is between its transactions."""
    fork(place, NAME, NEW, "4")
    run = run_of(place, NEW)
    run.step(rows(5))
    consolidate(place, NEW, 5, "m1")
    shared, forget = names_of(place, NAME) & names_of(place, NEW), Deletions.forget

    def after_the_other(deletions: Deletions, *arguments: Any) -> None:
        monkeypatch.setattr(Deletions, "forget", forget)
        assert delete_checkpoints(place, NAME, [1, 2, 3, 4]).objects == 0
        forget(deletions, *arguments)

    monkeypatch.setattr(Deletions, "forget", after_the_other)
    assert delete_checkpoints(place, NEW, [4]).objects == 0
    check_whole(place, NAME, NEW, orphans=shared)
    assert sweep(place, NEW).found == 0
    assert sweep(place, NAME).deleted == len(shared)
    check_whole(place, NAME, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("at", [long_form(2), 4, 5])
def test_a_fork_at_any_moment_of_a_deletion_is_whole_or_refused(written: Path, tmp_path: Path, at: int) -> None:
    """Checkpoints 1 to 4 go; 5 stays, and so do those that a fork is quicker to begin with."""
    outcomes = []
    for moment in range(20):
        root = tmp_path / f"{moment}"
        shutil.copytree(written, root / "w")
        with filesystem(root) as place, pytest.MonkeyPatch.context() as patch:
            reached: list[bool] = []
            left = [moment]

            def forking(place: OpenWarehouse = place, left: list[int] = left, reached: list[bool] = reached) -> None:
                left[0] -= 1
                if left[0] == -1:
                    try:
                        fork(place, NAME, NEW, str(at))
                        reached.append(True)
                    except UnknownCheckpoint:
                        reached.append(False)

            around(patch, forking)
            delete_checkpoints(place, NAME, [1, 2, 3, 4])
            sweep(place, NAME)
            patch.undo()
            if not reached:
                break
            outcomes += reached
            delete_checkpoints(place, NAME, [])
            sweep(place, NAME)
            check_whole(place, NAME, *([NEW] if reached[0] else []))
            if not reached[0]:
                assert NEW not in {s.name for s in place.catalog.streams.list()}
        shutil.rmtree(root)
    assert len(outcomes) > 6 and outcomes[0]
    assert all(outcomes) == (at == 5), "a checkpoint that is marked begins no fork"


def around(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` before and after each call of the catalog and the store that a deletion or sweep makes."""
    for kind, names in (
        (Deletions, ("mark", "forget")),
        (Leases, ("list_live",)),
        (Checkpoints, ("list_retained",)),
        (Tombstones, ("record_deletion", "record_orphans")),
        (FilesystemStore, ("delete",)),
    ):
        for name in names:
            patch.setattr(kind, name, _around(getattr(kind, name), action))


def _around(method: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        action()
        answer = method(*arguments, **named)
        action()
        return answer

    return called


def test_stopped_anywhere_there_is_no_fork_at_all(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("insert_objects", "read_needed"):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(forks, method, stop)
            fork(place, NAME, NEW, "4")
        assert [s.name for s in place.catalog.streams.list()] == [NAME]
    fork(place, NAME, NEW, "4")
    check_whole(place, NAME, NEW)


def test_what_a_fork_has_no_live_state_of_is_not_copied_from_the_parent(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW)
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NEW, 5), NEW)
    task = snapshot_tasks(place.warehouse, manifests[5], "heap", "a")[0]
    with pytest.raises(StateError, match=rf"no live state of {NEW}/by_key"):
        take_snapshot(task)
    assert not any("snapshot" in name for name in stored(place))
