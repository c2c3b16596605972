"""Rollbacks and the log of what comes next, over every database a catalog can be in."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, insert

from siltstone.catalog.database import tables as t
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, StateError, UnknownCheckpoint, UnknownStream, Unreachable, UsageError
from siltstone.model import Form, StoredObject
from tests.region_run import clock_of

NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    """With stream flights in writer epoch 1, checkpoints 1 to 6 of two steps each, and bases at 1 and 4."""
    with open_catalog(catalog_url, now=lambda: NOON) as opened:
        opened.streams.register("flights", 128, {})
        opened.runs.begin("flights", "host:1")
        for id in range(1, 7):
            commit(opened, id, first=1 if id < 4 else 4)
        yield opened


def step(number: int, read: int | None = None, time: int = 0) -> Step:
    """A step that has read the source up to an offset."""
    offset = number if read is None else read
    return Step(number, number - 1, f'v1\n{{"batchTimestampMs":{time}}}\n{{"logOffset":{offset}}}', f'{{"0":{offset}}}')


def steps_of(id: int) -> list[Step]:
    return [step(2 * id - 1), step(2 * id)]


def name_of(id: int, file: str, epoch: int = 1) -> str:
    return f"flights/{epoch:08d}/{id:012d}/{file}"


def commit(
    catalog: Catalog,
    id: int,
    first: int = 1,
    epoch: int = 1,
    steps: Sequence[Step] | None = None,
    *,
    repeats: bool = False,
) -> None:
    def stored(file: str) -> StoredObject:
        return StoredObject(name_of(id, file, epoch), 10, "xxh3-128:" + "0" * 32)

    made = CheckpointCommit(id, stored("manifest.arrow"), f"{id:032x}", 0, 0, {"aircraft": Form.DELTA})
    made = replace(made, segments=[stored("a.segment")], oldest_needed=first)
    details = CommitDetails(steps_of(id) if steps is None else steps, repeats=repeats)
    catalog.commits.add("flights", epoch, replace(made, details=details))


def rewind(catalog: Catalog, checkpoint: int, reason: str = "damaged") -> int:
    """Under a new epoch, which is returned."""
    epoch = catalog.runs.begin("flights", "host:2")
    catalog.rollbacks.roll_back("flights", epoch, checkpoint, reason, "host:2")
    return epoch


def everything(catalog: Catalog) -> tuple[object, ...]:
    return (
        catalog.checkpoints.list("flights", marked=True),
        catalog.objects.list("flights"),
        catalog.savepoints.list("flights"),
        catalog.reference_copies.list("flights"),
        catalog.materializations.list("flights"),
        catalog.input_log.list("flights", 10**6),
        catalog.rollbacks.list("flights"),
    )


def test_what_lies_above_ceases_to_exist_and_its_input_is_to_come_again(catalog: Catalog) -> None:
    before = catalog.checkpoints.list("flights")
    for id, name in ((4, "kept"), (6, "newest"), (5, "fifth")):
        catalog.savepoints.add("flights", 1, name, id)
    for id in (3, 6):
        snapshot = StoredObject(name_of(id, "s.snapshot"), 7, "xxh3-128:" + "0" * 32)
        catalog.reference_copies.add("flights", 1, id, [snapshot], 1)
    catalog.deletions.mark("flights", 1, [1, 2])
    epoch = catalog.runs.begin("flights", "host:2")
    assert catalog.rollbacks.foresee("flights", 4).given_up == (5, 6)
    lost = catalog.rollbacks.roll_back("flights", epoch, 4, "6 and 5 are damaged", "host:2")
    assert (lost.given_up, lost.savepoints, lost.edits) == ((5, 6), ("fifth", "newest"), ())
    assert catalog.checkpoints.list("flights", marked=True)[2:] == before[2:4]
    assert catalog.checkpoints.last_id("flights") == 4 and catalog.chains.list_checkpoints("flights", 4) == [4]
    assert {o.checkpoint for o in catalog.objects.list("flights")} == {1, 2, 3, 4}
    assert [s.name for s in catalog.savepoints.list("flights")] == ["kept"]
    assert [s.checkpoint for s in catalog.reference_copies.list("flights")] == [3]
    assert [(s.step, s.checkpoint) for s in catalog.input_log.list_logged("flights")] == [
        (9, 5),
        (10, 5),
        (11, 6),
        (12, 6),
    ]
    [record] = catalog.rollbacks.list("flights")
    assert (record.epoch, record.checkpoint, record.newest, record.reason) == (2, 4, 6, "6 and 5 are damaged")
    assert (record.who, record.rolled_back_at) == ("host:2", NOON)
    assert record.gave_up(1, 5) and record.gave_up(1, 6)
    assert not (record.gave_up(1, 4) or record.gave_up(1, 7) or record.gave_up(2, 5))
    with pytest.raises(UnknownCheckpoint, match=r"no checkpoint 5 .* 3 to 4"):
        catalog.checkpoints.get("flights", 5)


def test_before_the_first_is_nothing_and_all_of_the_input(catalog: Catalog) -> None:
    catalog.deletions.mark("flights", 1, [2])
    epoch = rewind(catalog, 0)
    assert (
        catalog.checkpoints.last_id("flights") == 0
        and catalog.checkpoints.list_retained("flights") == catalog.objects.list("flights") == []
    )
    assert [s.step for s in catalog.input_log.list_logged("flights")] == list(range(1, 13))
    commit(catalog, 1, epoch=epoch)
    assert catalog.checkpoints.last_id("flights") == 1 and len(catalog.input_log.list_logged("flights")) == 10


def test_a_materialization_goes_with_its_checkpoint_and_one_that_runs_has_lost_its_lease(catalog: Catalog) -> None:
    for id, at in (("a", 3), ("b", 5)):
        catalog.leases.take("flights", [at], id=id, who="host:7", lasts=timedelta(minutes=5))
        catalog.materializations.begin("flights", "aircraft", at, id=id, who="host:7")
        if id == "a":
            manifest = StoredObject(name_of(at, "m.materialization.arrow"), 3, "xxh3-128:" + "0" * 32)
            catalog.materializations.complete("flights", id, manifest, [], (), (), rows_=1, bytes_=3, seconds=0.1)
    rewind(catalog, 4)
    assert [(m.id, m.outcome) for m in catalog.materializations.list("flights")] == [("a", "done")]
    with pytest.raises(Fenced, match="materialization b of stream flights has lost its lease"):
        manifest = StoredObject(name_of(5, "m.materialization.arrow"), 3, "xxh3-128:" + "0" * 32)
        catalog.materializations.complete("flights", "b", manifest, [], (), (), rows_=1, bytes_=3, seconds=0.1)


def test_an_edit_that_is_given_up_is_told_of_once_and_stays_on_record(catalog: Catalog) -> None:
    place = {"stream": "flights", "operator": "aircraft", "variable": "v", "upserts": 1, "deletes": 0}
    with catalog.transactions.writer.begin() as connection:
        rows = [{"checkpoint": id, "epoch": 1, "source": "p", "who": "w", "edited_at": NOON} for id in (2, 5)]
        connection.execute(insert(t.edit), [place | row for row in rows])
    epoch = catalog.runs.begin("flights", "host:2")
    assert catalog.rollbacks.roll_back("flights", epoch, 4, "damaged", "host:2").edits == (5,)
    commit(catalog, 5, epoch=epoch)
    again = catalog.runs.begin("flights", "host:2")
    assert catalog.rollbacks.roll_back("flights", again, 4, "damaged again", "host:2").edits == ()


def test_a_proof_of_what_was_given_up_is_no_proof_of_what_was_made_again(catalog: Catalog) -> None:
    epoch = rewind(catalog, 5)
    commit(catalog, 6, epoch=epoch)
    with pytest.raises(UnknownCheckpoint):
        catalog.checkpoints.record_proof("flights", 6, False, "damaged", epoch=1)
    assert catalog.checkpoints.get_latest("flights").proven is None
    catalog.checkpoints.record_proof("flights", 6, True, epoch=epoch)
    assert catalog.checkpoints.get_latest("flights").proven


# Refused


def test_a_fenced_writer_gives_nothing_up(catalog: Catalog) -> None:
    catalog.runs.begin("flights", "host:2")
    before = everything(catalog)
    with pytest.raises(Fenced):
        catalog.rollbacks.roll_back("flights", 1, 3, "damaged", "host:1")
    with pytest.raises(Unreachable, match="has lost writer epoch 3"):
        catalog.rollbacks.roll_back("flights", 3, 3, "damaged", "host:1")
    assert everything(catalog) == before


def test_twice_is_once(catalog: Catalog) -> None:
    epoch = rewind(catalog, 3)
    before = everything(catalog)
    assert catalog.rollbacks.roll_back("flights", epoch, 3, "damaged", "host:2").given_up == ()
    assert everything(catalog) == before


def test_one_epoch_rewinds_once_and_before_it_commits(catalog: Catalog) -> None:
    epoch = rewind(catalog, 4)
    with pytest.raises(
        UsageError, match=r"epoch 2 of stream flights has committed or rolled back already: begin a new"
    ):
        catalog.rollbacks.roll_back("flights", epoch, 3, "damaged", "host:2")
    later = catalog.runs.begin("flights", "host:3")
    commit(catalog, 5, epoch=later)
    before = everything(catalog)
    with pytest.raises(UsageError, match="epoch 3 of stream flights has committed"):
        catalog.rollbacks.roll_back("flights", later, 3, "damaged", "host:2")
    assert everything(catalog) == before


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [7, -1, 10**30, 2])
def test_a_checkpoint_that_is_not_there_is_refused(catalog: Catalog, checkpoint: int) -> None:
    catalog.deletions.mark("flights", 1, [2])
    epoch = catalog.runs.begin("flights", "host:2")
    before = everything(catalog)
    with pytest.raises(UnknownCheckpoint, match=f"no checkpoint {checkpoint} of stream flights: it has 5, 1 to 6"):
        catalog.rollbacks.roll_back("flights", epoch, checkpoint, "damaged", "host:2")
    assert everything(catalog) == before
    with pytest.raises(UnknownStream):
        catalog.rollbacks.roll_back("bids", epoch, 1, "damaged", "host:2")


@pytest.mark.slow
def test_killed_at_any_statement_nothing_has_happened(catalog: Catalog) -> None:
    catalog.savepoints.add("flights", 1, "newest", 6)
    epoch = catalog.runs.begin("flights", "host:2")
    before, died, statements = everything(catalog), 0, 0

    def die(*_: object) -> None:
        nonlocal statements
        statements -= 1
        if statements < 0:
            raise Unreachable("the process is gone")

    while True:
        statements = died
        event.listen(catalog.transactions.writer, "before_cursor_execute", die)
        try:
            catalog.rollbacks.roll_back("flights", epoch, 4, "damaged", "host:2")
            break
        except Unreachable:
            died += 1
        finally:
            event.remove(catalog.transactions.writer, "before_cursor_execute", die)
        assert everything(catalog) == before
    assert died > 8 and catalog.checkpoints.last_id("flights") == 4


# The log of what comes next


def logged(catalog: Catalog) -> list[int]:
    return [s.step for s in catalog.input_log.list_logged("flights")]


def test_whoever_follows_the_log_replaces_it_checkpoint_by_checkpoint(catalog: Catalog) -> None:
    whole = [(s.step, s.checkpoint) for s in catalog.input_log.list("flights", 6)]
    epoch = rewind(catalog, 3)
    for id in (4, 5):
        # Read at another time, which Spark notes.
        commit(catalog, id, epoch=epoch, steps=[step(s.step, time=99) for s in steps_of(id)])
        assert [s.step for s in catalog.input_log.list("flights", id, 3)] == list(range(7, 2 * id + 1))
        assert logged(catalog) == list(range(2 * id + 1, 13))
    assert all('"batchTimestampMs":99' in s.offsets for s in catalog.input_log.list("flights", 5, 3))
    epoch = rewind(catalog, 4)
    assert logged(catalog) == [9, 10, 11, 12]
    for id in (5, 6):
        commit(catalog, id, epoch=epoch)
    assert logged(catalog) == [] and [(s.step, s.checkpoint) for s in catalog.input_log.list("flights", 6)] == whole
    commit(catalog, 7, epoch=epoch)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([step(7)], id="fewer"),
        pytest.param([step(7), step(8), step(9)], id="more"),
        pytest.param([step(7), step(8, read=80)], id="that read further"),
        pytest.param([step(7), replace(step(8), sources='{"0":"another file"}')], id="of another file"),
        pytest.param([step(7), replace(step(8), batch_id=9)], id="another batch"),
        pytest.param([], id="none"),
    ],
)
def test_once_others_are_committed_the_log_is_of_a_stream_that_never_will_be(
    catalog: Catalog, steps: list[Step]
) -> None:
    epoch = rewind(catalog, 3)
    commit(catalog, 4, epoch=epoch, steps=steps)
    assert logged(catalog) == []
    assert [s.step for s in catalog.input_log.list("flights", 10**6)] == [1, 2, 3, 4, 5, 6, *(s.step for s in steps)]


def test_steps_that_come_again_have_the_clocks_that_were_logged(catalog: Catalog) -> None:
    """Another clock is as another input; a step that was logged without one takes any."""
    told = [replace(step(n), clock=clock_of(n)) for n in (13, 14)]
    commit(catalog, 7, steps=told)
    commit(catalog, 8, steps=[replace(Step.without_rows(15), clock=clock_of(15))])
    epoch = rewind(catalog, 5)
    commit(catalog, 6, epoch=epoch, steps=[replace(each, clock=clock_of(99)) for each in steps_of(6)])
    assert catalog.input_log.get_clock("flights", 6) == clock_of(99) and logged(catalog) == [13, 14, 15]
    late = [told[0], replace(told[1], clock=clock_of(15))]
    for steps in (late, [told[0], replace(told[1], clock="")]):
        before = everything(catalog)
        with pytest.raises(StateError, match="must have the steps logged for it"):
            commit(catalog, 7, epoch=epoch, steps=steps, repeats=True)
        assert everything(catalog) == before
    commit(catalog, 7, epoch=epoch, steps=told, repeats=True)
    assert logged(catalog) == [15]
    commit(catalog, 8, epoch=epoch, steps=[replace(Step.without_rows(15), clock=clock_of(16))])
    epoch = rewind(catalog, 6)
    assert [s.clock for s in catalog.input_log.list_logged("flights")] == [*(s.clock for s in told), clock_of(16)]
    commit(catalog, 7, epoch=epoch, steps=late)
    assert logged(catalog) == [] and catalog.input_log.get_clock("flights", 7) == clock_of(15)


def test_a_checkpoint_without_input_comes_again_without(catalog: Catalog) -> None:
    commit(catalog, 7, steps=[])
    commit(catalog, 8, steps=[step(14)])
    epoch = rewind(catalog, 6)
    commit(catalog, 7, epoch=epoch, steps=[])
    assert logged(catalog) == [14]
    commit(catalog, 8, epoch=epoch, steps=[step(14)])
    assert logged(catalog) == []


def test_a_commit_that_is_refused_leaves_the_log(catalog: Catalog) -> None:
    rewind(catalog, 3)
    with pytest.raises(Fenced):
        commit(catalog, 4, epoch=1)
    assert logged(catalog) == [7, 8, 9, 10, 11, 12]


def test_epochs_that_only_the_store_knows_are_skipped_and_given_up(catalog: Catalog) -> None:
    assert catalog.rollbacks.skip_epochs("flights", "host:2", above=7, newest=9) == 8
    [record] = catalog.rollbacks.list("flights")
    assert (record.epoch, record.checkpoint, record.newest) == (8, 6, 9)
    assert [r.epoch for r in catalog.runs.list("flights")] == [1, 8]
    with pytest.raises(Fenced):
        commit(catalog, 7, first=4)
    assert catalog.runs.begin("flights", "host:3") == 9
    commit(catalog, 7, first=4, epoch=9)
    assert catalog.checkpoints.last_id("flights") == 7
    assert catalog.streams.get("flights").sink_offset == 3, "sinks may have rows under ids that only the store knows"
