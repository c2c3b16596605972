"""A run whose checkpoints are completed behind it by real threads, which can be held."""

import threading
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.run.behind import CheckpointsBehind
from siltstone.run.pending import Completed, PendingCheckpoint
from siltstone.stream import Stream
from tests.region_run import RegionRun
from tests.sums import POLICY, STREAM, rows

WAIT_S = 20.0


class Gate:
    """Lets so many calls through, and holds the next ones until it is opened further; some fail instead."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.came = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def open(self, times: int = 1000) -> None:
        self._go.release(times)

    def __call__(self) -> None:
        self.came.release()
        assert self._go.acquire(timeout=WAIT_S)
        if self.fails:
            raise Unreachable("the test says so")


class Run:
    """A run whose checkpoints are completed behind it."""

    def __init__(self, place: OpenWarehouse, max_pending: int, stream: Stream = STREAM) -> None:
        self.steps = RegionRun(place, stream, POLICY, max_pending=max_pending)
        self.region = self.steps.region
        self.turn = threading.Condition(threading.Lock())
        self.delivered: list[int] = []
        self.errors: list[BaseException] = []
        self.delivering = Gate()
        self.delivering.open()
        self.behind = CheckpointsBehind(self.region, self.turn, self._deliver, self.fail)

        self.region.outbox.deliver = self._give

    def _deliver(self, completed: Completed) -> None:
        self.region.deliver({})
        self.delivered.append(completed.id)

    def _give(self, *_: Any, **__: Any) -> bool:
        self.delivering()
        return True

    def fail(self, error: BaseException) -> None:
        self.errors.append(self.region.fail(error))

    def step(self, *, waits: bool = True) -> None:
        """One micro-batch that ends in a checkpoint."""
        with self.turn:
            if waits:
                assert self.turn.wait_for(lambda: self.behind.has_room or self.errors, WAIT_S)
            self.steps.step(rows(self.steps.batches + 1))
            self.behind.add()

    def drain(self) -> None:
        with self.turn:
            assert self.turn.wait_for(lambda: self.behind.is_empty or self.errors, WAIT_S)


def hold_stores(patch: pytest.MonkeyPatch) -> Gate:
    """Hold what a checkpoint stores at a gate, as long as the patch lasts."""
    gate, store = Gate(), PendingCheckpoint.store

    def held(self: PendingCheckpoint, *args: Any) -> None:
        gate()
        store(self, *args)

    patch.setattr(PendingCheckpoint, "store", held)
    return gate


def hold_uploads(patch: pytest.MonkeyPatch) -> dict[int, Gate]:
    """Hold what checkpoints 1 to 4 store before their manifests, each at a gate, as long as the patch lasts."""
    gates, upload = {id: Gate() for id in range(1, 5)}, PendingCheckpoint.upload

    def held(self: PendingCheckpoint, *args: Any) -> None:
        gates[self.id]()
        upload(self, *args)

    patch.setattr(PendingCheckpoint, "upload", held)
    return gates


def expected(place: OpenWarehouse, batches: int) -> list[str]:
    run = RegionRun(place, STREAM, POLICY)
    return [done.digest for n in range(1, batches + 1) if (done := run.step(rows(n)))]
