"""Sweeps that are stopped, killed, overtaken or doubled, and streams at work meanwhile: nothing referenced is lost."""

import itertools
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.commits import Commits
from siltstone.catalog.records.references import References
from siltstone.catalog.records.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, StateError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.run import pending
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath, extract_prefix
from tests.examples import is_thorough
from tests.orphans import Injected, check_whole, filesystem, inject, new_run, referenced, stored, write
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.stops import Stop, killed_while_deleting, stop
from tests.sums import NAME, rows

NO_GUARD = SweepOptions(age_guard=timedelta(0))


def check_stopped(place: OpenWarehouse, injected: Injected) -> None:
    """A sweep that did not end: all checkpoints prove, and what is gone is an orphan and was written down."""
    assert not failures(place, NAME)
    gone = injected.orphans - stored(place)
    assert stored(place) == (referenced(place) | injected.orphans | injected.kept) - gone
    assert gone <= {d.name for d in place.catalog.tombstones.list(NAME)}


def check_completed(place: OpenWarehouse, injected: Injected) -> None:
    """After the sweep that completes it."""
    sweep(place, NAME)
    check_whole(place, *injected.kept)
    recorded = [d.name for d in place.catalog.tombstones.list(NAME)]
    assert sorted(recorded) == sorted(injected.orphans)


