"""The store contract on a hostile network: whole or not at all, durable once said, one clear error, never wrong bytes.

Real servers, with `tests.proxy` between them and the store; what they hold in truth is looked at past the proxy.
"""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.store.base import Store
from siltstone.store.open import open_store
from tests.examples import is_thorough
from tests.fault.hostile import (
    ASKED,
    BUSY,
    CALLS,
    NO_GREETING,
    Room,
    hostile,
    stored_as,
    whole_or_absent,
)
from tests.fault.reference import small
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, restored_digest
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault
from tests.region_run import RegionRun

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
    """Each attempt at step 4 gets a request further (after the first few: four, but in `make test-thorough`); the last
    gets through, and all is as on a filesystem."""
    reference, policy = small(), policy_by_name(DEFAULT_POLICY)
    with OpenWarehouse.open_writable(warehouse) as place:

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
            run = RegionRun(place, SMALL, policy, parallelism, upload=UploadOptions(checkpoint_timeout_s=2))
            done = run.region.completed
            assert done == 0 or run.region.digest == reference.digests[done - 1]
            return run

        run = RegionRun(place, SMALL, policy, 2)
        for rows in purchases()[:3]:
            run.step(rows)
        run.region.close("done")
        run, fatal = resumed(2), 0
        while dies_after(run, fatal):
            fatal += 1 if is_thorough() or fatal < 4 else 4
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
    with OpenWarehouse.open_writable(warehouse.replace("attempts=2", "attempts=12")) as place:
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
