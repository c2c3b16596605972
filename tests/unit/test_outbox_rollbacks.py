"""The outbox after a rollback: what comes again comes under its id with its rows, and new rows come under new ids."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.steps import StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, LossRefused, StateError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.run.step_digests import INPUT_CHANGED
from siltstone.store.filesystem import FilesystemStore
from tests.outbox_run import NAME, Heard, Outboxed, batch, damage, follow_log, inputs, outstanding, roll_back, write
from tests.proofs import failures, in_order
from tests.rebuild_cases import catalog_url, check_same, rebuilt, what_it_knows


def test_what_was_delivered_is_not_delivered_again_after_a_rollback(place: OpenWarehouse, heard: Heard) -> None:
    write(place, heard, 3)
    roll_back(place, 1)
    run = Outboxed(place, heard)
    follow_log(run)
    assert (run.region.completed, heard.ids) == (3, [1, 2, 3])
    run.step(batch(4))
    assert heard.ids == [1, 2, 3, 4] and heard.inputs == inputs([1, 2, 3, 4])


def test_a_rollback_delivers_what_is_outstanding_of_what_it_gave_up(place: OpenWarehouse, heard: Heard) -> None:
    write(place, heard, 1)
    run = Outboxed(place, Heard(), delivers=False)
    run.step(batch(2))
    run.step(batch(3))
    roll_back(place, 1)
    sweep(place, NAME)
    assert outstanding(place) == [2, 3], "a rollback and a sweep leave it"
    run = Outboxed(place, heard)
    assert heard.ids == [1, 2, 3], "before a step is made again"
    follow_log(run)
    run.step(batch(4))
    assert heard.ids == [1, 2, 3, 4] and heard.inputs == inputs([1, 2, 3, 4])


@pytest.mark.parametrize("accept", [True, False])
def test_logged_steps_that_cannot_come_again_are_given_up_with_their_ids(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, accept: bool
) -> None:
    """One output of theirs is outstanding. Only a run that has found the difference lets a recovery give them up."""
    write(place, heard, 4)
    Outboxed(place, Heard(), delivers=False).step(batch(5))
    roll_back(place, 3)
    recover_ = partial(recover, place, NAME, run=in_order, accept_loss=accept)
    assert not recover_().logged and len(place.catalog.input_log.list_logged(NAME)) == 2
    run = Outboxed(place, Heard(), delivers=False)
    run.region.close(INPUT_CHANGED)
    if not accept:
        with pytest.raises(LossRefused, match=r"the logged steps of checkpoints 4 to 5 cannot be run again"):
            recover_()
        assert outstanding(place) == [5]
        return
    Outboxed(place, Heard(), delivers=False).region.close("done")  # the input is back, for this one
    assert not recover_().logged
    Outboxed(place, Heard(), delivers=False).region.close(INPUT_CHANGED)
    assert recover_().logged == (4, 5) and not recover_().logged
    assert place.catalog.input_log.list_logged(NAME) == [] and outstanding(place) == []
    run = Outboxed(place, heard)
    run.batches = 3
    for n in (14, 15, 16):
        run.step(batch(n))
    assert heard.ids == [1, 2, 3, 4, 6, 7, 8] and heard.inputs == inputs([1, 2, 3, 4, 14, 15, 16])
    run.region.close("done")
    known = what_it_knows(place.catalog)
    check_same(rebuilt(place, catalog_url(tmp_path))[1], known)
    assert not failures(place, NAME)


@pytest.mark.parametrize(("kind", "again"), [(StepKind.EMPTY, 3), (StepKind.CHANGE, 2)])
def test_a_step_without_rows_is_made_again_but_not_a_change_that_nothing_follows(
    place: OpenWarehouse, heard: Heard, kind: StepKind, again: int
) -> None:
    """Neither was delivered; taken for one that was, the rows of the next would be lost."""
    write(place, heard, 2).step_without_rows(kind)
    roll_back(place, 1)
    run = Outboxed(place, heard)
    follow_log(run)
    assert run.region.completed == again
    run.step(batch(3))
    assert heard.ids == [1, 2, again + 1] and heard.inputs == inputs([1, 2, 3])


def test_a_change_in_between_is_made_again(place: OpenWarehouse, heard: Heard) -> None:
    run = write(place, heard, 1)
    run.step_without_rows(StepKind.CHANGE)
    digest = [run.step(batch(2)), run.region.digest][1]
    roll_back(place, 1)
    again = Outboxed(place, heard)
    follow_log(again)
    assert again.region.completed == 3 and again.region.digest == digest
    assert heard.ids == [1, 3] and heard.inputs == inputs([1, 2])


def begin_anew(place: OpenWarehouse, run: Outboxed) -> None:
    """Give up a stream of which the oldest input is not known any more."""
    newest = run.region.completed
    delete_checkpoints(place, NAME, range(1, newest - 1))
    place.catalog.input_log.prune(NAME, run.region.epoch, at_least=1)
    roll_back(place, 0)


@pytest.mark.slow
def test_sinks_know_new_rows_by_new_ids_where_what_they_have_was_lost_for_good(
    place: OpenWarehouse, heard: Heard
) -> None:
    """A sink that skips ids it has would lose the rows of a stream that begins anew."""
    begin_anew(place, write(place, heard, 5))
    run = Outboxed(place, heard)
    assert run.region.logged_steps() == []
    for n in (6, 7, 8):
        run.step(batch(n))
    assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [1, 2, 3] and failures(place, NAME) == []
    assert heard.ids == [1, 2, 3, 4, 5, 6, 7, 8] and heard.inputs == inputs(range(1, 9))
    roll_back(place, 1)
    run = Outboxed(place, heard)
    run.step(batch(7))
    run.step(batch(8))
    run.step(batch(9))
    assert heard.ids == [1, 2, 3, 4, 5, 6, 7, 8, 9], "what the log has comes again as ever"
    begin_anew(place, run)
    Outboxed(place, heard).step(batch(10))
    assert heard.ids[-1] == 10 and heard.inputs == inputs(range(1, 11))


def test_what_is_outstanding_of_a_stream_that_begins_anew_holds_nothing_up(place: OpenWarehouse, heard: Heard) -> None:
    """Its input is read again."""
    run = write(place, Heard(), 5, delivers=False)
    damage(place, 4)
    begin_anew(place, run)
    run = Outboxed(place, heard)
    run.step(batch(6))
    assert heard.ids == [6] and outstanding(place) == []


@pytest.mark.slow
def test_sinks_know_new_rows_by_new_ids_where_the_catalog_is_from_a_backup(tmp_path: Path, heard: Heard) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        write(place, heard, 2).region.close("done")
    shutil.copytree(tmp_path / "w", tmp_path / "backup")
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = Outboxed(place, heard)
        run.step(batch(3))
        run.step(batch(4))
        run.region.close("done")
    for path in (tmp_path / "w").glob("catalog.db*"):
        path.unlink()
    shutil.copy(tmp_path / "backup" / "catalog.db", tmp_path / "w")
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        recover(place, NAME, run=in_order, accept_loss=True)
        run = Outboxed(place, heard)
        for n in (5, 6, 7):
            run.step(batch(n))
        assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [1, 2, 3, 4, 5] and failures(place, NAME) == []
        assert heard.ids == [1, 2, 3, 4, 5, 6, 7] and heard.inputs == inputs(range(1, 8))
        roll_back(place, 1)
        follow_log(Outboxed(place, heard))
        begin_anew(place, Outboxed(place, heard))
        Outboxed(place, heard).step(batch(8))
        assert heard.ids == [1, 2, 3, 4, 5, 6, 7, 8] and heard.inputs == inputs(range(1, 9))


def test_staged_output_that_reads_wrongly_once_is_not_made_again(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again by other code, it would come with other rows under an id that was perhaps delivered."""
    run = Outboxed(place, Heard(), delivers=False)
    run.step(batch(1))
    run.step(batch(2))
    roll_back(place, 1)
    real, read = FilesystemStore.read, []

    def wrong_once(self: FilesystemStore, stored: Any) -> Any:
        if stored.name.endswith(".output.arrow") and stored.name not in read:
            read.append(stored.name)
            raise CorruptObject(f"object {stored.name} was altered: the test says so")
        return real(self, stored)

    monkeypatch.setattr(FilesystemStore, "read", wrong_once)
    run = Outboxed(place, heard)
    assert len(read) == 2 and heard.ids == [1, 2] and not any(o.lost for o in place.catalog.outbox.list(NAME))


