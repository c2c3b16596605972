"""Coordinators of one stream against a store, a catalog, tasks and a sink in memory, in any order of events.

The coordinators and the protocol are the real ones; what they talk to is as small as can be, so that very many
schedules can be run. `lifecycle_machine` has the real catalog, formats and life cycle, and far fewer schedules.

    python -m tests.simulation.coordination --schedules 100000 --seed 1
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from siltstone.errors import Fenced, StateError, Unreachable
from siltstone.run.coordinator import Coordinator
from siltstone.run.protocol_rules import Checkpoint, CheckpointState, Interval, Phase, open_region
from tests.simulation.processes import Process

OPERATORS = ("a", "b")
WRITERS, RESETS, STEPS = 3, 3, 6
ACTIONS = ("run", "run", "sweep", *["go"] * 10, "finish", "kill", "fail", "fail")
STOPS = (1, 1, 2, 3, 5, 8, 13, 30)


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
        self.max_pending = self.chance.choice((0, 1, 2))
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
        except Exception:
            self.coordinator.fail()
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
            coordinator.fail()
            raise LostState("no longer on this machine")
        with self.process.call("read the log"):
            every = [*self.logged, *(name for pending in self.pending for name in pending.logged)]
            lost = [name for name in every if name not in self.place.objects]
            assert not lost or self.process.epoch != self.place.epoch, "a sweep took what was logged"
            self.world.counts["rolled forward"] += 1
        if lost:
            coordinator.fail()
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
        if self.pending and not self.pending[0].stored and self.chance.random() < 0.4:
            self._store()
        if self.coordinator and self.coordinator.region.completed and self.chance.random() < 0.1:
            self._deliver()

    def _store(self) -> None:
        assert self.coordinator is not None
        pending, region = self.pending[0], self.coordinator.region

        def store(checkpoint: Checkpoint) -> None:
            stored = {self._put("output", pending.id), self._put("manifest", pending.id)}
            pending.record = replace(pending.record, objects=pending.record.objects | stored)
            assert checkpoint.id == pending.id and checkpoint.state is CheckpointState.PENDING

        assert region.pending[0].id == pending.id
        self.coordinator.store(store)
        pending.stored = True

    def _complete_oldest(self) -> None:
        assert self.coordinator is not None
        pending = self.pending[0]
        if not pending.stored:
            self._store()

        def commit(checkpoint: Checkpoint) -> None:
            with self.process.call("commit"):
                self.place.commit(checkpoint.id, pending.record, str(list(pending.record.batches)))

        self.completed = self.coordinator.commit(commit).id
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


class LostState(StateError):
    """A task's working state is gone, and steps are in no checkpoint."""


