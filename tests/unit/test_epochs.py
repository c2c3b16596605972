"""A catalog that was restored from a backup: the store knows writer epochs that it does not, and nothing is lost."""

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.fork import fork
from siltstone.change.recover import recover
from siltstone.errors import Fenced, ObjectExists, UnknownStream, Unreachable, WrongWarehouse
from siltstone.model import StoredObject
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.retention.truncate import truncate
from siltstone.run.definition import definition_of
from siltstone.run.take_over import take_over
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath, epoch_mark, epoch_marks, fork_mark
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, in_order
from tests.region_run import RegionRun
from tests.stored import stream_objects

NAME = SMALL.name
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=3, size_ratio_max=None, space_amplification_max=None))


def run_on(place: OpenWarehouse, first: int, last: int) -> None:
    run, rows = RegionRun(place, SMALL, POLICY), purchases()
    for n in range(first, last + 1):
        run.step(rows[n - 1])
    run.region.close("done")


def marks(place: OpenWarehouse) -> list[str]:
    return [name.removeprefix(epoch_marks(NAME)) for name, _ in place.warehouse.store.list(epoch_marks(NAME))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two checkpoints each; and the catalog as it was between them."""
    root = tmp_path_factory.mktemp("epochs") / "w"
    with OpenWarehouse.open_writable(str(root)) as place:
        run_on(place, 1, 2)
    shutil.copy(root / "catalog.db", root / "backup.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        run_on(place, 3, 4)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "w")
    return tmp_path / "w"


@pytest.fixture
def restored(root: Path) -> Iterator[OpenWarehouse]:
    """The catalog is that of the backup."""
    for path in root.glob("catalog.db*"):
        path.unlink()
    (root / "backup.db").rename(root / "catalog.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        yield place


@pytest.mark.slow
def test_each_epoch_is_marked_and_only_the_newest_mark_stays(root: Path) -> None:
    with OpenWarehouse.open_writable(str(root)) as place:
        assert marks(place) == ["00000002"]
        assert [take_over(place, NAME, "a test") for _ in range(3)] == [3, 4, 5]
        assert marks(place) == ["00000005"]
        assert sweep(place, NAME).deleted == 0 and marks(place) == ["00000005"]
        with pytest.raises(UnknownStream):
            take_over(place, "nothing", "a test")


def test_a_catalog_from_a_backup_is_noticed(restored: OpenWarehouse) -> None:
    catalog, before = restored.catalog, sorted(restored.warehouse.store.list(""))
    runs = catalog.runs.list(NAME)
    said = "writer epochs up to 1 and checkpoints up to 2, the store .*recover small --accept-loss"
    for refused in (
        lambda: recover(restored, NAME, run=in_order),
        lambda: recover(restored, NAME, run=in_order, dry_run=True),
        lambda: sweep(restored, NAME),
        lambda: sweep(restored, NAME, SweepOptions(dry_run=True)),
        lambda: truncate(restored, NAME, RetentionOptions.model_validate({"keep_last": 1})),
        lambda: truncate(restored, NAME, RetentionOptions.model_validate({"keep_last": 1}), dry_run=True),
        lambda: delete_checkpoints(restored, NAME, [1]),
    ):
        with pytest.raises(WrongWarehouse, match=said):
            refused()
    assert sorted(restored.warehouse.store.list("")) == before
    assert catalog.runs.list(NAME) == runs and catalog.checkpoints.last_id(NAME) == 2


def test_a_run_brings_a_catalog_from_a_backup_up_to_the_store(restored: OpenWarehouse) -> None:
    run = RegionRun(restored, SMALL, POLICY)
    assert (run.region.epoch, run.region.completed, run.batches) == (3, 4, 4)
    run.region.close("done")
    assert [each.outcome for each in restored.catalog.runs.list(NAME)] == ["done", "done", "done"]
    assert not failures(restored, NAME) and sweep(restored, NAME, SweepOptions(age_guard=timedelta(0))).deleted == 0


@pytest.mark.slow
def test_the_loss_is_accepted_and_the_stream_goes_on_above_the_stores_epoch(restored: OpenWarehouse) -> None:
    unknown = {name for name, _ in stream_objects(restored.warehouse.store)}
    outputs = [o for output in restored.catalog.outbox.list(NAME) for o in output.objects]
    unknown -= {o.name for o in (*restored.catalog.objects.list(NAME), *outputs)}
    assert unknown
    done = recover(restored, NAME, run=in_order, accept_loss=True)
    assert (done.checkpoint, done.given_up, done.fenced) == (2, (), True)
    [record] = restored.catalog.rollbacks.list(NAME)
    assert (record.epoch, record.checkpoint, record.newest) == (3, 2, 4)
    assert marks(restored) == ["00000003"] and [r.outcome for r in restored.catalog.runs.list(NAME)] == [
        "done",
        "recovered",
    ]
    assert unknown <= {name for name, _ in stream_objects(restored.warehouse.store)}, "kept for people to look at"
    run = RegionRun(restored, SMALL, POLICY)
    assert run.region.epoch == 4 and run.region.oldest_epoch == 3, "working state of unknown runs is not taken over"
    for rows in purchases()[2:4]:
        run.step(rows)
    run.region.close("done")
    assert not failures(restored, NAME)
    assert sweep(restored, NAME, SweepOptions(age_guard=timedelta(0))).deleted == len(unknown)
    assert not failures(restored, NAME)


@pytest.mark.slow
def test_a_backup_that_was_taken_while_the_newest_run_was_at_work(root: Path) -> None:
    """Its newest writer epoch is that of the store."""
    with OpenWarehouse.open_writable(str(root)) as place:
        run, rows = RegionRun(place, SMALL, POLICY), purchases()
        run.step(rows[4])
        with sqlite3.connect(root / "catalog.db") as now, sqlite3.connect(root / "during.db") as backup:
            now.backup(backup)
        check_catalog(place, NAME)
        for n in (5, 6, 7):
            run.step(rows[n])
        run.region.close("done")
    with OpenWarehouse.open_writable(str(root), f"sqlite:///{root}/during.db") as place:
        assert (place.catalog.checkpoints.last_id(NAME), place.catalog.streams.get(NAME).epoch, marks(place)) == (
            5,
            3,
            ["00000003"],
        )
        with pytest.raises(WrongWarehouse, match="epochs up to 3 and checkpoints up to 5, the store has"):
            sweep(place, NAME)
        assert recover(place, NAME, run=in_order, accept_loss=True).checkpoint == 5
        [record] = place.catalog.rollbacks.list(NAME)
        assert (record.epoch, record.checkpoint, record.newest) == (4, 5, 8)
        run_on(place, 6, 8)
        assert not failures(place, NAME)


def test_a_run_that_goes_on_meanwhile_is_no_sign_of_a_backup(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenWarehouse.open_writable(str(root)) as place:
        run, rows = RegionRun(place, SMALL, POLICY), iter(purchases()[4:])
        names = FilesystemStore.list

        def beside_a_run(self: FilesystemStore, prefix: str) -> Iterator[tuple[str, int]]:
            if prefix.endswith("manifest.arrow") and place.catalog.checkpoints.last_id(NAME) < 8:
                run.step(next(rows))
                run.step(next(rows))
            return names(self, prefix)

        with monkeypatch.context() as patch:
            patch.setattr(FilesystemStore, "list", beside_a_run)
            check_catalog(place, NAME)
        assert place.catalog.checkpoints.last_id(NAME) == 8


def test_stopped_while_it_goes_on_above_the_stores_epoch(
    restored: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between catalog and store."""
    put = FilesystemStore.put

    def stopped(self: FilesystemStore, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        if name.startswith(epoch_marks(NAME)):
            raise KeyboardInterrupt
        return put(self, name, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FilesystemStore, "put", stopped)
        recover(restored, NAME, run=in_order, accept_loss=True)
    assert marks(restored) == ["00000002"] and restored.catalog.streams.get(NAME).epoch == 3
    run = RegionRun(restored, SMALL, POLICY)
    assert (run.region.epoch, run.region.oldest_epoch) == (4, 3)
    assert marks(restored) == ["00000004"]


@pytest.mark.slow
def test_a_stream_without_checkpoints_in_the_backup(tmp_path: Path) -> None:
    root = tmp_path / "w"
    with OpenWarehouse.open_writable(str(root)) as place:
        place.catalog.streams.register(NAME, SMALL.max_parallelism, definition_of(SMALL, {}))
    shutil.copy(root / "catalog.db", root / "backup.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        run_on(place, 1, 2)
    for path in root.glob("catalog.db*"):
        path.unlink()
    (root / "backup.db").rename(root / "catalog.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        with pytest.raises(WrongWarehouse):
            check_catalog(place, NAME)
        assert recover(place, NAME, run=in_order, accept_loss=True).checkpoint == 0
        run_on(place, 1, 2)
        assert not failures(place, NAME)


def test_two_catalogs_that_write_to_one_store(root: Path) -> None:
    """A copied catalog without an identity of its own: both begin the same epoch, and one is refused."""
    shutil.copy(root / "catalog.db", root / "copy.db")
    with (
        OpenWarehouse.open_writable(str(root)) as place,
        OpenWarehouse.open_writable(str(root), f"sqlite:///{root}/copy.db") as copy,
    ):
        put = FilesystemStore.put

        def begun_meanwhile(self: FilesystemStore, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
            if name == epoch_mark(NAME, 3):
                put(self, name, b"by the other")
            return put(self, name, data)

        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(WrongWarehouse, match="by another catalog"),
        ):
            patch.setattr(FilesystemStore, "put", begun_meanwhile)
            take_over(copy, NAME, "the copy")
        assert copy.catalog.runs.list(NAME)[-1].outcome is None, "as after a crash: its mark is another's"
        check_catalog(copy, NAME)
        assert take_over(place, NAME, "the original") == 4, "above the mark of the other, which did nothing"


@pytest.mark.parametrize("error", [Unreachable("the store is away"), KeyboardInterrupt(), ObjectExists("it is there")])
@pytest.mark.slow
def test_an_epoch_without_a_mark_does_nothing(
    root: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenWarehouse.open_writable(str(root)) as place:

        def failed(*_: object) -> StoredObject:
            raise error

        with monkeypatch.context() as patch, pytest.raises((type(error), WrongWarehouse)):
            patch.setattr(FilesystemStore, "put", failed)
            RegionRun(place, SMALL, POLICY)
        assert marks(place) == ["00000002"] and place.catalog.runs.list(NAME)[-1].outcome is None
        run_on(place, 5, 5)
        assert marks(place) == ["00000004"] and not failures(place, NAME)


def test_a_frozen_writer_that_marks_its_epoch_anew_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the catalog is frozen before its mark; meanwhile the epoch is marked by the other catalog, which then
    begins the next one and deletes that mark. Seen: the copy wrote its mark, and nothing refused it."""
    shutil.copy(root / "catalog.db", root / "copy.db")
    put, begun = FilesystemStore.put, list[int]()

    def frozen(self: FilesystemStore, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        if not begun and name == epoch_mark(NAME, 3):
            begun.append(0)
            with OpenWarehouse.open_writable(str(root)) as place:
                begun.extend(take_over(place, NAME, "the original") for _ in range(2))
        return put(self, name, data)

    with OpenWarehouse.open_writable(str(root), f"sqlite:///{root}/copy.db") as copy:
        with monkeypatch.context() as patch, pytest.raises(WrongWarehouse, match=r"epoch 4 .* by another catalog"):
            patch.setattr(FilesystemStore, "put", frozen)
            take_over(copy, NAME, "the copy")
        assert begun == [0, 3, 4] and copy.catalog.runs.list(NAME)[-1].outcome == "failed"
        assert "00000004" in marks(copy)


def test_a_late_writer_deletes_no_newer_mark(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen between its mark and the deletion of older ones, while others begin epochs."""
    delete, begun = FilesystemStore.delete, []

    def frozen(self: FilesystemStore, names: list[str]) -> None:
        if not begun:
            begun.append(1)
            with OpenWarehouse.open_existing(str(root)) as other:
                take_over(other, NAME, "another")
        delete(self, names)

    with OpenWarehouse.open_writable(str(root)) as place:
        with monkeypatch.context() as patch, pytest.raises(Fenced):
            patch.setattr(FilesystemStore, "delete", frozen)
            take_over(place, NAME, "late")
        assert marks(place) == ["00000004"]
        check_catalog(place, NAME)


# Forks

FORK = replace(SMALL, name="what-if")


def forked(root: Path) -> list[str]:
    """Restore a backup that does not know of a fork which was made, and has run, since; all names in the store."""
    shutil.copy(root / "catalog.db", root / "backup.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        fork(place, NAME, FORK.name)
        run = RegionRun(place, FORK, POLICY)
        run.step(purchases()[4])
        run.region.close("done")
        names = [name for name, _ in place.warehouse.store.list("")]
    (root / "catalog.db").rename(root / "newer.db")
    (root / "backup.db").rename(root / "catalog.db")
    return names


def accepted(place: OpenWarehouse, stream: str) -> None:
    assert recover(place, stream, run=in_order, accept_loss=True).fenced


@pytest.mark.slow
def test_nothing_of_a_fork_that_the_backup_does_not_know_is_deleted(root: Path) -> None:
    """It shares objects with the stream it was made from, whose writer epochs the backup knows all of."""
    names, keep_one = forked(root), RetentionOptions.model_validate({"keep_last": 1})
    with OpenWarehouse.open_writable(str(root)) as place:
        for refused in (
            lambda: RegionRun(place, SMALL, POLICY),
            lambda: recover(place, NAME, run=in_order),
            lambda: sweep(place, NAME),
            lambda: truncate(place, NAME, keep_one),
            lambda: truncate(place, NAME, keep_one, dry_run=True),
            lambda: delete_checkpoints(place, NAME, [1]),
            lambda: fork(place, NAME, "another"),
        ):
            with pytest.raises(WrongWarehouse, match=r"not know what-if, made from stream small, .*--accept-loss"):
                refused()
        assert [name for name, _ in place.warehouse.store.list("")] == names
    with OpenWarehouse.open_writable(str(root), f"sqlite:///{root}/newer.db") as place:
        assert not failures(place, FORK.name)


@pytest.mark.slow
def test_a_stream_of_the_name_of_an_unknown_fork_overwrites_and_sweeps_nothing_of_it(root: Path) -> None:
    names = forked(root)
    with OpenWarehouse.open_writable(str(root)) as place:
        accepted(place, NAME)
        place.catalog.rollbacks.skip_epochs(
            NAME, "a test", above=90, newest=4
        )  # a fork made now would have newer epochs
        with pytest.raises(WrongWarehouse, match=r"holds a stream what-if that the catalog .* does not know"):
            fork(place, NAME, FORK.name)
        for _ in range(2):
            with pytest.raises(WrongWarehouse, match="holds another stream what-if, a fork of small: run the stream"):
                RegionRun(place, FORK, POLICY)
        sweep(place, NAME, SweepOptions(age_guard=timedelta(0)))
        theirs = {name for name in names if name.startswith(f"{FORK.name}/")}
        assert theirs and theirs <= {name for name, _ in place.warehouse.store.list("")}
        accepted(place, FORK.name)
        run = RegionRun(place, FORK, POLICY)
        run.step(purchases()[0])
        assert not failures(place, FORK.name) and not failures(place, NAME)
        assert theirs <= {name for name, _ in place.warehouse.store.list("")}, "kept for people to look at"


def test_a_new_stream_is_not_begun_over_objects_from_before_there_were_marks(tmp_path: Path) -> None:
    old = CheckpointPath(NAME, 1, 1).manifest()
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        place.warehouse.store.put(old, b"of another stream")
        with pytest.raises(WrongWarehouse, match="epochs up to 0 and checkpoints up to 0, the store has newer"):
            RegionRun(place, SMALL, POLICY)
        accepted(place, NAME)
        run_on(place, 1, 1)
        assert old in {name for name, _ in place.warehouse.store.list("")} and not failures(place, NAME)


def test_forks_of_forks_are_marked_for_all_that_they_share_with(root: Path) -> None:
    with OpenWarehouse.open_writable(str(root)) as place:
        fork(place, NAME, "once")
        fork(place, "once", "twice")
        assert marks(place) == ["00000002", "fork-once", "fork-twice"]
        assert [name for name, _ in place.warehouse.store.list(epoch_marks("once"))] == [fork_mark("once", "twice")]
        check_catalog(place, NAME)
        check_catalog(place, "once")
        place.warehouse.store.put(fork_mark(NAME, "thrice"), b"")
        place.catalog.streams.register("thrice", SMALL.max_parallelism, definition_of(SMALL, {}))
        with pytest.raises(WrongWarehouse, match="does not know thrice"):
            check_catalog(place, NAME)  # a stream of that name is no fork of it


def test_a_fork_that_could_not_be_marked_is_marked_by_its_first_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> StoredObject:
        raise Unreachable("the store is away")

    with OpenWarehouse.open_writable(str(root)) as place:
        with monkeypatch.context() as patch:
            patch.setattr(FilesystemStore, "put", away)
            fork(place, NAME, FORK.name)
        assert marks(place) == ["00000002"]
        RegionRun(place, FORK, POLICY)
        assert marks(place) == ["00000002", f"fork-{FORK.name}"]


def test_a_fork_has_marks_of_its_own(root: Path) -> None:
    with OpenWarehouse.open_writable(str(root)) as place:
        fork(place, NAME, "fork")
        assert take_over(place, "fork", "a test") == 3
        assert marks(place) == ["00000002", "fork-fork"]
        check_catalog(place, NAME)
        check_catalog(place, "fork")
