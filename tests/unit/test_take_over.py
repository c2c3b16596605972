"""A catalog that lost what it had acknowledged is brought up to the store when a stream is taken over."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.epochs import Tenure, check_catalog, go_on_from_backup
from siltstone.catalog.extract_writer import try_write_extract, write_extract
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.fork import fork
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, Fenced, LossRefused, SchemaConflict, StateError, Unreachable, WrongWarehouse
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import drop_savepoint
from siltstone.retention.sweep import sweep
from siltstone.run.take_over import take_over
from siltstone.store.base import Store
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from tests.delta_run import TableRun, rows_in
from tests.failover import AT_ONCE, Standby, go_on, losing_what_follows
from tests.next_revision import plant_next_revision
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, batch, follow_log, inputs, write
from tests.proofs import failures, in_order
from tests.rebuild_cases import check_same, plant, what_it_knows


@pytest.mark.parametrize("lost", [1, 2, 5])
@pytest.mark.parametrize("delivers", [True, False])
def test_commits_that_were_lost_come_back(place: OpenWarehouse, heard: Heard, lost: int, delivers: bool) -> None:
    """Seen: the next run committed other rows under the same id, and a sink that skips known ids lost them."""
    run = write(place, heard, 2, delivers=delivers)
    with losing_what_follows(place):
        for n in range(3, 3 + lost):
            run.step(batch(n))
    assert place.catalog.checkpoints.last_id(NAME) == 2
    go_on(place, heard, 2 + lost)


def test_first_checkpoints_that_were_lost_come_back(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, heard)
    with losing_what_follows(place):
        run.step(batch(1))
        run.step(batch(2))
    go_on(place, heard, 2)


def test_a_run_that_was_lost_with_its_stream_comes_back(place: OpenWarehouse, heard: Heard) -> None:
    with losing_what_follows(place):
        write(place, heard, 3)
    assert place.catalog.streams.list() == []
    go_on(place, heard, 3)


@pytest.mark.slow
def test_a_run_at_work_is_refused_and_leaves_what_it_completed(place: OpenWarehouse, heard: Heard) -> None:
    """It stores one more manifest before its commit is refused; and it deletes nothing of what the catalog lost."""
    run = write(place, heard, 2)
    with losing_what_follows(place):
        run.step(batch(3))
    with pytest.raises(Unreachable, match="has lost checkpoint 3 of stream tallies, which it had acknowledged"):
        run.step(batch(4))
    run.region.close("reset")
    go_on(place, heard, 3)


@pytest.mark.slow
def test_a_commit_after_the_loss_is_refused_and_comes_back_with_what_was_lost(
    place: OpenWarehouse, heard: Heard
) -> None:
    run = write(place, heard, 2, max_pending=2)
    with losing_what_follows(place):
        run.complete_oldest()
    with pytest.raises(Unreachable, match="has lost checkpoint 1"):
        run.complete_oldest()
    run.region.close("reset")
    go_on(place, heard, 2)


@pytest.mark.slow
def test_a_run_that_is_fenced_before_its_commit_finds_it_done(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is stored, so the one that takes the stream over commits it, and delivers what it staged."""
    run, add = write(place, heard, 1), type(place.catalog.commits).add

    def too_late(*given: Any, **named: Any) -> Any:
        patch.setattr(type(place.catalog.commits), "add", add)
        assert Outboxed(place, heard).region.completed == 2
        return add(*given, **named)

    with monkeypatch.context() as patch, pytest.raises(Fenced):
        patch.setattr(type(place.catalog.commits), "add", too_late)
        run.step(batch(2))
    go_on(place, heard, 2)


def test_a_run_whose_epoch_was_lost_goes_on(place: OpenWarehouse, heard: Heard) -> None:
    tenure = Tenure()
    write(place, heard, 2).region.close("done")
    with losing_what_follows(place):
        run = Outboxed(place, heard)
        tenure.epoch = run.region.epoch
        run.step(batch(3))
    with pytest.raises(Unreachable, match="has lost"):
        run.step(batch(4))
    run.region.close("reset")
    assert take_over(place, NAME, "the same run", tenure) == 3
    go_on(place, heard, 3)


