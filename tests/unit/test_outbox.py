"""The outbox: the same id always brings a sink the same rows, and every row of input arrives once."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from siltstone.catalog.records.outbox import OutboxRecords, OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import fork
from siltstone.client import open_client
from siltstone.errors import Fenced, StateError, Unreachable, UsageError
from siltstone.operator import Rows, State
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.store.filesystem import FilesystemStore
from tests.outbox_run import (
    NAME,
    SINK,
    STREAM,
    Heard,
    Outboxed,
    Tallies,
    batch,
    follow_log,
    inputs,
    outstanding,
    roll_back,
    staged,
    write,
)

# The order of things


@pytest.mark.slow
def test_output_leaves_after_the_commit_and_is_cleaned_up_when_the_run_ends(place: OpenWarehouse, heard: Heard) -> None:
    run = write(place, heard, 3)
    assert heard.ids == [1, 2, 3] and heard.inputs == inputs([1, 2, 3])
    assert outstanding(place) == [] and len(staged(place)) == 3, "an object per checkpoint, of small parts together"
    run.region.close("done")
    assert staged(place) == [] and place.catalog.outbox.list(NAME) == []


@pytest.mark.slow
def test_what_a_sink_was_given_can_be_read_again_for_a_while(place: OpenWarehouse, heard: Heard) -> None:
    client = open_client(str(place.warehouse.local.root)).stream(NAME)
    run = Outboxed(place, heard, keep_outputs=timedelta(hours=1))
    run.step(batch(1, 3))
    run.delivers = False
    run.step(batch(2, 5))
    listed = client.outputs()
    assert listed.consistent == 1 and [each["delivered_at"] is None for each in listed.outputs] == [False, True]
    run.region.close("failed")
    run = Outboxed(place, heard, keep_outputs=timedelta(hours=1))
    assert client.outputs().consistent == 2 and heard.ids == [1, 2]
    run.region.close("done")
    for number, (id, rows) in enumerate(heard.calls):
        again = client.read_output(SINK, id)
        assert sorted(again.to_pylist(), key=str) == sorted(rows, key=str) and len(rows) == (3, 5)[number]
    assert [each["rows"] for each in client.outputs().outputs] == [3, 5]
    place.catalog.outbox.forget_delivered(NAME, run.region.epoch, timedelta(microseconds=1))
    with pytest.raises(UsageError, match="nothing is kept of output by_key of checkpoint 2"):
        client.read_output(SINK, 2)


@pytest.mark.slow
def test_id_2_never_comes_with_other_rows_where_a_commit_failed(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: the catalog failed over, and id 2 came with 2 rows, and then with 5."""
    run = Outboxed(place, heard)
    run.step(batch(1, 3))

    def away(*_: object) -> None:
        raise Unreachable("the catalog is away")

    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.commits), "add", away)
        with pytest.raises(Unreachable):
            run.step(batch(2, 2))
    assert heard.ids == [1]
    later = Outboxed(place, heard)
    assert later.batches == 2, "nothing tells this commit from one that was acknowledged and lost"
    later.step(batch(3, 5))
    assert heard.ids == [1, 2, 3] and heard.inputs == sorted([*inputs([1], 3), *inputs([2], 2), *inputs([3], 5)])
    later.region.close("done")
    sweep(place, NAME)
    assert staged(place) == [], "what was staged for the commit that failed is an orphan"


@pytest.mark.slow
def test_a_crash_between_commit_and_delivery_is_made_up_for_from_what_is_staged(
    place: OpenWarehouse, heard: Heard
) -> None:
    """Whatever code runs next, at whatever parallelism."""

    class Doubling(Tallies):
        def process(self, rows: Rows, state: State) -> Any:
            out = super().process(rows, state)
            return out.set_column(2, "sum", [[-1] * len(out)])

    write(place, heard, 1)
    write_more = Outboxed(place, Heard(), delivers=False)
    write_more.step(batch(2))
    assert outstanding(place) == [2]
    other = replace(STREAM, operators=[Doubling(name=SINK)])
    run = Outboxed(place, heard, stream=other, parallelism=3)
    assert heard.ids == [1, 2] and all(row["sum"] > 0 for row in heard.calls[1][1]), "as it was staged"
    run.step(batch(3))
    assert heard.ids == [1, 2, 3] and heard.inputs == inputs([1, 2, 3])


