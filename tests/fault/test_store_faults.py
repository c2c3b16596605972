"""The store contract on a hostile network: whole or not at all, durable once said, one clear error, never wrong bytes.

Real servers, with `tests.proxy` between them and the store; what they hold in truth is looked at past the proxy.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.keyvalue.protocol import MAGIC
from siltstone.store.open import open_store
from siltstone.store.retry import Retrying
from tests import servers, store_cases_s3
from tests.fault.reference import small
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, restored_digest
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy, http, resp
from tests.redis_server import shared_server
from tests.region_run import RegionRun

PATIENT = "wait_s=0.005&attempts=5&timeout_s=5"
ONCE = "retry=none&timeout_s=5"
HASTY = "wait_s=0.005&attempts=3&timeout_s=0.3"
MIB = 1 << 20
NO_GREETING = rb"\A(?![\s\S]*SETINFO)"
"""what Redis is asked besides, when a connection begins, is of no account"""
ASKED = rb"\r\nINFO\r\n"


@dataclass(frozen=True)
class Hostile:
    """A server behind a proxy.

    Attributes:
        write, commit, read: what the request that stores a small object, that lets a large one appear, and that
            reads one, holds in its first bytes; regular expressions.
        large: bytes of an object that takes several requests.
        busy: refusals that may pass.
    """

    kind: str
    proxy: Proxy
    server: str
    write: bytes
    commit: bytes
    read: bytes
    large: int
    busy: tuple[Fault, ...]

    def url(self, room: str, options: str, *, straight: bool = False) -> str:
        """A store of its own in `room`, through the proxy or past it."""
        host = self.server if straight else f"127.0.0.1:{self.proxy.port}"
        if self.kind == "redis":
            return f"redis://{host}/0?prefix={room}&chunk_bytes=65536&{options}"
        parts = f"part_bytes={5 * MIB}&put_bytes={10 * MIB}"
        return f"s3://hostile/{room}?endpoint=http://{host}&region=us-east-1&{parts}&{options}"


REFUSALS = (http(503, "SlowDown"), http(500, "InternalError"), http(429, "TooManyRequests"))
BUSY = (resp("LOADING Redis is loading the dataset in memory"), resp("BUSY Redis is busy running a script"))


@cache
def hostile(kind: str) -> Hostile:
    """One a run of each kind, its proxy as long-lived as its server."""
    if kind == "redis":
        server = f"127.0.0.1:{shared_server().port}"
        return Hostile(kind, Proxy(shared_server().port), server, b"HSETNX", MAGIC, b"HMGET|EVAL", 300_000, BUSY)
    s3 = servers.moto() if kind == "s3-moto" else servers.versitygw()
    store_cases_s3.raw_client(s3).create_bucket(Bucket="hostile")
    server = urlsplit(s3.endpoint)
    assert server.port
    return Hostile(
        kind, Proxy(server.port), server.netloc, b"PUT ", rb"POST \S+\?uploadId=", b"GET ", 11 * MIB, REFUSALS
    )


@dataclass(frozen=True)
class Room:
    """A store that holds nothing yet, on a hostile server."""

    at: Hostile
    name: str

    @property
    def proxy(self) -> Proxy:
        return self.at.proxy

    def open(self, options: str) -> Retrying:
        store = open_store(self.at.url(self.name, options))
        assert isinstance(store, Retrying)
        return store

    @property
    def truth(self) -> Store:
        """What the server holds, past the proxy."""
        return open_store(self.at.url(self.name, PATIENT, straight=True))


_numbers = count()


@pytest.fixture(params=[*store_cases_s3.factories(), "redis"])
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    at = hostile(request.param)
    at.proxy.clear()
    room = Room(at, f"room{next(_numbers)}")
    store = room.open(PATIENT)
    store.put("warm/up", b"")  # connections, scripts and what is asked of a server once
    store.delete(["warm/up"])
    at.proxy.clear()
    yield room
    at.proxy.clear()


def stored_as(name: str, data: bytes) -> StoredObject:
    return StoredObject(name, len(data), checksum_of(data))


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def whole_or_absent(store: Store, name: str, data: bytes) -> bool:
    """Is the object there? If it is, it is whole."""
    listed = dict(store.list(name))
    if name in listed:
        assert listed == {name: len(data)}
        assert store.read(stored_as(name, data)).to_pybytes() == data
        return True
    with pytest.raises(CorruptObject, match=r"missing"):
        store.read_range(name, 0, 1)
    return False


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
    assert list(truth.unfinished()) == []


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
    assert list(room.truth.unfinished()) == []


def test_a_write_half_done_when_the_server_goes_shows_nothing_and_is_found(room: Room) -> None:
    store, truth = room.open("wait_s=0.005&attempts=2&timeout_s=5"), room.truth
    with pytest.raises(Unreachable, match="s/half"), store.create("s/half") as writer:
        while not list(truth.unfinished("s/")):
            writer.write(bytes_of(3, 6 * MIB))
        room.proxy.down()
        for _ in range(10):
            writer.write(bytes_of(4, 6 * MIB))
    room.proxy.up()
    assert writer.stored is None
    assert list(truth.list("")) == []
    [left] = truth.unfinished("s/")
    assert left.name == "s/half"
    truth.discard([left])
    assert list(truth.unfinished()) == []
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

CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("s/1/new", b"x" * 100),
    "read": lambda store: store.read(stored_as("s/1/a", b"there")),
    "read_range": lambda store: store.read_range("s/1/a", 0, 3),
    "list": lambda store: list(store.list("s/")),
    "delete": lambda store: store.delete(["s/1/a"]),
    "unfinished": lambda store: list(store.unfinished()),
    "check": lambda store: store.check(writable=True),
}


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


def told(room: Room, error: Unreachable, why: str) -> None:
    """One line for people: which store, why, what to check."""
    said = str(error)
    assert error.exit_code == 3 and "\n" not in said
    assert store_label(room) in said or str(room.proxy.port) in said
    assert why in said and "check" in said
    assert "timeout_s" not in said and "?" not in said, "options are nobody's business"


def store_label(room: Room) -> str:
    return room.open(PATIENT).label


# --- a server that asks for patience ---------------------------------------------------------------------------------


def test_throttling_is_met_with_waits(room: Room) -> None:
    store = room.open("retry=fixed&wait_s=0.01&attempts=4&timeout_s=5")
    room.truth.put("s/1/a", b"there")
    store.delete([store.put("s/1/b", b"").name])
    for name, call in CALLS.items():
        room.proxy.clear()
        for fault in room.at.busy:
            room.proxy.next(fault, 1, holding=NO_GREETING)
        begun = time.monotonic()
        call(store)
        assert room.proxy.met == len(room.at.busy)
        assert time.monotonic() - begun >= len(room.at.busy) * 0.01, name
    room.proxy.clear()
    for fault in room.at.busy:
        room.proxy.clear()
        room.proxy.next(fault, None, holding=NO_GREETING)
        with pytest.raises(Unreachable, match="it may pass: try again") as caught:
            store.put("s/1/late", b"throttled")
        assert caught.value.transient
        assert sum(bool(re.search(room.at.write, head)) for head in room.proxy.heads) == 4
    room.proxy.clear()
    assert not whole_or_absent(room.truth, "s/1/late", b"throttled")


def test_a_redis_that_is_busy_when_asked_how_durable_it_is_is_asked_again() -> None:
    at = hostile("redis")
    at.proxy.clear()
    store = open_store(at.url("durable", "retry=none&timeout_s=4"))
    at.proxy.next(BUSY[1], holding=ASKED)
    with pytest.raises(Unreachable, match="BUSY") as caught:
        store.put("a", b"not to be taken for durable")
    assert caught.value.transient
    assert list(store.list("")) == []
    store.put("a", b"by now it has said so")
    assert at.proxy.met == 1 and sum(bool(re.search(ASKED, head)) for head in at.proxy.heads) == 3


# --- all at once -----------------------------------------------------------------------------------------------------


class Worker:
    """One of several that use a store at the same time; it knows what of its own must be there.

    `known` holds the bytes of each object, None where there is none; a name in doubt, since its last call failed, is
    in `doubtful` with all that it may be.
    """

    def __init__(self, store: Store, number: int, rounds: int) -> None:
        self.store, self.number, self.rounds = store, number, rounds
        self.chance = random.Random(number)
        self.known: dict[str, bytes | None] = {}
        self.doubtful: dict[str, set[bytes | None]] = {}
        self.won: list[str] = []

    def run(self) -> None:
        for turn in range(self.rounds):
            name = f"w{self.number}/{turn % 3}/{turn}"
            self._put(name)
            self._contest(turn)
            victim = self.chance.choice([*self.known])
            self._read(victim)
            if turn % 3 == 0:
                self._delete(victim)
            if turn % 4 == 0:
                self._list()

    def _put(self, name: str) -> None:
        data = self.chance.randbytes(self.chance.choice([0, 10, 2000, 200_000]))
        try:
            assert self.store.put(name, data) == stored_as(name, data)
            self.known[name] = data
        except Unreachable as error:
            assert not isinstance(error, ObjectExists), "it was our own"
            self.doubtful[name] = {data, None}
            self.known.setdefault("none", None)

    def _contest(self, turn: int) -> None:
        """All want the same name; one gets it."""
        with suppress(Unreachable):
            self.store.put(f"contested/{turn}", str(self.number).encode() * 100)
            self.won.append(f"contested/{turn}")

    def _read(self, name: str) -> None:
        data = self.known[name]
        try:
            found = self.store.read(stored_as(name, data or b"")).to_pybytes()
            assert found == data
        except CorruptObject as error:
            assert data is None and "missing" in str(error)
        except Unreachable:
            pass

    def _delete(self, name: str) -> None:
        data = self.known.pop(name)
        try:
            self.store.delete([name])
            self.known[name] = None
        except Unreachable:
            self.doubtful[name] = {data, None}
            self.known.setdefault("none", None)

    def _list(self) -> None:
        with suppress(Unreachable):
            found = dict(self.store.list(f"w{self.number}/"))
            sure = {name: len(data) for name, data in self.known.items() if data is not None}
            assert {n: size for n, size in found.items() if n not in self.doubtful} == sure


def test_under_random_faults_what_was_said_is_true(room: Room) -> None:
    store = room.open("wait_s=0.002&attempts=4&timeout_s=1")
    chance = random.Random(f"random {room.at.kind}")
    faults = {LOST_REQUEST: 0.05, LOST_ANSWER: 0.05, Fault(answer_bytes=40): 0.04, Fault(request_bytes=200): 0.03}
    faults |= {room.at.busy[0]: 0.05, Fault(delay_s=0.02): 0.05, Fault(piece_bytes=5000, pause_s=0.001): 0.02}
    faults |= {Fault(hangs=True): 0.005, Fault(deaf=True): 0.005}
    room.proxy.sometimes(chance, faults)
    workers = [Worker(store, number, 20) for number in range(4)]
    with ThreadPoolExecutor(len(workers)) as pool:
        for ended in [pool.submit(worker.run) for worker in workers]:
            ended.result()
    assert room.proxy.met > 50
    room.proxy.clear()
    truth = room.truth
    listed = dict(truth.list(""))
    for worker in workers:
        possible = {name: {data} for name, data in worker.known.items()} | worker.doubtful
        for name, data in possible.items():
            present = {d for d in data if d is not None}
            assert name in listed if None not in data else True
            if name in listed:
                [whole] = present
                assert truth.read(stored_as(name, whole)).to_pybytes() == whole
        assert {n for n in listed if n.startswith(f"w{worker.number}/")} <= possible.keys()
    won = [name for worker in workers for name in worker.won]
    assert len(won) == len(set(won)), "two were told that they had won"
    for name in (n for n in listed if n.startswith("contested/")):
        whole = [str(worker.number).encode() * 100 for worker in workers]
        mine = [w for w, worker in zip(whole, workers, strict=True) if name in worker.won] or whole
        found = truth.read_range(name, 0, listed[name]).to_pybytes()
        assert found in mine
    assert set(won) <= listed.keys()
    assert sum(len(worker.doubtful) for worker in workers) < 20, "retries are to get most of it through"


# --- a checkpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warehouse(room: Room, tmp_path: Path) -> str:
    return room.at.url(room.name, f"wait_s=0.002&attempts=2&timeout_s=5&local={tmp_path / 'local'}")


def test_a_store_that_dies_at_any_request_of_a_checkpoint_leaves_no_half_of_it(room: Room, warehouse: str) -> None:
    """Each attempt at step 4 gets one request further; the last gets through, and all is as on a filesystem."""
    reference, policy = small(), policy_by_name(DEFAULT_POLICY)
    with OpenWarehouse.writable(warehouse) as place:

        def dies_after(run: RegionRun, requests: int) -> bool:
            """Whether the store's death was felt in the next step; nothing of that may be seen."""
            done = run.region.completed
            room.proxy.down_after(requests)
            try:
                run.step(purchases()[done])
            except Unreachable as error:
                assert place.warehouse.label in str(error) or f":{room.proxy.port}" in str(error)
            else:
                room.proxy.up()
                return False
            with pytest.raises(Unreachable):
                place.warehouse.store.check(writable=True)
            assert place.catalog.checkpoints.last_id(SMALL.name) == done
            assert [s.step for s in place.catalog.input_log.list(SMALL.name, done)] == list(range(1, done + 1))
            room.proxy.up()
            run.region.close("failed")
            return True

        def resumed(parallelism: int) -> RegionRun:
            run = RegionRun(place, SMALL, policy, parallelism)
            done = run.region.completed
            assert done == 0 or run.region.digest == reference.digests[done - 1]
            return run

        run = resumed(2)
        for rows in purchases()[:3]:
            run.step(rows)
        fatal = 0
        while dies_after(run, fatal):
            fatal += 1
            run = resumed(2)
        assert fatal >= 2, "a checkpoint is a manifest and what it names"
        run.region.close("done")
        restoring = 0  # by other parallelism: what the subtasks have is of no use to them
        while dies_after(run := resumed(3), restoring):
            restoring = restoring * 2 + 3
        assert restoring > fatal
        run.step(purchases()[5])
        assert [c.digest for c in place.catalog.checkpoints.list(SMALL.name)] == list(reference.digests[:6])
        assert failures(place, SMALL.name) == []
        for checkpoint in (4, 6):
            restored_digest(place, SMALL.name, checkpoint)


def test_steps_on_a_bad_network_are_those_on_a_filesystem(room: Room, warehouse: str) -> None:
    reference = small()
    with OpenWarehouse.writable(warehouse.replace("attempts=2", "attempts=12")) as place:
        chance = random.Random(9)
        room.proxy.sometimes(chance, {LOST_REQUEST: 0.04, LOST_ANSWER: 0.04, room.at.busy[0]: 0.04})
        run = RegionRun(place, SMALL, policy_by_name(DEFAULT_POLICY), parallelism=2)
        outputs: list[pa.Table] = []
        for rows in purchases()[:6]:
            run.step(rows)
            outputs.append(run.outputs["accounts"])
        assert failures(place, SMALL.name) == []
        assert room.proxy.met > 5
        assert [c.digest for c in place.catalog.checkpoints.list(SMALL.name)] == list(reference.digests[:6])
