"""Checkpoints that are stored, committed and delivered behind the stream, by real threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, Unreachable
from siltstone.run.behind import CheckpointsBehind
from siltstone.run.chains import RunChains
from siltstone.run.protocol_rules import Phase
from tests.behind_run import WAIT_S, Gate, Run, expected, hold_stores, hold_uploads
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY, STREAM, rows


@contextmanager
def running(place: OpenWarehouse, max_pending: int) -> Iterator[Run]:
    run = Run(place, max_pending)
    try:
        yield run
    finally:
        run.behind.close()


@pytest.fixture
def storing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds what a checkpoint stores."""
    return hold_stores(monkeypatch)


def test_steps_go_on_while_a_store_is_slow_until_there_is_no_more_room(
    place: OpenWarehouse, storing: Gate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(place, 2) as run:
        run.step()
        run.step()
        assert storing.came.acquire(timeout=WAIT_S)
        assert not run.behind.has_room and run.region.completed == 0 and run.region.step == 2
        with pytest.raises(StateError, match="2 checkpoints are pending"):
            run.region.begin_step(ends=True)
        storing.open()
        for _ in range(4):
            run.step()
        run.drain()
        assert run.delivered == [1, 2, 3, 4, 5, 6] and not run.errors
    found = [record.digest for record in place.catalog.checkpoints.list(NAME)]
    assert not failures(place, NAME)
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("still") / "w")) as still:
        assert found == expected(still, 6)


def test_outputs_that_wait_for_delivery_take_room_but_no_commit_waits_for_them(place: OpenWarehouse) -> None:
    with running(place, 2) as run:
        run.delivering = Gate()
        run.step()
        assert run.delivering.came.acquire(timeout=WAIT_S)
        run.step()
        with run.turn:
            assert run.turn.wait_for(lambda: run.region.completed == 2, WAIT_S)
        assert run.delivered == [] and not run.behind.has_room
        run.delivering.open()
        run.drain()
        assert run.delivered == [1, 2]


@pytest.mark.parametrize("pending", [1, 2])
def test_a_store_that_fails_ends_the_run_at_its_newest_complete_checkpoint(
    place: OpenWarehouse, storing: Gate, pending: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(place, 2) as run:
        storing.open(1)
        run.step()
        run.drain()
        storing.fails = True
        for _ in range(pending):
            run.step(waits=False)
        storing.open()
        run.drain()
        assert [str(error) for error in run.errors] == ["the test says so"]
        assert run.region.protocol.phase is Phase.RESETTING and run.delivered == [1]
        with pytest.raises(StateError, match="the region is resetting"):
            run.step(waits=False)
    assert place.catalog.checkpoints.last_id(NAME) == 1
    storing.fails = False
    again = RegionRun(place, STREAM, POLICY)
    assert again.batches == 1
    found = [again.step(rows(n)) for n in range(2, 5)]
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("still") / "w")) as still:
        assert [done.digest for done in found if done] == expected(still, 4)[1:]


