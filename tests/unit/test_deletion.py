"""Deletion of checkpoints: what is left restores and proves, and store and catalog agree wherever a deletion stops."""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from siltstone.catalog.checkpoints import Checkpoints
from siltstone.catalog.commits import CheckpointCommit
from siltstone.catalog.deletions import Deletions
from siltstone.catalog.leases import Leases
from siltstone.catalog.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.doctor.stream_checks import StreamSubject, check_deletions
from siltstone.errors import Fenced, UnknownCheckpoint, UnknownStream, Unreachable, UsageError
from siltstone.model import Form
from siltstone.operator import OpaqueState, Rows, State
from siltstone.report.data import report_data
from siltstone.restore.restore import read_manifests
from siltstone.retention.deletion import DeletionResult, delete_checkpoints
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.settings import load_settings
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from siltstone.stream import Stream
from tests import sums
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun
from tests.stored import stream_objects
from tests.sums import NAME, POLICY, Sums, stream_of

ROOT = Path(__file__).parents[2]
CHECKPOINTS = 12


class Tally(OpaqueState[int]):
    """Bytes that every checkpoint holds whole."""


class Counted(Sums):
    """Counts calls by key group, too."""

    calls = Tally(create=int, serialize=lambda n: n.to_bytes(8, "big"), deserialize=int.from_bytes)

    def process(self, rows: Rows, state: State) -> None:
        super().process(rows, state)
        for group in np.unique(rows.key_groups).tolist():
            state.calls[group] += 1


def stream(*names: str) -> Stream:
    return stream_of(*(Counted(name=name) for name in names))


