"""Requests of a store that are cut, lost, slow or never answered."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from siltstone.errors import ObjectExists, Unreachable
from siltstone.store.base import Store
from tests.fault.hostile import (
    CALLS,
    HASTY,
    MIB,
    ONCE,
    PATIENT,
    Room,
    bytes_of,
    stored_as,
    told,
    whole_or_absent,
)
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault

# --- puts ------------------------------------------------------------------------------------------------------------

CUTS = {
    "before": LOST_REQUEST,
    "amid the request": Fault(request_bytes=150),
    "late in the request": Fault(request_bytes=30_000),
    "before the answer": LOST_ANSWER,
    "amid the answer": Fault(answer_bytes=2),
}


@pytest.mark.parametrize("fault", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("size", [40_000, 0], ids=["small", "large"])
def test_a_put_that_is_cut_is_whole_or_absent_and_the_next_attempt_succeeds(
    room: Room, fault: Fault, size: int
) -> None:
    data = bytes_of(size, size or room.at.large)
    once, patient = room.open(ONCE).once, room.open(PATIENT)
    for number in range(1 if size else 3):
        name = f"s/1/{number}"
        # Of a large one another request is hit each time, down to the last.
        room.proxy.next(fault, 1, every=1 if size else 2 * number + 1)
        there = None
        try:
            assert once.put(name, data) == stored_as(name, data)
            there = True
        except Unreachable as error:
            assert not size or error.transient
            assert once.label in str(error) and "\n" not in str(error)
        assert room.proxy.met >= 1 or there
        room.proxy.clear()
        found = whole_or_absent(room.truth, name, data)
        assert found or not there, "success was said of what is not there"
        if not found:
            assert patient.put(name, data) == stored_as(name, data)
    room.proxy.next(fault, 2)
    assert patient.put("s/2/retried", data) == stored_as("s/2/retried", data)
    assert room.proxy.met == 2
    room.proxy.clear()
    assert whole_or_absent(room.truth, "s/2/retried", data)


@pytest.mark.parametrize("size", [1000, 0], ids=["small", "large"])
def test_an_answer_lost_after_the_write_is_success_for_its_writer_alone(room: Room, size: int) -> None:
    data = bytes_of(1, size or room.at.large)
    store, truth = room.open(PATIENT), room.truth
    last = room.at.write if size else room.at.commit
    room.proxy.next(LOST_ANSWER, 2, holding=last)
    assert store.put("s/mine", data) == stored_as("s/mine", data)
    assert room.proxy.met >= 1
    assert whole_or_absent(truth, "s/mine", data)
    with pytest.raises(ObjectExists, match="object s/mine in"):
        store.put("s/mine", data)  # a second write, whose answers all come, is one too many
    theirs = truth.put("s/theirs", b"foreign")
    for fault in (LOST_ANSWER, LOST_REQUEST):
        room.proxy.clear()
        room.proxy.next(fault, 1, holding=last if fault is LOST_ANSWER else b"")
        with pytest.raises(ObjectExists, match="object s/theirs in"):
            store.put("s/theirs", data)
    room.proxy.clear()
    assert truth.read(theirs).to_pybytes() == b"foreign"
    assert [name for name, _ in truth.list("")] == ["s/mine", "s/theirs"]
    assert list(truth.list_unfinished()) == []


def test_a_writer_in_pieces_outlives_cuts(room: Room) -> None:
    data = bytes_of(2, room.at.large)
    store = room.open(PATIENT)
    room.proxy.next(LOST_ANSWER, every=3, times=2)
    room.proxy.next(LOST_REQUEST, every=4, times=2)
    with store.create("s/pieces") as writer:
        for start in range(0, len(data), 100_000):
            writer.write(memoryview(data)[start : start + 100_000])
    assert room.proxy.met >= 2
    assert writer.stored == stored_as("s/pieces", data)
    room.proxy.clear()
    assert whole_or_absent(room.truth, "s/pieces", data)
    assert list(room.truth.list_unfinished()) == []


def test_a_write_half_done_when_the_server_goes_shows_nothing_and_is_found(room: Room) -> None:
    store, truth = room.open("wait_s=0.005&attempts=2&timeout_s=5"), room.truth
    with pytest.raises(Unreachable, match="s/half"), store.create("s/half") as writer:
        while not list(truth.list_unfinished("s/")):
            writer.write(bytes_of(3, 6 * MIB))
        room.proxy.down()
        for _ in range(10):
            writer.write(bytes_of(4, 6 * MIB))
    room.proxy.up()
    assert writer.stored is None
    assert list(truth.list("")) == []
    [left] = truth.list_unfinished("s/")
    assert left.name == "s/half"
    truth.discard([left])
    assert list(truth.list_unfinished()) == []
    assert store.put("s/half", b"again").bytes == 5


# --- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [60_000, 0], ids=["small", "large"])
def test_a_download_that_is_cut_is_tried_again_or_ends_in_one_error(room: Room, size: int) -> None:
    data = bytes_of(5, size or room.at.large)
    stored = room.truth.put("s/a", data)
    patient, once, chance = room.open(PATIENT), room.open(ONCE), random.Random(5)
    for _ in range(8 if size else 3):
        cut = Fault(answer_bytes=chance.randrange(len(data) // 2))
        start, stop = sorted((chance.randrange(len(data)), len(data)))
        for wanted, read in (
            (data, lambda store: store.read(stored)),
            (data[start:stop], lambda store, at=start, to=stop: store.read_range("s/a", at, to - at)),
        ):
            room.proxy.clear()
            room.proxy.next(cut, 2, holding=room.at.read)
            assert read(patient).to_pybytes() == wanted
            room.proxy.clear()
            room.proxy.next(cut, None, holding=room.at.read)
            with suppress(Unreachable):  # what is shorter than the cut comes whole
                assert read(once).to_pybytes() == wanted
                assert len(wanted) < 2 * len(data) // 3
                continue
            with pytest.raises(Unreachable, match=r"object s/a.*check") as caught:
                read(once)
            assert "\n" not in str(caught.value)


def test_an_answer_that_trickles_is_right(room: Room) -> None:
    data = bytes_of(6, 3000)
    store, stored = room.open(PATIENT), room.truth.put("s/a", data)
    room.proxy.next(Fault(piece_bytes=300, pause_s=0.01), None)
    assert store.read(stored).to_pybytes() == data
    assert store.read_range("s/a", 10, 2000).to_pybytes() == data[10:2010]
    assert list(store.list("")) == [("s/a", 3000)]


# --- no answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silence", [Fault(hangs=True), Fault(deaf=True)], ids=["hangs", "deaf"])
def test_a_server_that_never_answers_is_given_up_in_time(room: Room, silence: Fault) -> None:
    """3 attempts of 0.3 s each, and no more."""
    room.truth.put("s/1/a", b"there")
    store = room.open(HASTY)
    store.delete([store.put("s/1/b", b"").name])  # a connection that needs no greeting any more
    room.proxy.next(silence, None)

    def given_up(call: Callable[[Store], object]) -> None:
        begun = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            call(store)
        took = time.monotonic() - begun
        assert 0.85 < took < 15, f"{took:.2f} s: not three attempts, or not of what was asked for"
        told(room, caught.value, "does not answer in time")

    given_up(CALLS["put"])
    with ThreadPoolExecutor(len(CALLS)) as pool:
        for ended in [pool.submit(given_up, call) for name, call in CALLS.items() if name != "put"]:
            ended.result()
    room.proxy.clear()
    assert whole_or_absent(room.truth, "s/1/new", b"x" * 100) == silence.deaf
    assert whole_or_absent(room.truth, "s/1/a", b"there") or silence.deaf


def test_a_server_that_is_gone_is_told_of(room: Room) -> None:
    store = room.open(PATIENT)
    room.proxy.down()
    for call in CALLS.values():
        with pytest.raises(Unreachable) as caught:
            call(store)
        told(room, caught.value, "cannot be reached")
