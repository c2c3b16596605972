"""Names that somebody planted in a store, as if runs of far higher epochs had been at work, end no stream."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.recover import recover
from siltstone.errors import WrongWarehouse
from siltstone.model import MAX_EPOCH
from siltstone.run.take_over import take_over
from siltstone.store.paths import epoch_marks, fork_mark
from tests.proofs import in_order
from tests.tiny_stream import NAME, written


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWarehouse]:
    with written(str(tmp_path_factory.mktemp("marks") / "w")) as stored:
        yield stored.place


def _plant(place: OpenWarehouse, name: str) -> Path:
    planted = place.warehouse.local.objects / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_bytes(b"")
    return planted


@pytest.mark.parametrize(
    "name",
    [f"{epoch_marks(NAME)}99999999", f"{NAME}/99999999/000000000001/x", f"{NAME}/00000001/999999999999/x"],
)
def test_an_epoch_far_above_the_catalog_s_is_refused_and_changes_nothing(place: OpenWarehouse, name: str) -> None:
    """It was taken for a newer run's: the catalog's epoch became 100000000, and the stream was dead for good."""
    planted = [_plant(place, name), _plant(place, fork_mark(NAME, "x"))]
    before = place.catalog.streams.get(NAME), place.catalog.rollbacks.list(NAME)
    with pytest.raises(WrongWarehouse, match=f"object {name} in .*delete it"):
        recover(place, NAME, run=in_order, accept_loss=True)
    assert (place.catalog.streams.get(NAME), place.catalog.rollbacks.list(NAME)) == before
    for path in planted:
        path.unlink()
    check_catalog(place, NAME)
    assert take_over(place, NAME, "a test") == before[0].epoch + 1


def test_of_a_mark_far_above_the_catalog_s_each_command_says_at_once_what_helps(place: OpenWarehouse) -> None:
    """It was said to accept a loss, which was refused then."""
    name = f"{epoch_marks(NAME)}99999999"
    planted = [_plant(place, name), _plant(place, fork_mark(NAME, "x"))]
    before = place.catalog.streams.get(NAME)
    for command in (
        lambda: take_over(place, NAME, "a test"),  # a run
        lambda: recover(place, NAME, run=in_order),
        lambda: recover(place, NAME, run=in_order, dry_run=True),
        lambda: check_catalog(place, NAME),  # a sweep, a deletion, a diagnosis
    ):
        with pytest.raises(WrongWarehouse, match=f"object {name} in .*: find out who did, delete it") as refused:
            command()
        assert "--accept-loss" not in str(refused.value)
    assert place.catalog.streams.get(NAME) == before
    for path in planted:
        path.unlink()
    check_catalog(place, NAME)


@pytest.mark.parametrize("mark", ["9" * 19, "9" * 30, "\u0663" * 3, "\u0663" * 8, "9" * 9])
def test_what_is_no_epoch_s_mark_is_not_taken_for_one(place: OpenWarehouse, mark: str) -> None:
    planted = _plant(place, f"{epoch_marks(NAME)}{mark}")
    check_catalog(place, NAME)
    planted.unlink()


def test_an_epoch_that_no_name_could_hold_is_not_begun(place: OpenWarehouse) -> None:
    before = place.catalog.streams.get(NAME)
    with pytest.raises(WrongWarehouse, match="used up"):
        place.catalog.rollbacks.skip_epochs(NAME, "a test", above=MAX_EPOCH, newest=1)
    assert place.catalog.streams.get(NAME) == before
