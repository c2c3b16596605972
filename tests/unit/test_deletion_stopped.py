"""A deletion that is stopped or fenced, or that meets another: store and catalog agree, and the next completes it."""

import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, Unreachable
from siltstone.retention.deletion import delete_checkpoints
from siltstone.store.filesystem import FilesystemStore
from tests.deletion_cases import IDS, firsts, needed, write_checkpoints
from tests.proofs import check_whole, failures
from tests.stops import Stop, killed_while_deleting, stop
from tests.stored import stream_objects
from tests.sums import NAME


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with 12 checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("deletion") / "w")


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


def check_stopped(place: OpenWarehouse) -> None:
    """After a deletion of IDS that did not end: what is to be seen proves, and what is left of the rest is known."""
    recorded = place.catalog.checkpoints.list(NAME)
    assert [c.id for c in recorded] == [6, 7, 10, 11, 12]
    assert not failures(place, NAME)
    stored = {name for name, _ in stream_objects(place.warehouse.store)}
    assert stored <= {o.name for o in place.catalog.objects.list(NAME)}


AGAIN = (IDS, [], [6])
"""what the next deletion is asked for: the same again, nothing more, another"""


@pytest.mark.slow
@pytest.mark.parametrize("turns", [(0,), pytest.param((1, 2), marks=pytest.mark.thorough)])
def test_stopped_in_the_store_it_is_completed_by_the_next(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: Sequence[int]
) -> None:
    """Wherever it is stopped, by one kind of deletion after the other; by all of them in `make test-thorough`."""
    for turn in turns:
        stop_at_each_delete(written, tmp_path / str(turn), monkeypatch, turn)


def stop_at_each_delete(written: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    deletes, total = 0, 1
    while deletes < total:
        again = AGAIN[(deletes + turn) % len(AGAIN)]
        root = directory / f"w{deletes}"
        shutil.copytree(written, root)
        with OpenWarehouse.open_writable(str(root)) as place:
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


DELETE = (
    "from siltstone.retention.deletion import delete_checkpoints; "
    "delete_checkpoints(place, stream, [int(id) for id in ids])"
)


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [0, 3])
def test_killed_it_is_completed_by_the_next(place: OpenWarehouse, deletes: int) -> None:
    ended = killed_while_deleting(DELETE, place.warehouse.local.root, deletes, NAME, *IDS)
    assert ended == -signal.SIGKILL
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