def test_other_boundaries_under_an_id_that_was_delivered_are_refused(place: OpenWarehouse, heard: Heard) -> None:
    write(place, heard, 3)
    roll_back(place, 1)
    run = Outboxed(place, heard, checkpoint_steps=2)
    run.step(batch(2))
    with pytest.raises(StateError, match="checkpoint 2 of stream tallies was given up and must have the steps"):
        run.step(batch(3))
    assert (place.catalog.checkpoints.last_id(NAME), heard.ids) == (1, [1, 2, 3])
    follow_log(Outboxed(place, heard))
    assert (place.catalog.checkpoints.last_id(NAME), heard.ids) == (3, [1, 2, 3])


@pytest.mark.slow
def test_staged_output_that_is_damaged_comes_again_of_the_same_input(place: OpenWarehouse, heard: Heard) -> None:
    """The stream goes back behind it, makes it again, and delivers it in its turn."""
    write(place, heard, 1)
    run = Outboxed(place, Heard(), delivers=False)
    for n in (2, 3, 4):
        run.step(batch(n))
    damage(place, 3)
    with pytest.raises(CorruptObject):
        Outboxed(place, heard)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up) == (2, (3, 4)) and "output.arrow" in done.failures[0].reason
    run = Outboxed(place, heard)
    assert heard.ids == [1, 2], "4 waits for 3"
    follow_log(run)
    run.step(batch(5))
    assert heard.ids == [1, 2, 3, 4, 5] and heard.inputs == inputs([1, 2, 3, 4, 5])
