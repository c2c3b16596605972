"""All there is in one simulation, and what a schedule can do in it.

Each action starts a process, lets one run on for some calls, kills one, makes a call fail, moves the clock, or damages
an object; and then everything must hold (`oracle`). Processes are left lying between any two calls and may wake up long
after they were fenced.
"""

import random
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.extract_writer import try_write_extract, write_extract
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.adjust_d_rules import AdjustD
from siltstone.chains.materialize import materialize
from siltstone.chains.policy_rules import PolicyOptions
from siltstone.change.fork import fork
from siltstone.change.recover import recover
from siltstone.change.rollback_rules import AUTOMATIC_CHECKPOINTS
from siltstone.errors import Fenced, StateError, Unreachable, UsageError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import drop_savepoint, set_savepoint
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.retention.truncate import truncate
from siltstone.run.definition import definition_of
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.run.take_over import take_over
from siltstone.store.identity import write_identity
from siltstone.store.paths import CheckpointPath, LocalLayout
from siltstone.times import to_us
from tests.catalog_cases import beginnings
from tests.simulation.loss import IDENTITY, fail_over, lose
from tests.simulation.oracle import Oracle
from tests.simulation.processes import (
    NOON,
    Clock,
    Database,
    MemoryStore,
    Process,
    SimulatedStore,
    SimulatedTransactions,
)
from tests.simulation.uploads import name_store, simulated_uploads
from tests.simulation.writer import (
    EVENT_TIMES,
    GROUPS,
    GROWN,
    LATER,
    NAME,
    OPERATORS,
    STREAM,
    TABLE,
    Writer,
    restored,
)

POLICY = AdjustD(PolicyOptions(d0=3, d_max=4, size_ratio_max=None))
GUARD = timedelta(days=3)
PROCESSES = 6
RESETS = 2
"""after which a process that runs a stream gives up"""
JUMPS_S = (10, 130, 3600, 4 * 86400, -60, -7200)
STARTS = (
    *("run", "materialize", "truncate", "delete", "sweep", "read", "snapshot", "savepoint", "fork", "recover"),
    "rewind",
)
Work = Callable[[Process, OpenWarehouse, str], Any]


