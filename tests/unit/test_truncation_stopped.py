"""A truncation that is stopped or fenced, or that meets another: store and catalog agree, and the next completes it."""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.objects import Objects
from siltstone.catalog.records.savepoints import Savepoints
from siltstone.catalog.records.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import drop_savepoint, set_savepoint
from siltstone.retention.truncate import Truncation, truncate
from siltstone.store.filesystem import FilesystemStore
from tests.clock import Clock
from tests.places import place_at
from tests.proofs import check_whole, failures
from tests.retention_cases import DAILY, LAST, friday, visible, write_checkpoints
from tests.stops import Stop
from tests.stored import stream_objects
from tests.sums import NAME


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with 14 checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("retention") / "w")


@pytest.fixture
def clock() -> Clock:
    """Eight hours after the newest checkpoint."""
    return friday()


CALLS = (
    (Checkpoints, "list_retained"),
    (Savepoints, "list"),
    (Deletions, "mark"),
    (Objects, "list"),
    (Tombstones, "record_deletion"),
    (Deletions, "forget"),
)


def stop_at(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Let so many calls of the catalog and deletions of single objects happen, and then the end."""
    left = [calls]

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **named: object) -> object:
            if left[0] == 0:
                raise Stop
            left[0] -= 1
            return call(*arguments, **named)

        return wrapped

    for part, name in CALLS:
        patch.setattr(part, name, counted(getattr(part, name)))
    delete = counted(FilesystemStore.delete)

    def one_by_one(store: FilesystemStore, names: Iterable[str]) -> None:
        for name in names:
            delete(store, [name])

    patch.setattr(FilesystemStore, "delete", one_by_one)


@pytest.mark.slow
def test_stopped_anywhere_it_is_completed_by_the_next(
    written: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, ended = 0, False
    while not ended:
        shutil.copytree(written, tmp_path / f"w{calls}")
        with place_at(tmp_path / f"w{calls}", clock) as place:
            set_savepoint(place.catalog, NAME, "stable", at="2")
            with monkeypatch.context() as patch:
                stop_at(patch, calls)
                try:
                    truncate(place, NAME, DAILY)
                    ended = True
                except Stop:
                    pass
            names = {name for name, _ in stream_objects(place.warehouse.store)}
            assert names <= {o.name for o in place.catalog.objects.list(NAME)}
            assert visible(place) in (list(range(1, 15)), [2, 9, 12, 14])
            assert not failures(place, NAME)
            done = truncate(place, NAME, DAILY)
            assert [k.checkpoint for k in done.kept] == [2, 9, 12, 14]
            check_whole(place, [2, 9, 12, 14])
            assert truncate(place, NAME, DAILY).objects == 0
        calls += 1
    assert calls > len(CALLS) + 6


# Other writers


@pytest.mark.slow
@pytest.mark.parametrize(("part", "method"), CALLS[:3] + CALLS[4:5])
def test_whoever_is_fenced_deletes_nothing(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    """Also who was paused before it decided anything: what it decides is by what it had read."""
    call = getattr(part, method)

    def too_late(asked: object, *arguments: object, **named: object) -> object:
        monkeypatch.setattr(part, method, call)
        place.catalog.runs.begin(NAME, "another run")
        return call(asked, *arguments, **named)

    before = sorted(stream_objects(place.warehouse.store))
    monkeypatch.setattr(part, method, too_late)
    with pytest.raises(Fenced):
        truncate(place, NAME, LAST)
    assert sorted(stream_objects(place.warehouse.store)) == before
    check_whole(place, [13, 14] if method == "record_deletion" else range(1, 15))
    truncate(place, NAME, LAST)
    check_whole(place, [13, 14])


@pytest.mark.parametrize("method", ["add", "drop"])
def test_whoever_is_fenced_names_nothing(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    set_savepoint(place.catalog, NAME, "stable", at="2")
    call, before = getattr(Savepoints, method), place.catalog.savepoints.list(NAME)

    def too_late(savepoints: Savepoints, *arguments: object) -> object:
        place.catalog.runs.begin(NAME, "another run")
        return call(savepoints, *arguments)

    change = {
        "add": lambda c: set_savepoint(c, NAME, "new"),
        "drop": lambda c: drop_savepoint(c, NAME, "stable"),
    }
    with monkeypatch.context() as patch, pytest.raises(Fenced):
        patch.setattr(Savepoints, method, too_late)
        change[method](place.catalog)
    assert place.catalog.savepoints.list(NAME) == before
    change[method](place.catalog)
    assert len(place.catalog.savepoints.list(NAME)) == (2 if method == "add" else 0)


def test_two_truncations_at_once_keep_what_both_keep(place: OpenWarehouse, clock: Clock) -> None:
    start = Barrier(2, timeout=60)

    def one(options: RetentionOptions) -> Truncation:
        with place_at(place.warehouse.local.root, clock) as own:
            start.wait()
            return truncate(own, NAME, options)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, [DAILY, RetentionOptions(keep_last=3)]))
    assert all(14 in {k.checkpoint for k in result.kept} for result in results)
    truncate(place, NAME, RetentionOptions())
    # One that looks after the other has marked keeps the last three of what is left.
    assert visible(place) in ([12, 14], [9, 12, 14])
    check_whole(place, visible(place))