def test_a_run_that_takes_over_asks_once_what_is_outstanding_and_knows_whose_it_was(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`region_checkpointed` comes for the checkpoints of earlier epochs whose outputs it delivers."""
    run = Outboxed(place, Heard(), delivers=False)
    for n in (1, 2):
        run.step(batch(n))
    listed, asked = OutboxRecords.list, list[str]()

    def count(self: OutboxRecords, stream: str, *, outstanding: bool = False) -> list[OutputRecord]:
        asked.append(stream)
        return listed(self, stream, outstanding=outstanding)

    monkeypatch.setattr(OutboxRecords, "list", count)
    later = Outboxed(place, heard)
    assert heard.ids == [1, 2] and later.region.outbox.left == [1, 2] and asked == [NAME]
    later.step(batch(3))
    assert later.region.outbox.left == [1, 2]
    assert Outboxed(place, heard).region.outbox.left == []


def test_a_crash_between_delivery_and_mark_brings_the_same_id_with_the_same_rows(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    run = Outboxed(place, heard)
    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.outbox), "mark_delivered", die)
        with pytest.raises(Killed):
            run.step(batch(1))
    Outboxed(place, heard).step(batch(2))
    assert heard.ids == [1, 1, 2] and heard.calls[0] == heard.calls[1] and heard.inputs == inputs([1, 2])


def test_several_steps_are_one_output_and_one_without_rows_is_none(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, heard, checkpoint_steps=3)
    for n, rows in ((1, 10), (2, 0), (3, 10), (4, 0)):
        run.step(batch(n, rows))
    run.step_without_rows()
    assert heard.ids == [1] and heard.inputs == inputs([1, 3])


@pytest.mark.slow
def test_a_checkpoint_without_input_has_no_output(place: OpenWarehouse, heard: Heard) -> None:
    """Seen: a rescale committed id 2 without the sink, and its rows came again as the next."""
    run = write(place, heard, 1)
    Outboxed(place, Heard(), delivers=False).step(batch(2))
    assert heard.ids == [1] and outstanding(place) == [2]
    rescaled = Outboxed(place, heard, parallelism=3)
    assert heard.ids == [1, 2], "who takes the stream over delivers first"
    rescaled.step_without_rows()
    assert heard.ids == [1, 2] and outstanding(place) == []
    Outboxed(place, heard).step(batch(3))
    assert heard.ids == [1, 2, 4] and heard.inputs == inputs([1, 2, 3])
    with pytest.raises(Fenced):
        run.step(batch(2))


# What fails


def test_a_sink_that_fails_is_given_the_same_again_before_anything_else(place: OpenWarehouse, heard: Heard) -> None:
    run = write(place, heard, 1)
    heard.fails = OSError("the sink is full")
    with pytest.raises(OSError, match="full"):
        run.step(batch(2))
    assert place.catalog.checkpoints.last_id(NAME) == 2, "the checkpoint is complete"
    with pytest.raises(OSError, match="full"):
        Outboxed(place, heard)
    heard.fails = None
    Outboxed(place, heard).step(batch(3))
    assert heard.ids == [1, 2, 3] and heard.inputs == inputs([1, 2, 3])


def test_output_for_a_sink_that_is_no_more_is_never_dropped_in_silence(place: OpenWarehouse, heard: Heard) -> None:
    Outboxed(place, Heard(), delivers=False).step(batch(1))
    run = Outboxed(place, heard, stream=replace(STREAM, sinks={}), delivers=False)
    with pytest.raises(UsageError, match=r"checkpoint 1 of stream tallies has output for the sink of by_key, .* again"):
        run.region.outbox.deliver(1, {})
    assert outstanding(place) == [1]


def test_large_output_is_staged_by_the_tasks_and_stays_in_order(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.format.output.OBJECT_BYTES", 1 << 14)
    run = Outboxed(place, heard)
    run.step(batch(1, 60_000))
    assert len(staged(place)) >= 2 and heard.inputs == inputs([1], 60_000)


# What keeps it


def test_retention_and_sweep_spare_what_is_undelivered(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, Heard(), delivers=False)
    for n in range(1, 6):
        run.step(batch(n))
    kept = staged(place)
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    run.region.close("done")
    sweep(place, NAME)
    assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [5] and staged(place) == kept
    done = Outboxed(place, heard)
    assert heard.ids == [1, 2, 3, 4, 5] and heard.inputs == inputs([1, 2, 3, 4, 5])
    done.region.close("done")
    assert staged(place) == []


def test_killed_while_it_cleans_up_a_run_leaves_orphans_and_no_row(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(place, heard, 2)

    def away(*_: object) -> None:
        raise Unreachable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(FilesystemStore, "delete", away)
        run.region.outbox.clean()
    assert len(staged(place)) == 2 and place.catalog.outbox.list(NAME) == []
    run.region.close("done")
    sweep(place, NAME)
    assert staged(place) == []


def test_a_fork_delivers_its_own_output_and_none_of_its_parents(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, Heard(), delivers=False)
    for n in (1, 2):
        run.step(batch(n))
    fork(place, NAME, "what-if", "2")
    theirs = Heard()
    other = Outboxed(place, theirs, stream=replace(STREAM, name="what-if"))
    assert theirs.ids == [] and outstanding(place, "what-if") == []
    other.step(batch(3))
    assert theirs.ids == [3] and theirs.inputs == inputs([3])
    roll_back(place, 0, "what-if")
    other = Outboxed(place, theirs, stream=replace(STREAM, name="what-if"))
    follow_log(other)
    assert (other.region.completed, theirs.ids) == (3, [3]), "what came before it is its parent's"
    Outboxed(place, heard)
    assert heard.ids == [1, 2] and heard.inputs == inputs([1, 2])


# Older writers


def test_a_process_frozen_in_the_take_over_wakes_up_and_delivers_nothing(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read what is outstanding; meanwhile a newer writer delivers it, cleans up and goes on."""
    Outboxed(place, Heard(), delivers=False).step(batch(1))
    frozen = Outboxed(place, heard, delivers=False)
    real = OutboxRecords.list

    def read_then_freeze(*args: Any, **options: Any) -> list[OutputRecord]:
        found = real(*args, **options)
        monkeypatch.undo()
        newer = Outboxed(place, heard)
        newer.step(batch(2))
        newer.region.close("done")
        return found

    monkeypatch.setattr(OutboxRecords, "list", read_then_freeze)
    with pytest.raises(Fenced):
        frozen.deliver(checked=True)
    assert heard.ids == [1, 2] and heard.inputs == inputs([1, 2])


def test_a_process_frozen_while_it_delivers_brings_the_same_and_marks_nothing(
    place: OpenWarehouse, heard: Heard
) -> None:
    """At that one moment a newer writer cannot know of it: a sink that skips ids it has has the rows once."""
    Outboxed(place, Heard(), delivers=False).step(batch(1))

    class Freezing(Outboxed):
        def give(self, output: OutputRecord) -> None:
            Outboxed(place, heard).step(batch(2))
            super().give(output)

    with pytest.raises(Fenced):
        Freezing(place, heard)
    assert heard.ids == [1, 2, 1] and heard.inputs == inputs([1, 2])


def test_a_fenced_writer_marks_loses_and_forgets_nothing(place: OpenWarehouse, heard: Heard) -> None:
    run = Outboxed(place, heard, delivers=False)
    run.step(batch(1))
    epoch = run.region.epoch
    place.catalog.runs.begin(NAME, "a newer one")
    for change in (
        lambda: place.catalog.outbox.mark_delivered(NAME, epoch, 1, SINK),
        lambda: place.catalog.outbox.mark_lost(NAME, epoch, 1, SINK),
        lambda: place.catalog.outbox.forget_delivered(NAME, epoch),
    ):
        with pytest.raises(Fenced):
            change()
    assert outstanding(place) == [1] and len(staged(place)) == 1
    with pytest.raises(StateError, match="cannot come again"):
        place.catalog.outbox.mark_lost(NAME, epoch + 1, 1, SINK)