def one_by_one(patch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Let the store delete objects one by one, and call `before` with the name of each, except for extracts."""
    delete = FilesystemStore.delete

    def deleting(self: FilesystemStore, names: Iterable[str]) -> None:
        for name in names:
            if not name.startswith(extract_prefix(NAME)):
                before(name)
            delete(self, [name])

    patch.setattr(FilesystemStore, "delete", deleting)


# Stopped


@pytest.mark.slow
def test_stopped_after_any_delete_it_is_completed_by_the_next(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place)
    injected = inject(place)
    for deletes in range(len(injected.orphans)):
        left = itertools.count(deletes, -1)

        def stop_after(name: str, left: Iterator[int] = left) -> None:
            assert name in {d.name for d in place.catalog.tombstones.list(NAME)}, "written down before it happens"
            if next(left) == 0:
                raise Stop

        with monkeypatch.context() as patch, pytest.raises(Stop):
            one_by_one(patch, stop_after)
            sweep(place, NAME)
        check_stopped(place, injected)
        for name in injected.orphans - stored(place):  # for the next round
            place.warehouse.store.put(name, name.encode())
    check_completed(place, injected)


@pytest.mark.parametrize(
    ("part", "method"), [(Checkpoints, "get_latest"), (References, "view"), (Tombstones, "record_orphans")]
)
def test_stopped_at_the_catalog_it_is_completed_by_the_next(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    write(place)
    injected = inject(place)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(part, method, stop)
        sweep(place, NAME)
    check_stopped(place, injected)
    assert injected.orphans <= stored(place)
    check_completed(place, injected)


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [0, 4])
def test_killed_it_is_completed_by_the_next(place: OpenWarehouse, deletes: int) -> None:
    run = write(place)
    injected = inject(place)
    sweep_it = "from siltstone.retention.sweep import sweep; sweep(place, stream)"
    assert killed_while_deleting(sweep_it, place.warehouse.local.root, deletes, NAME) == -signal.SIGKILL
    assert len(injected.orphans - stored(place)) == deletes
    check_stopped(place, injected)
    check_completed(place, injected)
    assert run.step(rows(6))


# Others at work


class Moments:
    """Calls `action` at one moment of a sweep: before or after one of its calls of the catalog or the store."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, action: Callable[[], object]) -> None:
        self.patch, self.left, self.action, self.reached = patch, at, action, ""
        for kind, names in (
            (References, ("view",)),
            (Tombstones, ("record_orphans",)),
            (FilesystemStore, ("list_unfinished", "list", "modified_at", "delete")),
        ):
            for name in names:
                patch.setattr(kind, name, self._around(name, getattr(kind, name)))

    def _around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            self._moment(f"before {name}")
            if name in {"list", "list_unfinished"}:
                return self._through(name, method(*arguments))
            if name == "delete":
                store, names = arguments
                for some in (names[:1], names[1:4], names[4:]):
                    method(store, some)
                    self._moment(f"after the deletion of {len(some)}")
                return None
            answer = method(*arguments)
            self._moment(f"after {name}")
            return answer

        return called

    def _through(self, name: str, found: Iterable[Any]) -> Iterator[Any]:
        for number, each in enumerate(found):
            if number == 9:
                self._moment(f"amid {name}")
            yield each
        self._moment(f"after {name}")

    def _moment(self, name: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.patch.undo()
            self.reached = name
            self.action()


def _snapshot(place: OpenWarehouse) -> None:
    """What `siltstone snapshot` does: objects named after the run that wrote the checkpoint."""
    epoch, newest = place.catalog.streams.get(NAME).epoch, place.catalog.checkpoints.get_latest(NAME)
    with hold_lease(place.catalog, NAME, [newest.id]):
        name = CheckpointPath(NAME, newest.epoch, newest.id).snapshot("by_key", "totals", 0, "s1")
        written = place.warehouse.store.put(name, b"rows")
        place.catalog.reference_copies.add(NAME, epoch, newest.id, [written], 1)


def _lose(place: OpenWarehouse) -> None:
    for n, checkpoint in enumerate((4, 5, 6)):
        place.warehouse.store.put(CheckpointPath(NAME, 2, checkpoint).segment(f"late{n}"), b"x")


ACTIONS: dict[str, Callable[[OpenWarehouse, RegionRun], object]] = {
    "the run completes two checkpoints": lambda place, run: (run.step(rows(6)), run.step(rows(7))),
    "a new run takes over": lambda place, run: new_run(place).step(rows(6)),
    "the run ends": lambda place, run: run.region.close("done"),
    "checkpoints are deleted": lambda place, run: delete_checkpoints(place, NAME, [1, 2, 3]),
    "attempts lose": lambda place, run: _lose(place),
    "a snapshot is taken": lambda place, run: _snapshot(place),
    "another sweep": lambda place, run: sweep(place, NAME, NO_GUARD),
}


@pytest.fixture(scope="module")
def injected_into(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Injected]:
    root = tmp_path_factory.mktemp("sweeps")
    with filesystem(root) as place:
        write(place).region.check_fence()
        return root / "w", inject(place)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIONS)
def test_whatever_happens_at_any_moment_of_a_sweep_no_referenced_object_is_lost(
    injected_into: tuple[Path, Injected], tmp_path: Path, name: str
) -> None:
    (source, injected), moments = injected_into, []
    every = 4 if is_thorough() else 11
    # Not every moment, beginning with another for each action.
    for at in itertools.count(list(ACTIONS).index(name) % every, every):
        root = tmp_path / f"w{at}"
        shutil.copytree(source, root)
        with OpenWarehouse.open_writable(str(root)) as place, pytest.MonkeyPatch.context() as patch:
            # Nobody is at work but this run, which goes on: epoch 2 of the copy is taken over by epoch 3.
            run = new_run(place)
            moment = Moments(patch, at, lambda place=place, run=run: ACTIONS[name](place, run))
            sweep(place, NAME, NO_GUARD)
            patch.undo()
            assert not failures(place, NAME), moment.reached
            assert referenced(place) <= stored(place), moment.reached
            gone = {d.name for d in place.catalog.tombstones.list(NAME) if d.reason != "of a deleted checkpoint"}
            assert not gone & referenced(place)
            new_run(place)
            sweep(place, NAME, NO_GUARD)
            others = {n for n in injected.kept if n in stored(place)}
            check_whole(place, *others)
            assert others >= {*injected.strange}
        shutil.rmtree(root)
        if not moment.reached:
            break
        moments.append(moment.reached)
    assert len(moments) >= 3, moments


@pytest.mark.slow
@pytest.mark.parametrize("options", [SweepOptions(), SweepOptions(incomplete=True), NO_GUARD], ids=str)
def test_a_sweep_at_any_moment_of_a_step(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, options: SweepOptions
) -> None:
    """By the age guard what the step writes is kept. Without one it may go, and then the step completes nothing."""
    write(place)
    outcomes, n = [], 6
    for at in itertools.count():
        run, left = new_run(place), itertools.count(at, -1)

        def sweeping(left: Iterator[int] = left) -> None:
            if next(left) == 0:
                sweep(place, NAME, options)

        with monkeypatch.context() as patch:
            for kind, method in ((FilesystemStore, "put"), (Commits, "add")):
                patch.setattr(kind, method, _swept_around(getattr(kind, method), sweeping))
            try:
                completed = run.step(rows(n))
                outcomes.append(True)
                assert completed
                n += 1
            except StateError as error:
                assert "was deleted by" in str(error)
                outcomes.append(False)
        assert not failures(place, NAME)
        assert referenced(place) <= stored(place)
        if next(left) > 0:
            break
    assert len(outcomes) > 4
    assert all(outcomes) == (options is not NO_GUARD)


def _swept_around(method: Callable[..., Any], sweeping: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        sweeping()
        answer = method(*arguments)
        sweeping()
        return answer

    return called


def test_a_run_fenced_while_its_checkpoint_is_swept_completes_nothing(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = write(place), pending.store_manifest

    def too_late(*arguments: Any) -> Any:
        new_run(place)
        assert sweep(place, NAME).deleted
        return store(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Fenced):
        patch.setattr(pending, "store_manifest", too_late)
        run.step(rows(6))
    check_whole(place, CheckpointPath(NAME, run.region.epoch, 6).manifest())
    assert sweep(place, NAME).deleted == 1
    assert new_run(place).step(rows(6))


@pytest.mark.slow
def test_a_stream_runs_on_while_it_is_swept_and_thinned_out(place: OpenWarehouse) -> None:
    run, lost, swept = write(place), [], 0

    def steps() -> None:
        for n in range(6, 20):
            path = CheckpointPath(NAME, run.region.epoch, run.region.checkpoint)
            lost.append(place.warehouse.store.put(path.base("by_key", "totals", 0, f"lost{n}"), b"x").name)
            assert run.step(rows(n))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(steps)
        for number in itertools.count():
            swept += sweep(place, NAME, SweepOptions(incomplete=number % 3 == 2)).deleted
            newest = place.catalog.checkpoints.last_id(NAME)
            delete_checkpoints(place, NAME, range(max(1, newest - 12), newest - 6))
            if running.done():
                break
        running.result()
    run.region.close("done")
    assert swept > 2
    assert swept + sweep(place, NAME).deleted == len(lost)
    check_whole(place)


def test_two_sweeps_at_once_delete_what_one_does(place: OpenWarehouse) -> None:
    write(place)
    injected = inject(place)
    start = threading.Barrier(2, timeout=60)

    def swept() -> int:
        with OpenWarehouse.open_existing(str(place.warehouse.local.root)) as own:
            start.wait()
            return sweep(own, NAME).deleted

    with ThreadPoolExecutor(2) as pool:
        done = [future.result() for future in [pool.submit(swept) for _ in range(2)]]
    assert max(done) == len(injected.orphans)
    check_completed(place, injected)
