"""What a recovery does not do: give up much by itself, believe a store that answers wrongly, or fence a sound run."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change import recovery_point
from siltstone.change.recover import recover
from siltstone.change.rollback_rules import AUTOMATIC_CHECKPOINTS, explain_refusal
from siltstone.errors import LossRefused, NewerFormat, Unreachable
from siltstone.retention.deletion import delete_checkpoints
from siltstone.store.paths import IDENTITY
from tests.fault.small_stream import SMALL, purchases
from tests.identities import answer_not_found
from tests.proofs import in_order
from tests.region_run import RegionRun

NAME = SMALL.name
CHECKPOINTS = 6
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=3, size_ratio_max=None, space_amplification_max=None))
"""bases at 1 and 5"""


def new_run(place: OpenWarehouse) -> RegionRun:
    return RegionRun(place, SMALL, POLICY)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("limits") / "w"
    with OpenWarehouse.open_writable(str(root)) as place:
        run, rows = new_run(place), purchases()
        for n in range(CHECKPOINTS):
            run.step(rows[n])
        run.region.close("done")
    return root


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Iterator[OpenWarehouse]:
    shutil.copytree(written, tmp_path / "w")
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def manifest(place: OpenWarehouse, checkpoint: int) -> Path:
    return place.warehouse.local.objects / place.catalog.checkpoints.get(NAME, checkpoint).manifest.name


def everything(place: OpenWarehouse) -> tuple[object, ...]:
    catalog = place.catalog
    return (
        catalog.checkpoints.list(NAME),
        catalog.savepoints.list(NAME),
        catalog.runs.list(NAME),
        catalog.rollbacks.list(NAME),
    )


# How much


def test_the_rule() -> None:
    """Never to nothing, never past what people made, never more than three checkpoints."""
    for newest, lost, savepoints, edits in itertools.product(range(7), range(7), [(), ("s",)], [(), (3,)]):
        if lost <= newest:
            to_nothing = lost > 0 and lost == newest
            allowed = not (savepoints or edits or to_nothing or lost > AUTOMATIC_CHECKPOINTS)
            assert (explain_refusal(newest, newest - lost, savepoints, edits) is None) == allowed


@pytest.mark.slow
def test_three_checkpoints_are_given_up_without_being_asked_four_are_not(place: OpenWarehouse) -> None:
    for checkpoint in (6, 5, 4):
        manifest(place, checkpoint).unlink()
    foreseen = recover(place, NAME, run=in_order, dry_run=True)
    assert (foreseen.checkpoint, foreseen.refusal) == (3, None)
    kept = manifest(place, 3).rename(place.warehouse.local.root / "away")
    before = everything(place)
    said = (
        r"restores is checkpoint 2, and going back would lose checkpoints 3 to 6: more than 3 checkpoints.*accept-loss"
    )
    with pytest.raises(LossRefused, match=said):
        recover(place, NAME, run=in_order)
    assert everything(place) == before
    foreseen = recover(place, NAME, run=in_order, dry_run=True)
    assert foreseen.refusal == "more than 3 checkpoints" and "--accept-loss is needed" in foreseen.summary
    kept.rename(manifest(place, 3))
    assert recover(place, NAME, run=in_order).given_up == (4, 5, 6)


@pytest.mark.slow
def test_a_savepoint_is_not_given_up_without_being_asked(place: OpenWarehouse) -> None:
    place.catalog.savepoints.add(NAME, 1, "precious", CHECKPOINTS)
    manifest(place, CHECKPOINTS).unlink()
    before = everything(place)
    with pytest.raises(LossRefused, match="would lose checkpoint 6: savepoint precious"):
        recover(place, NAME, run=in_order)
    assert everything(place) == before
    assert recover(place, NAME, run=in_order, accept_loss=True).savepoints == ("precious",)


@pytest.mark.slow
def test_a_savepoint_that_is_set_under_the_fence_is_seen(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule holds in the transaction that gives up."""
    manifest(place, CHECKPOINTS).unlink()
    confirm = OpenWarehouse.confirm_store

    def set_meanwhile(self: OpenWarehouse) -> None:
        if len(self.catalog.runs.list(NAME)) == 2 and not self.catalog.savepoints.list(NAME):
            self.catalog.savepoints.add(NAME, 2, "late", CHECKPOINTS)
        confirm(self)

    monkeypatch.setattr(OpenWarehouse, "confirm_store", set_meanwhile)
    with pytest.raises(LossRefused, match="savepoint late"):
        recover(place, NAME, run=in_order)
    assert place.catalog.checkpoints.last_id(NAME) == CHECKPOINTS and place.catalog.rollbacks.list(NAME) == []


