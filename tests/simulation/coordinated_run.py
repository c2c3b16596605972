"""One run of a stream as `coordination` has it: a real coordinator, and what it talks to, as small as can be."""

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from siltstone.errors import Fenced, StateError, Unreachable
from siltstone.run.coordinator import Coordinator
from siltstone.run.protocol_rules import Checkpoint, Interval, open_region
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.coordination import World

OPERATORS = ("a", "b")
RESETS, STEPS = 3, 6


class LostState(StateError):
    """A task's working state is gone, and steps are in no checkpoint."""


@dataclass(frozen=True)
class Committed:
    """What the catalog has of a checkpoint: its last input batch, the state it holds, the objects it needs."""

    epoch: int
    steps: tuple[int, ...]
    batches: tuple[int, ...]
    state: int
    objects: frozenset[str]


@dataclass
class Place:
    """Store, catalog and sink. Methods are called between two stops of a process, so each is atomic."""

    objects: dict[str, tuple[int, int]] = field(default_factory=dict)
    """name -> the epoch and the checkpoint in it"""
    epoch: int = 0
    ended: bool = True
    checkpoints: dict[int, Committed] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    outstanding: dict[int, str] = field(default_factory=dict)
    delivered: list[tuple[int, str]] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return len(self.checkpoints)

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} was fenced by {self.epoch}")

    def begin(self) -> int:
        self.epoch, self.ended = self.epoch + 1, False
        return self.epoch

    def end(self, epoch: int) -> None:
        self.ended = self.ended or epoch == self.epoch

    def commit(self, id: int, record: Committed, output: str) -> None:
        self.check_epoch(record.epoch)
        if id != self.newest + 1 or record.objects & self.tombstones:
            raise StateError(f"checkpoint {id} cannot be committed")
        self.checkpoints[id], self.outstanding[id] = record, output

    def mark(self, epoch: int, id: int) -> None:
        self.check_epoch(epoch)
        self.outstanding.pop(id, None)

    def bury(self, names: list[str]) -> list[str]:
        """Write down which of some objects found in the store can never be referred to; those may be deleted."""
        referred = {name for record in self.checkpoints.values() for name in record.objects}
        gone = [name for name in names if name not in referred and self._is_orphan(*self.objects[name])]
        self.tombstones.update(gone)
        return gone

    def _is_orphan(self, epoch: int, checkpoint: int) -> bool:
        return epoch < self.epoch or checkpoint <= self.newest or self.ended


@dataclass
class Pending:
    """A checkpoint that is prepared: its id, what the catalog will have of it, and what its steps have logged."""

    id: int
    record: Committed
    logged: list[str]
    uploaded: bool = False
    stored: bool = False


def state_after(before: int, batch: int) -> int:
    """What a batch of the input makes of the state."""
    return hash((before, batch))