def test_a_checkpoint_that_nothing_goes_on_from_stays_on_its_way(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs are not delivered. Else a run that ends before the error is noted would take all of it for done."""

    def fail(*_: object) -> None:
        raise Unreachable("the test says so")

    monkeypatch.setattr(RunChains, "advance", fail)
    with running(place, 1) as run:
        run.step()
        with run.turn:
            assert run.turn.wait_for(lambda: run.errors, WAIT_S)
        assert place.catalog.checkpoints.last_id(NAME) == 1 and run.delivered == []
        assert not run.behind.is_empty and not run.behind.has_room


def test_checkpoints_are_uploaded_side_by_side_and_completed_in_order(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uploads = hold_uploads(monkeypatch)
    with running(place, 3) as run:
        for id in (1, 2, 3):
            run.step()
            assert uploads[id].came.acquire(timeout=WAIT_S), "while the others are under way"
        for id in (3, 2):
            uploads[id].open()
        time.sleep(0.1)
        assert run.region.completed == 0 and run.delivered == []
        for id in (1, 4):
            uploads[id].open()
        run.step()
        run.drain()
        assert run.delivered == [1, 2, 3, 4] and not run.errors
    found = [record.digest for record in place.catalog.checkpoints.list(NAME)]
    assert not failures(place, NAME)
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("still") / "w")) as still:
        assert found == expected(still, 4)


def test_a_checkpoint_that_cannot_be_uploaded_takes_none_before_it_with_it(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with monkeypatch.context() as patch, running(place, 3) as run:
        uploads = hold_uploads(patch)
        uploads[2].fails = True
        for id in (1, 2, 3):
            run.step()
            assert uploads[id].came.acquire(timeout=WAIT_S)
        for id in (3, 2):
            uploads[id].open()
        time.sleep(0.1)
        assert run.region.protocol.phase is Phase.OPEN and not run.errors
        uploads[1].open()
        run.drain()
        assert [str(error) for error in run.errors] == ["the test says so"] and run.region.completed == 1
        run.behind.close()
        run.region.close("reset")
    again = RegionRun(place, STREAM, POLICY)
    assert again.batches == 1
    for n in range(2, 5):
        again.step(rows(n))
    again.region.close("done")
    assert not failures(place, NAME)
    found = [record.digest for record in place.catalog.checkpoints.list(NAME)]
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("still") / "w")) as still:
        assert found == expected(still, 4)


@pytest.mark.parametrize("fails", ["store", "sink"])
def test_what_fails_behind_the_stream_is_why_its_step_in_progress_is_refused(
    place: OpenWarehouse, storing: Gate, fails: str
) -> None:
    """The step notes its own error first, since it has the turn."""
    with running(place, 2) as run:
        gate = storing
        if fails == "sink":
            storing.open()
            gate = run.delivering = Gate()
        gate.fails = True
        run.step()
        assert gate.came.acquire(timeout=WAIT_S)
        with run.turn:
            assert run.turn.wait_for(lambda: fails == "store" or run.region.completed == 1, WAIT_S)
            run.region.begin_step(ends=True)
            gate.open()
            until_s = time.monotonic() + WAIT_S
            while run.region.protocol.phase is Phase.OPEN and time.monotonic() < until_s:
                time.sleep(0.01)
            with pytest.raises(StateError, match="the region is resetting") as refused:
                run.region.acknowledge("by_key", [])
            run.fail(refused.value)
        run.behind.close()
        assert len(run.errors) == 2 and {str(error) for error in run.errors} == {"the test says so"}


@pytest.mark.parametrize("which", ["siltstone-store", "siltstone-deliver", "siltstone-upload"])
def test_where_no_thread_can_be_started_closing_waits_for_those_that_were(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith(which):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    run = Run(place, 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run.step()
    run.behind.close()
    assert not [each.name for each in threading.enumerate() if each.name.endswith(f"-{NAME}")]


def test_a_thread_that_cannot_begin_fails_the_run(place: OpenWarehouse) -> None:
    """Else the stream would wait for ever for room."""

    def cannot(_: Callable[[], None]) -> Callable[[], None]:
        def fail() -> None:
            raise Unreachable("no session here")

        return fail

    run = Run(place, 1)
    run.behind = CheckpointsBehind(run.region, run.turn, lambda _: None, run.fail, cannot)
    run.step()
    run.drain()
    run.behind.close()
    assert {str(error) for error in run.errors} == {"no session here"}


def test_a_newer_run_fences_what_is_pending(place: OpenWarehouse, storing: Gate) -> None:
    with running(place, 2) as run:
        run.step()
        run.step()
        assert storing.came.acquire(timeout=WAIT_S)
        newer = RegionRun(place, STREAM, POLICY)
        storing.open()
        run.drain()
        assert [type(error).__name__ for error in run.errors] == ["Fenced"] and run.delivered == []
    assert newer.batches == 0
    newer.step(rows(1))
    assert [record.epoch for record in place.catalog.checkpoints.list(NAME)] == [2]


def test_closing_leaves_what_is_not_stored_to_the_next_run(place: OpenWarehouse, storing: Gate) -> None:
    run = Run(place, 2)
    run.step()
    run.step()
    assert storing.came.acquire(timeout=WAIT_S)
    closing = threading.Thread(target=run.behind.close)
    closing.start()
    while not run.behind.ended:
        pass
    storing.open()
    closing.join(WAIT_S)
    assert not closing.is_alive() and place.catalog.checkpoints.last_id(NAME) == 0
    assert RegionRun(place, STREAM, POLICY).batches == 1, "the one whose manifest was on its way is complete"
