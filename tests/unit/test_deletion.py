"""Deletion of checkpoints: what is left restores and proves, and store and catalog agree on it."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.doctor.checks import StreamSubject, check_deletions
from siltstone.errors import UnknownCheckpoint, UnknownStream, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.model import Form
from siltstone.report.data import report_data
from siltstone.retention.deletion import DeletionResult, delete_checkpoints
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.settings import load_settings
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from tests.deletion_cases import CHECKPOINTS, IDS, firsts, needed, rows, stream, write_checkpoints
from tests.proofs import check_whole, failures
from tests.region_run import RegionRun
from tests.stored import stream_objects
from tests.sums import NAME, POLICY


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with 12 checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("deletion") / "w")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [158, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (20130704, 9471438))]
)
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
    with OpenWarehouse.open_writable(str(tmp_path / "undisturbed")) as other:
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
        replaced = [CheckpointPath("apart", epoch, id - 1).segment("log", "NON")] if id > 1 else []
        catalog.commits.add(
            "apart",
            epoch,
            CheckpointCommit(id, manifest, "", 0, 0, {"old": Form.DELTA}, segments=segments, replaced=replaced),
        )
    subject = StreamSubject(place, load_settings(), "apart")
    catalog.runs.end("apart", epoch, "done")
    catalog.deletions.mark("apart", epoch, [1, 2])  # as by a deletion that is killed right after
    [finding] = check_deletions(subject)
    assert finding.state == "warning" and "unfinished: 2 checkpoints (checkpoints 1 to 2)" in finding.found
    assert "with 2 objects of" in finding.found
    result = delete_checkpoints(place, "apart", [1, 2])
    assert result == DeletionResult(deleted=(), marked=(1, 2), objects=2, bytes=3, needed_by={1: 3, 2: 3})
    [finding] = check_deletions(subject)
    assert finding.found == "2 marked checkpoints wait for newer ones that build on them"
    left = {name.rpartition(".")[2] for name, _ in store.list(f"apart/{epoch:08d}/{1:012d}/")}
    assert left == {"INCR", "INDEX", "arrow"}
    assert sorted(store.list("apart/")) == sorted((o.name, o.bytes) for o in catalog.objects.list("apart"))
    assert delete_checkpoints(place, "apart", [1]) == DeletionResult((), (1, 2), 0, 0, needed_by={1: 3, 2: 3})


@contextmanager
def _without(path: Path) -> Iterator[None]:
    """A file is missing, for a while."""
    path.rename(path.with_suffix(".away"))
    yield
    path.with_suffix(".away").rename(path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_of_those_that_wait_only_opaque_values_are_left_that_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(FilesystemStore, "ranged", False)
    with OpenWarehouse.open_writable(str(tmp_path / "apart")) as place:
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
            check_whole(place, visible)
            for waiting in place.catalog.objects.list(NAME):
                if waiting.name.endswith(".NON") and waiting.checkpoint not in visible:
                    with _without(place.warehouse.local.objects / waiting.name):
                        assert failures(place, NAME), f"nobody needs {waiting.name}"
        completed = RegionRun(place, stream("old"), POLICY, parallelism=3).step(rows(8))
        assert completed
        check_whole(place, [7, 8])


def test_a_report_counts_what_waits_in_the_chains_of_others(place: OpenWarehouse) -> None:
    before = {point.record.id: point for point in report_data(place.catalog, NAME).checkpoints}
    delete_checkpoints(place, NAME, IDS)
    after = report_data(place.catalog, NAME).checkpoints
    assert [point.record.id for point in after] == [6, 7, 10, 11, 12]
    assert all(point == before[point.record.id] for point in after)


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
    assert delete_checkpoints(place, NAME, [8, 6, 4]) == DeletionResult((), (4, 6, 8), 0, 0, needed_by=first.needed_by)
    assert delete_checkpoints(place, NAME, [1, 2, 3, 5]).deleted == (1, 2, 3, 4)
    again = delete_checkpoints(place, NAME, [1, 4])
    assert (again.deleted, again.objects, again.needed_by) == ((), 0, {5: 7, 6: 7, 8: 10})
    assert delete_checkpoints(place, NAME, []) == again
    check_whole(place, [7, 9, 10, 11, 12])
