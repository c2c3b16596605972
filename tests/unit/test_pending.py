"""Hostile moments for checkpoints that are pending: no row is lost or doubled, whatever meets whatever."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.commits import Commits, Committed
from siltstone.catalog.records.outbox import OutboxRecords, OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.fork import fork
from siltstone.errors import Fenced, StateError, Unreachable
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.sinks.delta import SinkTable
from siltstone.store.private import replace_file
from siltstone.stream import DEAD_LETTERS
from tests.delta_run import TABLES, rows_in
from tests.examples import stride
from tests.killed_child import prepared_and_killed_at
from tests.outbox_run import NAME, SINK, Heard, Outboxed, batch, inputs, outstanding
from tests.proofs import failures, in_order, restored_digest
from tests.unit.test_dead_letters import PUTS_ASIDE, dirty, good


class Behind(Outboxed):
    """A run that delivers when it is told to, as the threads behind a stream do."""

    def __init__(self, place: OpenWarehouse, heard: Heard, *, max_pending: int = 2, **options: Any) -> None:
        super().__init__(place, heard, max_pending=max_pending, **options)

    def deliver(self, *, checked: bool = False) -> None:
        """What is outstanding, as the runner has it done."""
        self.region.deliver(self.sinks, checked=checked)

    def finish(self) -> None:
        """All that is pending."""
        self.complete_pending()
        self.deliver(checked=True)


def go_on(place: OpenWarehouse, heard: Heard, batches: int = 4, **options: Any) -> Behind:
    """The next run, up to a batch; all of it is complete and delivered then, and proves."""
    run = Behind(place, heard, **options)
    while run.batches < batches:
        run.step(batch(run.batches + 1))
    run.finish()
    assert not failures(place, NAME) and outstanding(place) == []
    return run


def undisturbed(root: Path, batches: int = 4) -> str | None:
    """The digest of the state after `batches` micro-batches, if each waits for its checkpoint."""
    with OpenWarehouse.open_writable(str(root / "undisturbed")) as place:
        run = Outboxed(place, Heard())
        for n in range(1, batches + 1):
            run.step(batch(n))
        return run.region.digest


# What fails beside what succeeds


def test_an_output_that_is_delivered_while_its_commit_returns_is_not_taken_for_outstanding(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of the next checkpoint would say so, and a rebuilt catalog deliver it again."""
    run, add = Behind(place, heard), Commits.add

    def add_and_deliver(*args: Any) -> Committed:
        committed = add(*args)
        run.deliver(checked=True)
        return committed

    monkeypatch.setattr(Commits, "add", add_and_deliver)
    run.step(batch(1))
    run.step(batch(2))
    run.complete_pending()
    assert heard.ids == [1, 2] and heard.inputs == inputs([1, 2])
    assert outstanding(place) == run.region.outbox.outstanding == []