rows = partial(sums.rows, keys=200, changed=20)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with 12 checkpoints; operator `new` begins at the third, so that bases fall at different ones."""
    root = tmp_path_factory.mktemp("deletion") / "w"
    with OpenWarehouse.writable(str(root)) as place:
        run = RegionRun(place, stream("old"), POLICY)
        for n in (1, 2):
            run.step(rows(n))
        run = RegionRun(place, stream("old", "new"), POLICY, parallelism=2)
        for n in range(3, CHECKPOINTS + 1):
            run.step(rows(1 if n == 3 else n))
        firsts = [
            read_manifests(place.warehouse.store, [c.manifest])[c.id].first
            for c in place.catalog.checkpoints.list(NAME)
        ]
        assert [f["old"] for f in firsts] == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]
        assert [f["new"] for f in firsts[2:]] == [3, 3, 3, 3, 7, 7, 7, 7, 11, 11]
    return root


def check_whole(place: OpenWarehouse, visible: Iterable[int]) -> None:
    """Exactly these are to be seen, and prove; the store holds exactly what the catalog names."""
    visible = sorted(visible)
    recorded = place.catalog.checkpoints.list(NAME)
    assert [c.id for c in recorded] == visible
    assert not failures(place, NAME)
    for checkpoint in recorded:
        assert restored_digest(place, NAME, checkpoint.id) == checkpoint.digest
    named = [(o.name, o.bytes) for o in place.catalog.objects.list(NAME)]
    assert sorted(stream_objects(place.warehouse.store)) == sorted(named)


def needed(first: dict[int, int], visible: Iterable[int]) -> set[int]:
    return {c for id in visible for c in range(first[id], id + 1)}


def firsts(place: OpenWarehouse) -> dict[int, int]:
    return {r.id: r.first for r in place.catalog.checkpoints.list_retained(NAME)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20130704, 9471438, 158])
def test_in_any_order_what_is_left_proves_and_nothing_else_is_stored(place: OpenWarehouse, seed: int) -> None:
    first, chance = firsts(place), random.Random(seed)
    order = chance.sample(range(1, CHECKPOINTS), CHECKPOINTS - 1)
    visible, stored = set(first), set(first)
    before = dict(stream_objects(place.warehouse.store))
    while order:
        count = chance.randint(1, 3)
        ids, order = order[:count], order[count:]
        visible -= set(ids)
        kept = needed(first, visible)
        result = delete_checkpoints(place, NAME, ids)
        assert set(result.deleted) == stored - kept
        assert set(result.marked) == kept - visible
        after = dict(stream_objects(place.warehouse.store))
        assert (result.objects, result.bytes) == (
            len(before) - len(after),
            sum(before.values()) - sum(after.values()),
        )
        stored, before = kept, after
        check_whole(place, visible)
    assert visible == {CHECKPOINTS}
    assert stored == {9, 10, 11, 12}


@pytest.mark.slow
def test_a_stream_runs_on_after_its_checkpoints_were_deleted(
    place: OpenWarehouse, tmp_path: Path, written: Path
) -> None:
    shutil.copytree(written, tmp_path / "undisturbed")
    delete_checkpoints(place, NAME, range(1, CHECKPOINTS))
    with OpenWarehouse.writable(str(tmp_path / "undisturbed")) as other:
        runs = [RegionRun(p, stream("old", "new"), POLICY) for p in (place, other)]
        assert runs[0].region.input_position() == runs[1].region.input_position()
        assert [s.step for s in runs[0].region.input_position().newest] == [CHECKPOINTS - 1, CHECKPOINTS]
        for n in (21, 22):
            here, there = (run.step(rows(n)) for run in runs)
            assert here and there and here.digest == there.digest
    check_whole(place, [12, 13, 14])
    # A run is at work, and lets checkpoints be deleted that it does not need.
    result = delete_checkpoints(place, NAME, [12, 13])
    assert (result.deleted, result.marked) == ((9, 10), (11, 12, 13))
    completed = runs[0].step(rows(23))
    assert completed and completed.id == 15
    check_whole(place, [14, 15])


@pytest.mark.slow
def test_a_snapshot_goes_at_once_though_its_checkpoint_waits(place: OpenWarehouse) -> None:
    run = RegionRun(place, stream("old", "new"), POLICY, parallelism=2)
    completed = run.step(rows(13))
    assert completed
    store, catalog = place.warehouse.store, place.catalog
    manifest = read_manifests(store, catalog.chains.list_manifests(NAME, 13))[13]
    parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifest, "heap", "a")]
    objects = [stored for part in parts for stored in part.objects]
    catalog.reference_copies.add(NAME, run.region.epoch, 13, objects, sum(part.rows for part in parts))
    run.step(rows(14))
    result = delete_checkpoints(place, NAME, [13])
    assert (result.deleted, result.objects, result.bytes) == ((), len(objects), sum(o.bytes for o in objects))
    assert 13 in result.marked and not catalog.reference_copies.list(NAME)
    check_whole(place, [*range(1, 13), 14])


@pytest.mark.slow
def test_opaque_variables_stored_apart_go_at_once_though_their_checkpoint_waits(place: OpenWarehouse) -> None:
    """As a store without ranges keeps them; the segments themselves are of no interest here."""
    store, catalog = place.warehouse.store, place.catalog
    catalog.streams.register("apart", 4, {})
    epoch = catalog.runs.begin("apart", "a test")
    for id in (1, 2, 3):
        path = CheckpointPath("apart", epoch, id)
        segments = [store.put(path.segment("log", section), b"x" * id) for section in ("NON", "INCR", "INDEX")]
        manifest = store.put(path.manifest(), b"m")
        first = {"old": 1}
        catalog.commits.add(
            "apart",
            epoch,
            CheckpointCommit(id, manifest, "", 0, 0, {"old": Form.DELTA}, segments=segments, first=first),
        )
    subject = StreamSubject(place, load_settings(), "apart")
    catalog.runs.end("apart", epoch, "done")
    catalog.deletions.mark("apart", epoch, [1, 2])  # as by a deletion that is killed right after
    [finding] = check_deletions(subject)
    assert finding.state == "warning" and "unfinished: 2 checkpoints (checkpoints 1 to 2)" in finding.found
    assert "with 2 objects of" in finding.found
    result = delete_checkpoints(place, "apart", [1, 2])
    assert result == DeletionResult(deleted=(), marked=(1, 2), objects=2, bytes=3)
    [finding] = check_deletions(subject)
    assert finding.found == "2 marked checkpoints wait for newer ones that build on them"
    left = {name.rpartition(".")[2] for name, _ in store.list(f"apart/{epoch:08d}/{1:012d}/")}
    assert left == {"INCR", "INDEX", "arrow"}
    assert sorted(store.list("apart/")) == sorted((o.name, o.bytes) for o in catalog.objects.list("apart"))
    assert delete_checkpoints(place, "apart", [1]) == DeletionResult((), (1, 2), 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_left_proves_without_the_opaque_variables_of_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(FilesystemStore, "ranged", False)
    with OpenWarehouse.writable(str(tmp_path / "apart")) as place:
        run = RegionRun(place, stream("old"), POLICY, parallelism=2)
        for n in range(1, 8):
            run.step(rows(n))
        first = firsts(place)
        assert first == {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 5, 7: 5}
        visible = set(first)
        for id in random.Random(seed).sample(range(1, 7), 6):
            visible.remove(id)
            waits = delete_checkpoints(place, NAME, [id]).marked
            assert set(waits) == needed(first, visible) - visible
            left = {o.checkpoint for o in place.catalog.objects.list(NAME) if o.name.endswith(".NON")}
            assert left == visible
            check_whole(place, visible)
        completed = RegionRun(place, stream("old"), POLICY, parallelism=3).step(rows(8))
        assert completed
        check_whole(place, [7, 8])


def test_a_report_counts_what_waits_in_the_chains_of_others(place: OpenWarehouse) -> None:
    before = {point.id: point for point in report_data(place.catalog, NAME).checkpoints}
    delete_checkpoints(place, NAME, IDS)
    after = report_data(place.catalog, NAME).checkpoints
    assert [point.id for point in after] == [6, 7, 10, 11, 12]
    assert all(point == before[point.id] for point in after)


# What cannot be deleted


@pytest.mark.slow
@pytest.mark.parametrize("ids", [[3, 13], [0], [-1, 4], [2**80]])
def test_with_an_unknown_checkpoint_none_is_deleted(place: OpenWarehouse, ids: list[int]) -> None:
    with pytest.raises(UnknownCheckpoint, match=r"no checkpoint -?\d+ of stream sums: it has 12, 1 to 12"):
        delete_checkpoints(place, NAME, ids)
    check_whole(place, range(1, 13))


@pytest.mark.slow
def test_with_the_newest_none_is_deleted(place: OpenWarehouse) -> None:
    with pytest.raises(UsageError, match="checkpoint 12 of stream sums is its newest, which the next run resumes from"):
        delete_checkpoints(place, NAME, [1, 12])
    check_whole(place, range(1, 13))


def test_a_stream_that_never_ran_has_nothing_to_delete(place: OpenWarehouse) -> None:
    with pytest.raises(UnknownStream, match="it has sums"):
        delete_checkpoints(place, "some", [1])
    place.catalog.streams.register("idle", 4, {})
    with pytest.raises(UnknownCheckpoint, match="stream idle: it has none yet, run it first"):
        delete_checkpoints(place, "idle", [1])


def test_deleting_again_is_no_error_and_does_nothing(place: OpenWarehouse) -> None:
    first = delete_checkpoints(place, NAME, [4, 4, 6, 8])
    assert (first.deleted, first.marked) == ((), (4, 6, 8))
    assert delete_checkpoints(place, NAME, [8, 6, 4]) == DeletionResult((), (4, 6, 8), 0, 0)
    assert delete_checkpoints(place, NAME, [1, 2, 3, 5]).deleted == (1, 2, 3, 4)
    assert delete_checkpoints(place, NAME, [1, 4]) == DeletionResult((), (5, 6, 8), 0, 0)
    assert delete_checkpoints(place, NAME, []) == DeletionResult((), (5, 6, 8), 0, 0)
    check_whole(place, [7, 9, 10, 11, 12])


# A deletion that is stopped

IDS = [1, 2, 3, 4, 5, 8, 9]
"""with bases of both operators among them, and two that wait"""


class Stop(Exception):
    """Stands for the end of the process."""


def fail_after(patch: pytest.MonkeyPatch, deletes: int, action: Callable[[], None]) -> None:
    """Let the store delete so many objects one by one, and then do something else."""
    delete, left = FilesystemStore.delete, [deletes]

    def one_by_one(self: FilesystemStore, names: Iterable[str]) -> None:
        for name in names:
            if left[0] == 0:
                action()
            left[0] -= 1
            delete(self, [name])

    patch.setattr(FilesystemStore, "delete", one_by_one)


def stop() -> None:
    raise Stop


def check_stopped(place: OpenWarehouse) -> None:
    """After a deletion of IDS that did not end: what is to be seen proves, and what is left of the rest is known."""
    recorded = place.catalog.checkpoints.list(NAME)
    assert [c.id for c in recorded] == [6, 7, 10, 11, 12]
    assert not failures(place, NAME)
    stored = {name for name, _ in stream_objects(place.warehouse.store)}
    assert stored <= {o.name for o in place.catalog.objects.list(NAME)}


@pytest.mark.slow
@pytest.mark.parametrize("again", [IDS, [], [6]], ids=["the same again", "nothing more", "another"])
def test_stopped_in_the_store_it_is_completed_by_the_next(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[int]
) -> None:
    deletes, total = 0, 1
    while deletes < total:
        root = tmp_path / f"w{deletes}"
        shutil.copytree(written, root)
        with OpenWarehouse.writable(str(root)) as place:
            first = firsts(place)
            total = len(place.catalog.objects.list(NAME, set(first) - needed(first, set(first) - set(IDS))))
            with monkeypatch.context() as patch, pytest.raises(Stop):
                fail_after(patch, deletes, stop)
                delete_checkpoints(place, NAME, IDS)
            check_stopped(place)
            delete_checkpoints(place, NAME, again)
            check_whole(place, {6, 7, 10, 11, 12} - set(again))
        deletes += 1
    assert deletes >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "method"),
    [
        (Deletions, "mark"),
        (Leases, "list_live"),
        (Checkpoints, "list_retained"),
        (Tombstones, "record_deletion"),
        (Deletions, "forget"),
    ],
)
def test_stopped_at_the_catalog_it_is_completed_by_the_next(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(part, method, lambda *_, **__: stop())
        delete_checkpoints(place, NAME, IDS)
    if method == "mark":
        check_whole(place, range(1, 13))
    else:
        check_stopped(place)
    assert delete_checkpoints(place, NAME, IDS).deleted == (1, 2)
    check_whole(place, [6, 7, 10, 11, 12])


@pytest.mark.slow
def test_a_store_that_fails_leaves_it_to_the_next(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Unreachable("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(Unreachable, match="the disk is gone"):
        fail_after(patch, 2, fail)
        delete_checkpoints(place, NAME, IDS)
    check_stopped(place)
    assert delete_checkpoints(place, NAME, []).deleted == (1, 2)
    check_whole(place, [6, 7, 10, 11, 12])


KILLED = """
import os, signal, sys
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.retention.deletion import delete_checkpoints
from siltstone.store.filesystem import FilesystemStore