def test_a_stream_of_one_checkpoint_is_not_given_up_without_being_asked(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = new_run(place)
        run.step(purchases()[0])
        run.region.close("done")
        manifest(place, 1).unlink()
        with pytest.raises(LossRefused, match="is none, and going back would lose checkpoint 1: the whole stream"):
            recover(place, NAME, run=in_order)
        assert recover(place, NAME, run=in_order, accept_loss=True).checkpoint == 0


# A store that answers wrongly


@pytest.mark.parametrize("listed", [True, False], ids=["reads only", "lists too"])
def test_a_spell_of_404s_gives_nothing_up(place: OpenWarehouse, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(place)
    for accept_loss in (False, True):
        with monkeypatch.context() as patch, pytest.raises(Unreachable, match=r"not (trusted|return)"):
            answer_not_found(patch, listed=listed)
            recover(place, NAME, run=in_order, accept_loss=accept_loss)
    assert everything(place) == before
    assert recover(place, NAME, run=in_order).given_up == ()


@pytest.mark.slow
def test_a_spell_of_404s_under_the_fence_gives_nothing_up(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when the loss was found to be small, and the stream is fenced."""
    manifest(place, CHECKPOINTS).unlink()
    before = place.catalog.checkpoints.list(NAME)
    with monkeypatch.context() as patch, pytest.raises(Unreachable):
        answer_not_found(patch, when=lambda: len(place.catalog.runs.list(NAME)) > 1)
        recover(place, NAME, run=in_order, accept_loss=True)
    assert place.catalog.checkpoints.list(NAME) == before and place.catalog.runs.list(NAME)[-1].outcome == "failed"
    assert recover(place, NAME, run=in_order).given_up == (6,)


def test_an_unmounted_volume_gives_nothing_up(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory is where the objects were, while the recovery is at work."""
    before, objects = everything(place), place.warehouse.local.objects
    real = recovery_point.prove_checkpoints

    def unmounted(*arguments: object) -> object:
        if objects.exists():
            objects.rename(objects.with_name("mounted"))
            objects.mkdir()
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(Unreachable, match="does not show the identity"):
        patch.setattr(recovery_point, "prove_checkpoints", unmounted)
        recover(place, NAME, run=in_order, accept_loss=True)
    objects.rmdir()
    objects.with_name("mounted").rename(objects)
    assert everything(place) == before and recover(place, NAME, run=in_order).given_up == ()


def test_a_lost_identity_is_no_reason_to_give_up(place: OpenWarehouse) -> None:
    manifest(place, CHECKPOINTS).unlink()
    (place.warehouse.local.objects / IDENTITY).unlink()
    before = everything(place)
    with pytest.raises(Unreachable):
        recover(place, NAME, run=in_order, accept_loss=True)
    assert everything(place) == before


# Beside a run


def test_beside_a_healthy_run_nobody_is_fenced(place: OpenWarehouse) -> None:
    run = new_run(place)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.failures, done.fenced) == (6, (), (), False)
    completed = run.step(purchases()[CHECKPOINTS])
    assert completed is not None and completed.id == 7
    assert len(place.catalog.runs.list(NAME)) == 2


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_completes_while_it_looks_is_not_lost(
    place: OpenWarehouse, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = new_run(place), iter(purchases()[CHECKPOINTS:])
    real = recovery_point.prove_checkpoints

    def beside_a_run(*arguments: object) -> object:
        run.step(next(rows))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery_point, "prove_checkpoints", beside_a_run)
    done = recover(place, NAME, run=in_order, dry_run=dry_run)
    assert (done.checkpoint, done.given_up, done.failures) == (6, (), ())
    assert place.catalog.checkpoints.last_id(NAME) == 7
    assert run.step(next(rows)) is not None


@pytest.mark.slow
def test_a_dry_run_beside_a_run_tells_only_of_what_it_has_looked_at(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = new_run(place), iter(purchases()[CHECKPOINTS:])
    manifest(place, CHECKPOINTS).unlink()
    real = recovery_point.prove_checkpoints

    def beside_a_run(*arguments: object) -> object:
        run.step(next(rows))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery_point, "prove_checkpoints", beside_a_run)
    done = recover(place, NAME, run=in_order, dry_run=True)
    assert (done.checkpoint, done.given_up) == (5, (6,)) and place.catalog.checkpoints.last_id(NAME) > CHECKPOINTS


@pytest.mark.slow
def test_what_the_run_mends_while_it_looks_is_not_given_up(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is damaged at the first look; then the run completes a base, which needs nothing of it."""
    run, rows = new_run(place), iter(purchases()[CHECKPOINTS:])
    manifest(place, CHECKPOINTS).unlink()
    real, looks = recovery_point.prove_checkpoints, itertools.count()

    def beside_a_run(*arguments: object) -> object:
        while next(looks) >= 2 and place.catalog.checkpoints.last_id(NAME) < 9:
            run.step(next(rows))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery_point, "prove_checkpoints", beside_a_run)
    done = recover(place, NAME, run=in_order)
    assert place.catalog.chains.list_checkpoints(NAME, 9) == [9]
    assert (done.checkpoint, done.given_up, done.fenced) == (9, (), True)


def test_what_retention_deletes_while_it_looks_is_not_damaged(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion that was planned before the lease: what it takes away is no damage."""
    run, rows = new_run(place), purchases()
    real, looked = recovery_point.prove_checkpoints, []

    def beside_retention(*arguments: object) -> object:
        if not looked:
            gone = manifest(place, CHECKPOINTS)
            for lease in place.catalog.leases.list_live(NAME):
                place.catalog.leases.release(lease.id)
            for n in range(CHECKPOINTS, CHECKPOINTS + 3):
                run.step(rows[n])
            delete_checkpoints(place, NAME, range(1, 9))
            assert not gone.exists()
        looked.append(arguments[2])
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery_point, "prove_checkpoints", beside_retention)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.failures, done.fenced) == (9, (), (), False)
    assert looked == [[6], [9]]


# A newer format


def test_a_newer_format_is_no_damage(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(place)

    def newer(*_: object) -> object:
        raise NewerFormat("object small/... has format 9: upgrade siltstone")

    with monkeypatch.context() as patch, pytest.raises(NewerFormat):
        patch.setattr(recovery_point, "prove_checkpoints", newer)
        recover(place, NAME, run=in_order, accept_loss=True)
    assert everything(place) == before