@pytest.mark.parametrize("pending", [1, 2])
def test_a_commit_that_succeeds_although_a_delivery_has_failed_meanwhile_is_gone_on_from(
    place: OpenWarehouse, heard: Heard, pending: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The region is to be reset. Nevertheless it does not call failed what the catalog has."""
    run, add, full = Behind(place, heard, max_pending=pending), Commits.add, Unreachable("the sink is away")

    def add_while_the_sink_fails(*args: Any) -> Committed:
        committed = add(*args)
        heard.fails = full
        with pytest.raises(Unreachable):
            run.deliver(checked=True)
        return committed

    run.step(batch(1))
    run.complete_oldest()
    for n in range(2, 2 + pending):
        run.step(batch(n))
    with monkeypatch.context() as patch:
        patch.setattr(Commits, "add", add_while_the_sink_fails)
        run.complete_oldest()
    assert run.region.completed == 2 == place.catalog.checkpoints.last_id(NAME)
    with pytest.raises(StateError, match="the region is resetting") as refused:
        run.region.store() if pending > 1 else run.step(batch(3))
    assert run.region.fail(refused.value) is full
    run.region.close("reset")
    heard.fails = None
    again = Behind(place, heard)
    assert (again.region.completed, again.batches, heard.ids) == (2, 2, [1, 2])
    again = go_on(place, heard)
    assert heard.inputs == inputs([1, 2, 3, 4]) and again.region.digest == undisturbed(tmp_path)


def test_a_checkpoint_is_not_stored_before_the_one_before_it_is_complete(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    """Its manifest tells when that one was committed."""
    run = Behind(place, heard)
    run.step(batch(1))
    run.step(batch(2))
    run.region.store()
    with pytest.raises(StateError, match="checkpoint 1 is not complete, which 2 follows"):
        run.region.store()
    run.region.commit()
    run.complete_pending()
    run.region.close("done")
    again = go_on(place, heard)
    assert heard.inputs == inputs([1, 2, 3, 4]) and again.region.digest == undisturbed(tmp_path)


class TwoSinks(Behind):
    """Its outputs and dead letters go to functions or tables; `fails` is raised before or after one has its rows."""

    def __init__(self, place: OpenWarehouse, heard: Heard, letters: Heard, *, table: bool) -> None:
        self.table, self.fails = table, dict[tuple[int, str, bool], BaseException]()
        super().__init__(place, heard, letters=letters, stream=PUTS_ASIDE, tables=TABLES if table else frozenset())

    def give(self, output: OutputRecord) -> None:
        """Deliver one output."""
        for after in (False, True):
            if error := self.fails.get((output.checkpoint, output.name, after)):
                raise error
            if not after and self.table:
                SinkTable(self.region.warehouse.store, output.stream, output.name).deliver(output)
            elif not after:
                super().give(output)


@pytest.mark.parametrize(
    ("table", "name", "moment"),
    [
        *((True, SINK, moment) for moment in ("before", "after", "mark", "marked")),
        *((False, DEAD_LETTERS, moment) for moment in ("before", "mark")),
    ],
)
def test_outputs_of_pending_checkpoints_arrive_once_whatever_fails_around_one_of_them(
    place: OpenWarehouse, heard: Heard, name: str, moment: str, table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters, away = Heard(), Unreachable("away")
    run, mark = TwoSinks(place, heard, letters, table=table), OutboxRecords.mark_delivered

    def failing_mark(self: OutboxRecords, stream: str, epoch: int, checkpoint: int, of: str) -> None:
        if (checkpoint, of, moment) == (1, name, "mark"):
            raise away
        mark(self, stream, epoch, checkpoint, of)
        if (checkpoint, of, moment) == (1, name, "marked"):
            raise away

    if moment in ("before", "after"):
        run.fails[1, name, moment == "after"] = away
    run.step(dirty(1))
    run.step(dirty(2))
    run.complete_oldest()
    with monkeypatch.context() as patch:
        patch.setattr(OutboxRecords, "mark_delivered", failing_mark)
        with pytest.raises(Unreachable):
            run.deliver(checked=True)
    with pytest.raises(StateError, match="the region is resetting"):
        run.complete_oldest()
    run.region.close("reset")
    again = TwoSinks(place, heard, letters, table=table)
    assert again.batches == 1 and outstanding(place) == []
    for n in (2, 3):
        again.step(dirty(n))
    again.finish()
    wanted = sorted(row for n in (1, 2, 3) for row in good(n))
    if table:
        assert rows_in(place) == wanted and len(rows_in(place, sink=DEAD_LETTERS, column="row")) == 6
    else:
        assert heard.inputs == wanted
        assert len({row["row"] for _, rows in letters.calls for row in rows}) == 6
    assert outstanding(place) == [] and not failures(place, NAME)


# Death


class ToFiles(Behind):
    """Its sink keeps each id's rows in a file, and skips ids that it has: what it has outlives the process."""

    def give(self, output: OutputRecord) -> None:
        """Deliver one output."""
        file = self.region.warehouse.local.root / f"delivered-{output.sink_id}.json"
        heard, self.heard = self.heard, Heard()
        super().give(output)
        [(_, rows)], self.heard = self.heard.calls, heard
        if file.exists():
            assert json.loads(file.read_text()) == rows, "the same id, the same rows"
        else:
            replace_file(file, json.dumps(rows).encode())


@pytest.mark.slow
def test_killed_at_any_moment_with_two_checkpoints_pending_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    moment, ended, expected = 1, -signal.SIGKILL, undisturbed(tmp_path)
    while ended == -signal.SIGKILL:
        root = tmp_path / str(moment)

        def prepare(root: Path = root) -> Behind:
            run = ToFiles(OpenWarehouse.open_writable(str(root)), Heard())
            for n in (1, 2):
                run.step(batch(n))
            return run

        def work(run: Behind) -> None:
            run.finish()
            run.region.close("done")

        ended = prepared_and_killed_at(prepare, work, moment)
        with OpenWarehouse.open_writable(str(root)) as place:
            run = ToFiles(place, Heard())
            while run.batches < 4:
                run.step(batch(run.batches + 1))
            run.finish()
            delivered = [json.loads(file.read_text()) for file in root.glob("delivered-*.json")]
            assert sorted(row["n"] for rows in delivered for row in rows) == inputs([1, 2, 3, 4])
            assert run.region.digest == expected and not failures(place, NAME) and outstanding(place) == []
        moment += stride() ** 2
    assert moment > 60


# Others at work between the preparation and the commit


def _materialize(place: OpenWarehouse) -> None:
    materialize(place, NAME, SINK, 2, id="m", parallelism=1, run=in_order)


OTHERS: Mapping[str, Callable[[OpenWarehouse], object]] = {
    "fork": lambda place: fork(place, NAME, "branch"),
    "truncate": lambda place: delete_checkpoints(place, NAME, [1]),
    "sweep": lambda place: sweep(place, NAME),
    "materialize and truncate": lambda place: (_materialize(place), delete_checkpoints(place, NAME, [1])),
}


@pytest.mark.parametrize(("what", "stored"), [*((what, True) for what in OTHERS), ("sweep", False)])
def test_pending_checkpoints_complete_whatever_others_do_before_their_commit(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, what: str, stored: bool
) -> None:
    run = Behind(place, heard)
    for n in (1, 2):
        run.step(batch(n))
    run.finish()
    for n in (3, 4):
        run.step(batch(n))
    if stored:
        run.region.store()
    OTHERS[what](place)
    if stored:
        run.completed.append(run.region.commit())
    run.finish()
    assert run.region.digest == undisturbed(tmp_path) and heard.inputs == inputs([1, 2, 3, 4])
    assert not failures(place, NAME)
    assert restored_digest(place, NAME, 4, parallelism=3) == run.region.digest
    go_on(place, heard, batches=5)


@pytest.mark.parametrize("stored", [False, True], ids=["prepared", "stored"])
def test_a_rescale_before_their_commit_fences_pending_checkpoints(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, stored: bool
) -> None:
    run = Behind(place, heard)
    run.step(batch(1))
    run.finish()
    for n in (2, 3):
        run.step(batch(n))
    if stored:
        run.region.store()
    rescaled = Behind(place, heard, parallelism=3, max_pending=0)
    rescaled.step_without_rows()
    with pytest.raises(Fenced):
        run.region.commit() if stored else run.complete_oldest()
    run.region.close("fenced")
    go_on(place, heard)
    assert rescaled.region.completed == 2 + stored, "what is stored is complete"
    assert heard.inputs == inputs([1, 2, 3, 4])
    assert restored_digest(place, NAME, 5) == undisturbed(tmp_path)