@pytest.mark.slow
def test_of_two_manifests_for_an_id_that_of_the_newest_epoch_counts(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one's commit was refused, and its run ended without being able to delete it."""
    run = write(place, heard, 1)
    with monkeypatch.context() as patch, pytest.raises(StateError):
        patch.setattr(type(place.catalog.commits), "add", _fails)
        run.step(batch(7))
    with monkeypatch.context() as patch:
        patch.setattr("siltstone.run.region.sweep_ended", lambda *_: None)
        run.region.close("failed")
    later = Outboxed(place, heard)
    assert later.region.completed == 1, "it was refused"
    with losing_what_follows(place):
        later.step(batch(2))
    plant(place, 1, 3, like=1)  # a writer that was fenced wakes up
    go_on(place, heard, 2)


def _fails(*_: object, **__: object) -> None:
    raise StateError("refused")


def _savepoint(place: OpenWarehouse) -> None:
    place.catalog.savepoints.add(NAME, place.catalog.streams.get(NAME).epoch, "release", 3)
    try_write_extract(place, NAME)


def _drop(place: OpenWarehouse) -> None:
    drop_savepoint(place.catalog, NAME, "early")
    try_write_extract(place, NAME)


def _retention(place: OpenWarehouse) -> None:
    place.catalog.streams.set_retention(NAME, RetentionOptions(keep_last=3).to_record())
    try_write_extract(place, NAME)


def _delete(place: OpenWarehouse) -> None:
    delete_checkpoints(place, NAME, [1, 3])


def _materialize(place: OpenWarehouse) -> None:
    materialize(place, NAME, SINK, 4, id="m1", parallelism=1, run=in_order)


def _roll_back(place: OpenWarehouse) -> None:
    epoch = take_over(place, NAME, "a test")
    place.catalog.rollbacks.roll_back(NAME, epoch, 4, "a test", "a test")
    write_extract(place, NAME)


def _run(place: OpenWarehouse) -> None:
    run = Outboxed(place, Heard())
    follow_log(run)
    run.step(batch(run.batches + 1))


LOST: dict[str, tuple[Callable[[OpenWarehouse], None], ...]] = {
    "savepoint": (_savepoint,),
    "dropped": (_drop,),
    "retention": (_retention,),
    "deletion": (_delete,),
    "materialization": (_materialize,),
    "rollback": (_roll_back,),
    "rollback and run": (_roll_back, _run),
    "run, savepoint, run": (_run, _savepoint, _run),
    "rollback, deletion, run": (_roll_back, _delete, _run, _materialize),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LOST)
def test_what_an_extract_says_comes_back(place: OpenWarehouse, heard: Heard, what: str) -> None:
    write(place, heard, 5)
    place.catalog.savepoints.add(NAME, 1, "early", 2)
    write_extract(place, NAME)
    with losing_what_follows(place):
        for each in LOST[what]:
            each(place)
        known = what_it_knows(place.catalog)
        place.catalog.checkpoints.record_proof(NAME, 2, True)
    place.catalog.checkpoints.record_proof(NAME, 2, True)
    with pytest.raises(WrongWarehouse, match="Run the stream, which brings the catalog up to the store"):
        check_catalog(place, NAME)
    with pytest.raises(WrongWarehouse, match=r"has lost transactions: .* repeat what you did"):
        _savepoint(place)
    take_over(place, NAME, "a test")
    known[NAME].pop("outputs")
    found = what_it_knows(place.catalog)
    found[NAME].pop("outputs")
    check_same(found, known)
    assert not failures(place, NAME) and place.catalog.checkpoints.get(NAME, 2).proven, "the proof stays"


@pytest.mark.slow
def test_a_fork_follows_its_own_manifests_and_a_lost_one_is_refused(place: OpenWarehouse, heard: Heard) -> None:
    write(place, heard, 3).region.close("done")
    branch, arrived = STREAM.as_fork("branch", NAME), Heard()
    with Standby_of(place) as before_fork:
        fork(place, NAME, "branch", "2")
        with losing_what_follows(place):
            run = Outboxed(place, arrived, stream=branch)
            run.step(batch(3))
            run.step(batch(4))
        again = Outboxed(place, arrived, stream=branch)
        assert (again.region.completed, again.batches) == (4, 4)
        again.step(batch(5))
        assert arrived.ids == [3, 4, 4, 5] and not failures(place, "branch") and not failures(place, NAME)
        before_fork.promote()
    with pytest.raises(WrongWarehouse, match=r"does not know branch, made from stream tallies.*rebuild-catalog"):
        Outboxed(place, heard)
    with pytest.raises(WrongWarehouse, match="holds another stream branch, a fork of tallies"):
        Outboxed(place, arrived, stream=branch)


@contextmanager
def Standby_of(place: OpenWarehouse) -> Iterator[Standby]:
    standby = Standby(place)
    yield standby
    standby.close()


@pytest.mark.slow
def test_what_is_pending_is_taken_over_as_far_as_it_is_stored(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, heard, max_pending=2)
    for n in (1, 2, 3, 4):
        run.step(batch(n))
    run.region.store()  # the next one's manifest is stored only once this one is committed
    later = Outboxed(place, heard)
    assert (later.region.completed, later.batches) == (3, 3) and heard.ids == [1, 2, 3]


def test_a_manifest_that_cannot_be_read_is_named(place: OpenWarehouse, heard: Heard) -> None:
    run = write(place, heard, 2)
    with losing_what_follows(place):
        run.step(batch(3))
    name = CheckpointPath(NAME, 1, 3).manifest()
    path = place.warehouse.local.objects / name
    path.write_bytes(path.read_bytes()[:-40])
    epoch = place.catalog.streams.get(NAME).epoch
    with pytest.raises(CorruptObject, match=name):
        Outboxed(place, heard)
    assert place.catalog.streams.get(NAME).epoch == epoch and sweep(place, NAME, AT_ONCE).deleted == 0


def test_a_damaged_manifest_that_would_be_followed_is_given_up_on_request(place: OpenWarehouse, heard: Heard) -> None:
    """Seen: a recovery found nothing to give up, and each run refused the stream."""
    run, name = write(place, heard, 2), CheckpointPath(NAME, 1, 3).manifest()
    with losing_what_follows(place):
        run.step(batch(3))
    path = place.warehouse.local.objects / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(LossRefused, match=rf"{name}.* would lose checkpoint 3 and .*recover {NAME} --accept-loss"):
        recover(place, NAME, run=in_order)
    assert (
        "--accept-loss is needed, since it would lose checkpoint 3"
        in recover(place, NAME, run=in_order, dry_run=True).summary
    )
    assert recover(place, NAME, run=in_order, accept_loss=True).checkpoint == 2
    later = Outboxed(place, heard)
    assert later.region.completed == 2
    later.step(batch(7))
    assert heard.inputs == inputs([1, 2, 3, 7]) and not failures(place, NAME)


def test_a_sweep_keeps_what_has_a_manifest(place: OpenWarehouse, heard: Heard) -> None:
    run = write(place, heard, 2)
    with losing_what_follows(place):
        run.step(batch(3))
    assert sweep(place, NAME, AT_ONCE).deleted == 0
    go_on(place, heard, 3)


def test_a_deletion_whose_record_is_lost_deletes_nothing(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database fails over between the record of a deletion and the extract that has it."""
    write(place, heard, 6)
    standby, put = Standby(place), write_extract

    def fails_over(*given: object) -> object:
        standby.promote()
        return put(*given)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch, pytest.raises(Unreachable, match="has lost what it recorded"):
        patch.setattr("siltstone.retention.deletion.write_extract", fails_over)
        delete_checkpoints(place, NAME, [1, 2, 3, 4])
    standby.close()
    assert len(place.catalog.checkpoints.list(NAME)) == 6 and not failures(place, NAME)


def _upgrade(place: OpenWarehouse, patch: pytest.MonkeyPatch) -> None:
    """Upgrade the catalog to a later revision, which begins an epoch of each open run."""
    directory = Path(place.catalog.url.removeprefix("sqlite:///")).parent
    plant_next_revision(patch, directory)
    assert upgrade_catalog(place.catalog.url, directory, fence=True).fenced == [NAME]


@pytest.mark.parametrize("with_extract", [True, False])
def test_an_upgrade_of_a_catalog_that_lost_commits_hides_none(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, with_extract: bool
) -> None:
    """Seen: its epoch is above the store's, so the rest was neither followed nor missed, and a sweep deleted it."""
    run = write(place, heard, 2)
    with losing_what_follows(place):
        for n in (3, 4, 5):
            run.step(batch(n))
        if with_extract:
            _savepoint(place)
    _upgrade(place, monkeypatch)
    with pytest.raises(WrongWarehouse, match="Run the stream, which brings the catalog up to the store"):
        sweep(place, NAME, AT_ONCE)
    if with_extract:
        with pytest.raises(WrongWarehouse, match="has lost transactions"):
            write_extract(place, NAME)
    go_on(place, heard, 5)
    assert [s.checkpoint for s in place.catalog.savepoints.list(NAME)] == ([3] if with_extract else [])


@pytest.mark.parametrize("with_extract", [True, False])
def test_what_is_given_up_after_an_upgrade_stays_given_up(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, with_extract: bool
) -> None:
    run = write(place, heard, 2)
    with losing_what_follows(place):
        run.step(batch(3))
        if with_extract:
            _savepoint(place)
    _upgrade(place, monkeypatch)
    assert go_on_from_backup(place, NAME, "a test", "recovered")
    later = Outboxed(place, heard)
    assert later.region.completed == 2
    later.step(batch(7))
    assert heard.inputs == inputs([1, 2, 3, 7]), "under an id of its own"


def test_a_run_whose_database_fails_over_as_it_ends_leaves_what_it_completed(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: it ended its epoch in the catalog that had just lost its last checkpoint, and swept that."""
    run = write(place, heard, 2)
    with closing(Standby(place)) as standby, monkeypatch.context() as patch:
        run.step(batch(3))
        end = type(place.catalog.runs).end

        def fails_over(*given: Any) -> bool:
            standby.promote()
            return end(*given)

        patch.setattr(type(place.catalog.runs), "end", fails_over)
        run.region.close("done")
    go_on(place, heard, 3)


@pytest.mark.parametrize("lost", [True, False])
def test_a_commit_between_the_look_and_the_epoch_is_followed(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Seen: the run before commits once more, its database loses that, and then the next one fences it."""
    run, begin = write(place, heard, 2), type(place.catalog.runs).begin
    with closing(Standby(place)) as standby, monkeypatch.context() as patch:

        def late(*given: Any, **named: Any) -> int:
            run.step(batch(3))
            if lost:
                standby.promote()
            return begin(*given, **named)

        patch.setattr(type(place.catalog.runs), "begin", late)
        take_over(place, NAME, "a test")
    [third] = place.catalog.checkpoints.list_after(NAME, 2, 1)
    assert third.epoch == run.region.epoch
    go_on(place, heard, 3)


def test_of_two_that_take_a_stream_over_the_second_fences_the_first(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: the one that was slower to follow a manifest was refused, as if it had run before."""
    run, add = write(place, heard, 2), type(place.catalog.commits).add
    with losing_what_follows(place):
        run.step(batch(3))

    def slower(*given: Any, **named: Any) -> Any:
        patch.setattr(type(place.catalog.commits), "add", add)
        assert take_over(place, NAME, "the faster one") == 2
        return add(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.commits), "add", slower)
        assert take_over(place, NAME, "the slower one") == 3
    go_on(place, heard, 3)


def test_a_stream_that_comes_back_has_the_key_groups_that_it_had(place: OpenWarehouse, heard: Heard) -> None:
    with losing_what_follows(place):
        write(place, heard, 3)
    other = replace(STREAM, max_parallelism=8)
    with pytest.raises(SchemaConflict, match="has max_parallelism 4, now 8"):
        Outboxed(place, heard, stream=other)
    go_on(place, heard, 3)


REQUESTS = ("list", "put", "read", "read_range", "delete")


@pytest.mark.parametrize(("end", "more"), [("done", 0), ("killed", 2)])
def test_taking_over_asks_the_store_few_times_more(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, end: str, more: int
) -> None:
    """Marks, extracts, the own mark, marks again, and the extract before and after; one manifest if the last run did
    not end, before the new epoch and after."""
    run = write(place, heard, 2)
    if end == "done":
        run.region.close("done")
    counted: list[str] = []
    with monkeypatch.context() as patch:
        for name in REQUESTS:
            patch.setattr(FilesystemStore, name, _counting(getattr(FilesystemStore, name), counted, name))
        take_over(place, NAME, "a test")
    assert counted.count("list") == 4 + more, counted
    assert len(counted) == 4 + more + 1 + 2 + 2, counted


def _counting(method: Callable[..., object], counted: list[str], name: str) -> Callable[..., object]:
    def call(self: Store, *given: object) -> object:
        counted.append(name)
        return method(self, *given)

    return call


@pytest.mark.parametrize("delivered", [True, False])
def test_a_table_gets_each_row_once(place: OpenWarehouse, delivered: bool) -> None:
    """A commit was lost that a Delta table had got, or not yet."""
    run = TableRun(place)
    run.step(batch(1))
    run.delivers = delivered
    with losing_what_follows(place):
        run.step(batch(2))
    later = TableRun(place)
    assert later.batches == 2 and rows_in(place) == inputs([1, 2])
    later.step(batch(3))
    assert rows_in(place) == inputs([1, 2, 3])