class World:
    """Streams, processes, a store, a catalog and the time."""

    def __init__(self) -> None:
        self.database = Database("world")
        self.engine = self.database.engine
        self.clock = Clock()
        self.memory = MemoryStore(self.clock.now)
        self.catalog = Catalog(Transactions(self.engine, self.clock.now, outage_s=0.0))
        self.catalog.streams.register(NAME, GROUPS, definition_of(STREAM, {}))
        write_identity(cast(Any, SimulatedStore(self.memory)), IDENTITY)
        self.catalog.identity.propose(IDENTITY)
        self.catalog.identity.settle(IDENTITY)
        self.oracle = Oracle(self.catalog, self.database.raw, self.memory)
        self.memory.may_delete = self.oracle.is_written_down
        self.processes: list[Process] = []
        self.counts: Counter[str] = Counter()
        self._names = 0
        self._patched = ExitStack()
        self._patched.enter_context(simulated_uploads())

    def start(self, kind: str, stream: str, work: Work) -> Process:
        """A process at its first stop."""

        def run(process: Process) -> None:
            catalog = Catalog(SimulatedTransactions(self.engine, self.clock.now, process, self.database))
            work(process, self.place(catalog, process), stream)

        process = Process(kind, stream, run)
        self.processes.append(process)
        return process

    def place(self, catalog: Catalog, process: Process | None = None) -> OpenWarehouse:
        """The warehouse as one process sees it, with a catalog."""
        store = SimulatedStore(self.memory, process)
        nowhere = LocalLayout(Path("memory"))  # no file of it is ever made
        named = {"store_url": name_store(store), "label": "memory", "local": nowhere}
        warehouse = SimpleNamespace(store=store, prepare=lambda: None, **named)
        return OpenWarehouse(cast(Any, warehouse), catalog)

    def act(self, action: str, a: int, b: int) -> None:
        """One action, chosen by `a`, for `b` stops; and then everything must hold."""
        self.counts[action] += 1
        alive = [p for p in self.processes if not p.ended]
        if action in STARTS:
            if len(alive) < PROCESSES:
                streams = self.oracle.streams()
                stream = streams[a % 5 % len(streams)]
                self.start(action, stream, getattr(self, f"_{action}")(a)).resume(b)
        elif action == "clock":
            self.clock.time += timedelta(seconds=JUMPS_S[a % len(JUMPS_S)])
        elif action == "damage":
            self._damage(a)
        elif action == "lose":
            lose(self, a, b)
        elif action == "fail over":
            fail_over(self, a, b)
        elif alive:
            process = alive[a % len(alive)]
            if action == "go":
                process.resume(b)
            elif action == "finish":
                process.finish()
            elif action == "kill":
                process.kill()
            else:
                process.fault = "before" if a % 2 else "after"
                process.resume(b)
        self.check()

    def _new(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _damage(self, a: int) -> None:
        """Something of the newest checkpoint of the first stream is not what it was."""
        visible = self.oracle.visible(NAME)
        if a % 2 or not visible:
            return
        stored = {o.name for o in self.catalog.objects.list(NAME, visible[-1:])} & self.memory.objects.keys()
        names = sorted(stored - self.oracle.damaged)
        if not names:
            return
        name = names[a // 2 % len(names)]
        data, written = self.memory.objects[name]
        self.memory.objects[name] = data[:-1] + bytes([data[-1] ^ 1]), written
        self.oracle.damaged.add(name)

    # What processes do

    def _run(self, a: int) -> Work:
        chance = random.Random(a)
        options = RegionOptions(
            parallelism=chance.choice([1, 2]),
            checkpoint_steps=chance.choice([1, 1, 2, 3]),
            time_us=self._time_of_day(chance),
        )
        event_time = chance.choices(EVENT_TIMES, weights=[3, 3, 3, 1])[0]

        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            for attempt in range(1 + RESETS):
                known = LATER in place.catalog.streams.get(stream).definition["operators"]
                grows = chance.random() < (0.6 if known else 0.3)
                definition = replace(GROWN if grows else STREAM, name=stream, event_time=event_time)
                own = replace(options, drop=(LATER,) if known and not grows else ())
                region = ConsistentRegion.open(definition, place.warehouse, place.catalog, POLICY, own, "a writer")
                process.epoch = region.epoch
                if known is not grows:
                    self.counts["operators added" if grows else "operators dropped"] += 1
                try:
                    Writer(place.warehouse.store, chance, self.counts).run(region)
                    return
                except Unreachable as error:
                    region.fail(error)
                    if attempt == RESETS:
                        raise
                    self.counts["resets"] += 1
                    region.close("reset")

        return work

    def _time_of_day(self, chance: random.Random) -> Callable[[], int]:
        """A driver's clock: it may be off by five minutes at most, and jumps."""
        off = timedelta(seconds=chance.uniform(-300, 300))

        def time_us() -> int:
            nonlocal off
            if chance.random() < 0.1:
                off = timedelta(seconds=chance.uniform(-300, 300))
            return to_us(self.clock.now() + off)

        return time_us

    def _materialize(self, a: int) -> Work:
        operator, id = OPERATORS[a % 3], uuid.uuid5(uuid.NAMESPACE_OID, self._new("m")).hex

        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            visible = [c.id for c in place.catalog.checkpoints.list(stream)]
            checkpoint = visible[-1 - a // 2 % len(visible)] if visible else 1
            if beginnings(place.catalog, stream, checkpoint).get(operator) != checkpoint:
                materialize(place, stream, operator, checkpoint, id=id, parallelism=1 + a % 2, run=_in_order)
                self.counts["materialized"] += 1

        return work

    def _truncate(self, a: int) -> Work:
        options = RetentionOptions(keep_last=1 + a % 3)
        return lambda process, place, stream: truncate(place, stream, options, dry_run=a % 11 == 0)

    def _delete(self, a: int) -> Work:
        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            last = place.catalog.checkpoints.last_id(stream)
            delete_checkpoints(place, stream, random.Random(a).sample(range(1, last + 1), min(last, 1 + a % 3)))

        return work

    def _sweep(self, a: int) -> Work:
        options = SweepOptions(limit=None if a % 3 else 2, dry_run=a % 13 == 0, incomplete=a % 4 == 1, age_guard=GUARD)
        return lambda process, place, stream: sweep(place, stream, options)

    def _read(self, a: int) -> Work:
        lease = self._new("r")

        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            visible = [c.id for c in place.catalog.checkpoints.list(stream)]
            checkpoint = visible[a % len(visible)] if visible else 1
            with hold_lease(place.catalog, stream, [checkpoint] if a % 5 else None, id=lease):
                manifests = place.catalog.chains.list_manifests(stream, checkpoint)
                expected = self.oracle.contents(stream, checkpoint)
                try:
                    found = restored(place.warehouse.store, manifests)
                except StateError:
                    damaged = not self.oracle.damaged.isdisjoint(self.memory.objects)
                    assert damaged or self.oracle.lost(lease), "what is leased was deleted"
                    process.excused = True
                    raise
                assert found == expected, f"checkpoint {checkpoint} of {stream} was read as something else"
                self.counts["restored"] += 1

        return work

    def _snapshot(self, a: int) -> Work:
        label = self._new("s")

        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            record, epoch = place.catalog.checkpoints.get_latest(stream), place.catalog.streams.get(stream).epoch
            with hold_lease(place.catalog, stream, [record.id], id=label):
                path = CheckpointPath(stream, record.epoch, record.id).snapshot("a", TABLE, 0, label)
                stored = place.warehouse.store.put(path, b"rows")
                place.catalog.reference_copies.add(stream, epoch, record.id, [stored], 1)
            try_write_extract(place, stream)

        return work

    def _savepoint(self, a: int) -> Work:
        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            name = f"p{a % 3}"
            if a % 4 == 0:
                drop_savepoint(place.catalog, stream, name)
            else:
                last = place.catalog.checkpoints.last_id(stream)
                expires = timedelta(hours=1) if a % 4 == 1 else None
                set_savepoint(place.catalog, stream, name, at=str(max(1, last - a % 3)), expires_in=expires)
            try_write_extract(place, stream)

        return work

    def _fork(self, a: int) -> Work:
        new = f"f{a % 2}"

        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            last = place.catalog.checkpoints.last_id(stream)
            fork(place, stream, new, str(max(1, last - a % 3)))

        return work

    def _recover(self, a: int) -> Work:
        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            before, damaged = self.oracle.written_by(stream), set(self.oracle.damaged)
            rollbacks = self.oracle.rollbacks(stream)
            whole = [id for id in before if self.oracle.whole(stream, id)]
            accepts = a % 3 != 0
            done = recover(place, stream, run=_in_order, dry_run=a % 7 == 0, accept_loss=accepts)
            if not (accepts or done.dry_run) and done.given_up:
                assert done.checkpoint and done.given_up[-1] - done.checkpoint <= AUTOMATIC_CHECKPOINTS
                assert not done.savepoints
            kept = {id: epoch for id, epoch in before.items() if id <= done.checkpoint}
            alone = kept == self.oracle.written_by(stream) and damaged == self.oracle.damaged
            alone &= self.oracle.rollbacks(stream) == rollbacks + bool(done.given_up)
            if alone and not (done.rebuilt or done.dry_run):
                best = max(whole, default=0)
                assert done.checkpoint == best, f"{stream} goes back to {done.checkpoint} rather than {best}"
            self.counts["given up"] += len(done.given_up)

        return work

    def _rewind(self, a: int) -> Work:
        def work(process: Process, place: OpenWarehouse, stream: str) -> None:
            epoch = take_over(place, stream, "rewinds")
            last = place.catalog.checkpoints.last_id(stream)
            place.catalog.rollbacks.roll_back(stream, epoch, max(last - a % 3, 0), "the schedule says so", "a test")
            write_extract(place, stream)

        return work

    # What must hold

    def check(self) -> None:
        """After every action."""
        self.oracle.check(self.clock.now())
        for process in self.processes:
            if process.ended and process.error is not None:
                self._judge(process)

    def _judge(self, process: Process) -> None:
        """Whether a process may end so; whether it was right to refuse something, the oracle tells."""
        error, process.error = process.error, None
        if process.dead:
            return
        self.counts[f"{process.kind}: {type(error).__name__}"] += 1
        said = str(error)
        if isinstance(error, Fenced | UsageError) or process.excused:
            return
        if isinstance(error, Unreachable) and ("the schedule says so" in said or "discarded" in said):
            return
        if type(error) is StateError and "was deleted by" in said:
            return
        if isinstance(error, StateError) and (self.oracle.damaged or process.epoch < self.oracle.epoch(process.stream)):
            return
        raise AssertionError(f"{process.kind} of {process.stream} failed") from error

    def end(self, finish: bool) -> None:
        """Everybody ends, time passes; one more run, truncation and sweep leave nothing behind."""
        for process in self.processes:
            process.finish() if finish else process.kill()
            self.check()
        streams = self.oracle.streams()
        for action in ("recover", "run", "truncate", "sweep", "sweep"):
            self.clock.time = max(self.clock.time, NOON) + timedelta(days=10)
            for stream in streams if self.catalog.checkpoints.last_id(NAME) else ():
                work = self._sweep(2) if action == "sweep" else getattr(self, f"_{action}")(2)
                last = self.start(action, stream, work)
                last.finish()
                if last.error is not None and not _nothing_there(last.error):
                    raise AssertionError(f"{action} of {stream} fails in the end") from last.error
                self.check()
        for stream in streams:
            for id in self.oracle.visible(stream):
                if self.oracle.whole(stream, id):
                    self.oracle.restore(stream, id)
            assert not self.catalog.leases.list_live(stream)
            self.counts["checkpoints"] += self.catalog.checkpoints.last_id(stream)
        if self.catalog.checkpoints.last_id(NAME):
            named = {name for (name,) in self.oracle.rows("SELECT name FROM object")}
            stored = {name for name in self.memory.objects if not name.startswith("_")}
            assert named == stored, sorted(named ^ stored)
            # A store that leaves something of a write as small as an epoch's mark is there only here.
            assert not [write for write in self.memory.begun.values() if not str(write.name).startswith("_")]

    def close(self) -> None:
        """No thread is left."""
        for process in self.processes:
            process.kill()
        self._patched.close()


def _nothing_there(error: BaseException) -> bool:
    """Whether a stream has no checkpoint: everything was given up."""
    return isinstance(error, UsageError) and "it has none yet" in str(error)


def _in_order(of: Callable[[Any], Any], tasks: Any) -> list[Any]:
    return [of(task) for task in tasks]