root, deletes, stream, *ids = sys.argv[1:]
delete, left = FilesystemStore.delete, int(deletes)

def one_by_one(self, names):
    global left
    for name in names:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        delete(self, [name])

FilesystemStore.delete = one_by_one
with OpenWarehouse.existing(root) as place:
    delete_checkpoints(place, stream, [int(id) for id in ids])
"""


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [0, 3])
def test_killed_it_is_completed_by_the_next(place: OpenWarehouse, deletes: int) -> None:
    arguments = [str(place.warehouse.local.root), str(deletes), NAME, *map(str, IDS)]
    ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    check_stopped(place)
    assert delete_checkpoints(place, NAME, IDS).deleted == (1, 2)
    check_whole(place, [6, 7, 10, 11, 12])


# Other writers


@pytest.mark.slow
@pytest.mark.parametrize(("part", "method"), [(Deletions, "mark"), (Tombstones, "record_deletion")])
def test_whoever_is_fenced_deletes_nothing(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    guarded = getattr(part, method)

    def too_late(asked: object, *arguments: object, **named: object) -> None:
        place.catalog.runs.begin(NAME, "another run")
        guarded(asked, *arguments, **named)

    before = sorted(stream_objects(place.warehouse.store))
    with monkeypatch.context() as patch, pytest.raises(Fenced):
        patch.setattr(part, method, too_late)
        delete_checkpoints(place, NAME, IDS)
    assert sorted(stream_objects(place.warehouse.store)) == before
    check_whole(place, range(1, 13) if method == "mark" else [6, 7, 10, 11, 12])
    assert delete_checkpoints(place, NAME, IDS).deleted == (1, 2)
    check_whole(place, [6, 7, 10, 11, 12])


def test_two_deletions_at_once_do_what_both_were_asked(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is whole between what the first decides and what it does."""
    check, results = Tombstones.record_deletion, []

    def second(_: Tombstones, *arguments: object) -> object:
        monkeypatch.setattr(Tombstones, "record_deletion", check)
        results.append(delete_checkpoints(place, NAME, [5, 6]))
        return place.catalog.tombstones.record_deletion(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Tombstones, "record_deletion", second)
    first = delete_checkpoints(place, NAME, [1, 2, 3, 4, 7, 8])
    assert (first.deleted, first.marked) == ((1, 2), (3, 4, 7, 8))
    assert (results[0].deleted, results[0].marked) == ((1, 2, 3, 4, 5, 6), (7, 8))
    check_whole(place, [9, 10, 11, 12])