class World:
    """All there is in one schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.place, self.counts = Place(), Counter[str]()
        self.processes: list[Process] = []
        self.writers: dict[Process, Writer] = {}
        self.seen: dict[int, Committed] = {}
        self.loses_state = True

    def perform(self) -> None:
        """Run one schedule; whoever is left is killed or finishes, and then one more run leaves nothing behind."""
        try:
            self._start("run").resume(self.chance.choice(STOPS))
            for _ in range(self.chance.randint(6, 14)):
                self._act(self.chance.choice(ACTIONS))
                self.check()
            kill = self.chance.random() < 0.5
            for process in self.processes:
                process.kill() if kill else process.finish()
                self.check()
            self.loses_state = False
            for kind in ("run", "sweep"):
                self._start(kind).finish()
                self.check()
            self._check_end()
        finally:
            for process in self.processes:
                process.kill()

    def _start(self, kind: str) -> Process:
        chance = random.Random(self.chance.randrange(1 << 30))

        def work(process: Process) -> None:
            if kind == "sweep":
                self._sweep(process)
                return
            self.writers[process] = Writer(self, process, chance)
            self.writers[process].run()

        process = Process(kind, "s", work)
        self.processes.append(process)
        return process

    def _act(self, action: str) -> None:
        self.counts[action] += 1
        alive = [p for p in self.processes if not p.ended]
        stops = self.chance.choice(STOPS)
        if action in ("run", "sweep"):
            if len(alive) < WRITERS:
                self._start(action).resume(stops)
        elif alive:
            process = self.chance.choice(alive)
            if action == "kill":
                process.kill()
            elif action == "finish":
                process.finish()
            else:
                process.fault = self.chance.choice(("before", "after")) if action == "fail" else ""
                process.resume(stops)

    def _sweep(self, process: Process) -> None:
        with process.call("list objects"):
            found = sorted(self.place.objects)
        with process.call("write tombstones"):
            gone = self.place.bury([name for name in found if name in self.place.objects])
        for name in gone:
            with process.call(f"delete object {name}"):
                self.place.objects.pop(name, None)
            self.counts["swept"] += 1

    def check(self) -> None:
        """Check every promise, after every action."""
        place, state, batch, step = self.place, 0, 0, 0
        for id, record in sorted(place.checkpoints.items()):
            assert self.seen.setdefault(id, record) == record, f"checkpoint {id} is another one now"
            assert record.steps[0] == step + 1 and list(record.steps) == list(range(step + 1, record.steps[-1] + 1))
            assert list(record.batches) == list(range(batch + 1, batch + 1 + len(record.batches))), f"input of {id}"
            for batch in record.batches:
                state = state_after(state, batch)
            assert record.state == state, f"checkpoint {id} holds something else than its input makes"
            assert record.objects <= place.objects.keys(), f"checkpoint {id} lacks objects"
            step = record.steps[-1]
        rows = dict(place.delivered)
        assert set(rows) <= set(place.checkpoints) and set(place.delivered) == set(rows.items()), (
            "a sink got other rows"
        )
        for writer in self.writers.values():
            self._check_writer(writer)
        for process in self.processes:
            if process.ended and process.error is not None and not process.dead:
                error, process.error = process.error, None
                if not isinstance(error, Fenced | Unreachable | LostState):
                    raise AssertionError(f"a {process.kind} failed: {error!r}") from error
                self.counts[type(error).__name__] += 1

    def _check_writer(self, writer: Writer) -> None:
        place, coordinator = self.place, writer.coordinator
        for (epoch, id), steps in writer.prepared.items():
            record = place.checkpoints.get(id)
            assert record is None or record.epoch != epoch or record.steps == steps, f"{id} completed with other steps"
        if coordinator is None:
            return
        region = coordinator.region
        assert region.completed <= place.newest, "a checkpoint is complete for nobody else"
        if region.epoch == place.epoch and region.completed < place.newest:
            pending = region.pending[0]
            assert place.newest == pending.id and pending.durable, "the catalog has what nobody committed"
            assert pending.in_doubt or region.phase is Phase.OPEN, "what may be complete counts as failed"

    def _check_end(self) -> None:
        referred = {name for record in self.place.checkpoints.values() for name in record.objects}
        assert self.place.objects.keys() == referred, "orphans are left"
        assert self.place.outstanding == {} and {id for id, _ in self.place.delivered} == set(self.place.checkpoints)
        self.counts["checkpoints"] += self.place.newest


def perform(seed: int) -> Counter[str]:
    """Run the schedule of a seed; return what happened in it, counted.

    Raises:
        AssertionError: a promise was broken.
    """
    world = World(seed)
    world.perform()
    return world.counts


def run_schedules(first: int, schedules: int, tell: Callable[[int], None] = lambda _: None) -> Counter[str]:
    """Run the schedules of consecutive seeds; the error of one that breaks a promise names its seed."""
    total = Counter[str]()
    for seed in range(first, first + schedules):
        try:
            total += perform(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        tell(seed)
    return total


def main() -> None:
    """Run very many schedules; stop at the first that breaks a promise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()

    def tell(seed: int) -> None:
        if seed % 5000 == 0:
            print(f"seed {seed}, {time.perf_counter() - start:.0f} s", flush=True)

    total = run_schedules(arguments.seed, arguments.schedules, tell)
    print(
        f"{arguments.schedules} schedules from seed {arguments.seed}, no violation, {time.perf_counter() - start:.0f} s"
    )
    for what, count in sorted(total.items()):
        print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