class Writer:
    """One process that runs the stream, and resets it after failures that are not its own."""

    def __init__(self, world: "World", process: Process, chance: random.Random) -> None:
        self.world, self.place, self.process, self.chance = world, world.place, process, chance
        self.coordinator: Coordinator | None = None
        self.prepared: dict[tuple[int, int], tuple[int, ...]] = {}
        self.now_s = 0.0

    def run(self) -> None:
        """Run epoch after epoch, as `run_with_resets` does."""
        for attempt in range(RESETS + 1):
            self.world.counts["resets"] += bool(attempt)
            try:
                self._run_epoch()
                return
            except (Unreachable, LostState):
                if attempt == RESETS:
                    raise

    def _run_epoch(self) -> None:
        place, call = self.place, self.process.call
        with call("begin an epoch"):
            self.process.epoch = epoch = place.begin()
        with call("read the newest checkpoint"):
            last = place.checkpoints.get(place.newest)
            self.completed, step = place.newest, last.steps[-1] if last else 0
            self.state = last.state if last else 0
            self.batch = max((b for c in place.checkpoints.values() for b in c.batches), default=0)
        interval = Interval(self.chance.choice((1, 1, 2, 3)), self.chance.choice((None, None, 20.0)), idle_s=10.0)
        self.max_pending = self.chance.choice((0, 1, 2, 3))
        region = open_region(epoch, OPERATORS, self.completed, step, max(1, self.max_pending))
        self.coordinator = Coordinator(region, interval, lambda: self.now_s)
        self.pending: list[Pending] = []
        self.batches: list[int] = []
        self.logs = self.chance.random() < 0.7
        self.logged: list[str] = []
        try:
            self._deliver()
            for _ in range(self.chance.randint(1, STEPS)):
                self.now_s += self.chance.choice((1.0, 5.0, 30.0))
                if self.coordinator.is_overdue():
                    self.world.counts["overdue"] += 1
                    self._step(ends=True)
                self._step(takes_batch=True)
            self._complete_pending()
            if self.batches:
                self._step(ends=True)
                self._complete_pending()
        except Exception as error:
            self.coordinator.fail(error)
            raise
        finally:
            self.coordinator.end()
            with call("end the run"):
                place.end(epoch)

    def _step(self, *, ends: bool | None = None, takes_batch: bool = False) -> None:
        coordinator = self.coordinator
        assert coordinator is not None
        ends = coordinator.ends_next() if ends is None else ends
        while ends and not coordinator.region.has_room:
            self._complete_oldest()
        if coordinator.region.logged and self.world.loses_state and self.chance.random() < 0.05:
            self._roll_forward(coordinator)
        running = coordinator.begin_step(ends=ends)
        if takes_batch:
            self.batch += 1
            self.batches.append(self.batch)
            self.state = state_after(self.state, self.batch)
        handed = []
        for operator in OPERATORS:
            if running.ends or self.logs:
                handed += [self._put(f"segment-{operator}") for _ in range(self.chance.choice((1, 1, 2)))][-1:]
            self._go_on_behind()
            coordinator.acknowledge(operator)
        self.logged += handed
        if running.ends:
            self._prepare(handed if self.chance.random() < 0.3 else list(self.logged))
        if not self.max_pending or self.chance.random() < 0.2:
            self._complete_pending()

    def _roll_forward(self, coordinator: Coordinator) -> None:
        """The state of the steps since the newest complete checkpoint is gone: it comes from the log, or they do."""
        if not self.logs:
            raise LostState("no longer on this machine")
        with self.process.call("read the log"):
            every = [*self.logged, *(name for pending in self.pending for name in pending.logged)]
            lost = [name for name in every if name not in self.place.objects]
            assert not lost or self.process.epoch != self.place.epoch, "a sweep took what was logged"
            self.world.counts["rolled forward"] += 1
        if lost:
            raise LostState("a newer run has swept the log")

    def _prepare(self, objects: list[str]) -> None:
        assert self.coordinator is not None
        prepared = self.coordinator.region.pending[-1]
        self.prepared[self.process.epoch, prepared.id] = prepared.steps
        record = Committed(self.process.epoch, prepared.steps, tuple(self.batches), self.state, frozenset(objects))
        self.pending.append(Pending(prepared.id, record, self.logged))
        self.batches, self.logged = [], []
        self.world.counts[f"{len(self.pending)} pending"] += 1

    def _go_on_behind(self) -> None:
        """What the threads behind the stream may do while a step is running."""
        for pending in self.pending:
            if not pending.uploaded and self.chance.random() < 0.4:
                self._upload(pending)
                self.world.counts["uploaded beside another"] += pending is not self.pending[0]
        if self.pending and not self.pending[0].stored and self.chance.random() < 0.4:
            self._store()
        if self.coordinator and self.coordinator.region.completed and self.chance.random() < 0.1:
            self._deliver()

    def _upload(self, pending: Pending) -> None:
        assert self.coordinator is not None
        self.coordinator.begin_storing(pending.id)
        self._add(pending, "output")
        pending.uploaded = True

    def _add(self, pending: Pending, what: str) -> None:
        stored = self._put(what, pending.id)
        pending.record = replace(pending.record, objects=pending.record.objects | {stored})

    def _store(self) -> None:
        assert self.coordinator is not None
        pending, region = self.pending[0], self.coordinator.region

        def store(checkpoint: Checkpoint) -> None:
            if not pending.uploaded:
                self._upload(pending)
            self._add(pending, "manifest")
            assert checkpoint.id == pending.id

        assert region.pending[0].id == pending.id
        self.coordinator.store(store)
        pending.stored = True

    def _complete_oldest(self) -> None:
        assert self.coordinator is not None
        pending = self.pending[0]
        if not pending.stored:
            self._store()

        beside: list[Exception] = []

        def commit(checkpoint: Checkpoint) -> None:
            with self.process.call("commit"):
                self.place.commit(checkpoint.id, pending.record, str(list(pending.record.batches)))
            if self.chance.random() < 0.2:  # the thread that delivers does not wait for the answer
                try:
                    self._deliver()
                except (Unreachable, Fenced) as error:
                    beside.append(error)
                with self.process.call("answer the commit"):
                    self.world.counts["failed beside a commit"] += len(beside)

        self.completed = self.coordinator.commit(commit).id
        if beside:
            raise beside[0]
        del self.pending[0]
        self._truncate(set(pending.logged) - pending.record.objects)
        self._deliver()

    def _complete_pending(self) -> None:
        while self.pending:
            self._complete_oldest()

    def _truncate(self, names: set[str]) -> None:
        """Delete what was logged before a base, as `ConsistentRegion` does."""
        with suppress(Unreachable):
            for name in sorted(names):
                with self.process.call(f"delete object {name}"):
                    self.place.objects.pop(name, None)

    def _put(self, what: str, checkpoint: int | None = None) -> str:
        epoch, checkpoint = self.process.epoch, checkpoint or self.completed + len(self.pending) + 1
        name = f"{epoch}/{checkpoint}/{what}-{self.chance.randrange(1 << 40)}"
        with self.process.call(f"write object {name}"):
            self.place.objects[name] = epoch, checkpoint
        return name

    def _deliver(self) -> None:
        assert self.coordinator is not None
        self.coordinator.deliver(self._give)

    def _give(self) -> bool:
        with self.process.call("read the outbox"):
            outstanding = sorted(self.place.outstanding.items())
        for id, output in outstanding:
            with self.process.call("check the epoch"):
                self.place.check_epoch(self.process.epoch)
            with self.process.call("give rows to the sink"):
                self.place.delivered.append((id, output))
            with self.process.call("mark as delivered"):
                self.place.mark(self.process.epoch, id)
        return True
