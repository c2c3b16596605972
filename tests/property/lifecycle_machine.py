"""The whole life cycle in memory: real catalog, region, materialization, deletion, sweep and leases, in any order.

A schedule is a list of (action, a, b). Every action starts a process, lets one run on for some calls, kills one, makes
a call fail, or moves the clock; processes are left lying between any two calls and may wake up long after they were
fenced. The operators' data are tiny, and what subtasks write is made here directly; all else is the real code. The
oracle (`Oracle`) replays the input log that the catalog holds and knows nothing of chains.

    python -m tests.property.lifecycle_machine --schedules 5000 --seed 1
"""

import argparse
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from siltstone.catalog.packing import unpack
from siltstone.catalog.place import Place
from siltstone.catalog.records import Step
from siltstone.catalog.repository import Catalog
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.base import write_base
from siltstone.changelog.block import encode_block
from siltstone.errors import CorruptObject, Fenced, StateError, Unreachable, UsageError
from siltstone.lifecycle.definition import definition_of
from siltstone.lifecycle.deletion import delete_checkpoints
from siltstone.lifecycle.export import rebuild, unit_tasks
from siltstone.lifecycle.lease import reading
from siltstone.lifecycle.materialize import materialize
from siltstone.lifecycle.region import Region, RegionOptions
from siltstone.lifecycle.restore import chain_manifests, read_manifests
from siltstone.lifecycle.retention import truncate
from siltstone.lifecycle.savepoint import drop_savepoint, set_savepoint
from siltstone.lifecycle.sweep import SweepOptions, sweep
from siltstone.lifecycle.task import CheckpointOrder, StepTask
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.policy.adjust_d import AdjustD
from siltstone.policy.protocol import PolicyOptions
from siltstone.policy.retention import RetentionOptions
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import DELETED
from siltstone.store.paths import CheckpointPath
from siltstone.stream import Stream
from tests.simulated import NOON, Clock, MemoryStore, Process, SimulatedCatalog, SimulatedStore, memory_engine

NAME, TABLE, GROUPS = "s", "totals", 2
POLICY = AdjustD(PolicyOptions(d0=3, d_max=4, size_ratio_max=None))
GUARD = timedelta(days=3)
PROCESSES = 6
_RESTORED = 8
"""of how many chains that come to be one is restored at once"""


class Totals(Operator):
    """Its rows are made up by `changes_of_step`, so it processes none."""

    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        raise NotImplementedError


OPERATORS = ("a", "b")
STREAM = Stream(
    NAME, lambda spark, _: spark.sql(""), operators=[Totals(name=name) for name in OPERATORS], max_parallelism=GROUPS
)
SCHEMA = STREAM.operators[0].tables()[TABLE]
KEYS = range(6)
GROUP_OF = dict(zip(KEYS, key_groups(xxhash64([pa.array(KEYS, pa.int64())]), GROUPS).tolist(), strict=True))
Rows_ = dict[int, int]
Contents = dict[str, Rows_]
"""operator -> key -> value"""


def changes_of_step(offsets: str) -> dict[str, dict[int, int | None]]:
    """What a step of the input does: operator -> key -> its new value, or None to delete it."""
    chance = random.Random(offsets)
    return {
        operator: {k: chance.choice([None, chance.randrange(100)]) for k in chance.sample(KEYS, chance.randint(0, 2))}
        for operator in OPERATORS
    }


def apply(contents: Contents, offsets: str) -> None:
    """A step, on what was before it."""
    for operator, changes in changes_of_step(offsets).items():
        for key, value in changes.items():
            if value is None:
                contents[operator].pop(key, None)
            else:
                contents[operator][key] = value


def table_of(rows: Rows_, groups: KeyGroupRange) -> tuple[pa.Table, np.ndarray]:
    """Those of some key groups, as the changelog takes them."""
    keys = sorted((k for k in rows if GROUP_OF[k] in groups), key=lambda k: (GROUP_OF[k], k))
    table = pa.table([keys, [rows[k] for k in keys]], schema=SCHEMA.rows)
    return table, np.array([GROUP_OF[k] for k in keys], np.uint16)


def digests_of(contents: Contents) -> dict[str, list[int]]:
    """Operator -> the digest of each key group."""
    found = {}
    for operator, rows in contents.items():
        table, owners = table_of(rows, KeyGroupRange(0, GROUPS))
        found[operator] = group_sums(row_digests(table), owners, GROUPS).tolist()
    return found


def restored(store: SimulatedStore, stored: Sequence[StoredObject], operators: Sequence[str] = OPERATORS) -> Contents:
    """The state that a chain holds, its digests proven; `stored` are its manifests."""
    manifests = read_manifests(store, stored)
    found: Contents = {operator: {} for operator in operators}
    only = {(operator, TABLE) for operator in operators}
    for task in unit_tasks(manifests, max(manifests), 1, None, only)[0]:
        for rows, _ in rebuild(store, task).tables[TABLE].scan(KeyGroupRange(0, GROUPS)):
            found[task.unit.operator] |= dict(zip(*rows.to_pydict().values(), strict=True))
    return found


class Writer:
    """What the executors of one run do: keep the state, and write each subtask's part of a checkpoint."""

    def __init__(self, world: "World", process: Process, chance: random.Random) -> None:
        self.chance, self.store = chance, SimulatedStore(world.memory, process)
        self.version = -1
        self.contents: Contents = {}
        self.changed: dict[str, set[int]] = {}

    def run(self, region: Region) -> None:
        """Some steps, and the clean end of the run."""
        steps: list[Step] = []
        for _ in range(self.chance.randint(1, 6)):
            tasks = region.begin_step()
            self._have_state(tasks)
            offsets = f"{region.epoch}.{region.step}.{self.chance.random()}"
            steps.append(Step(region.step, region.step - 1, offsets))
            apply(self.contents, offsets)
            for operator, changes in changes_of_step(offsets).items():
                self.changed[operator] |= changes.keys()
            self.version = region.step
            for operator, task in tasks.items():
                region.acknowledge(operator, self._acknowledged(task))
            if region.checkpoint_due:
                region.complete(steps)
                steps, self.changed = [], {operator: set() for operator in OPERATORS}
        region.close("done")

    def _have_state(self, tasks: dict[str, StepTask]) -> None:
        """An executor that starts, or has lost its state, restores it where that can be."""
        task = next(iter(tasks.values()))
        lost = self.chance.random() < 0.2 and task.base_step == task.restore.step
        if self.version == task.base_step and not lost:
            return
        assert task.base_step == task.restore.step
        self.changed = {operator: set() for operator in OPERATORS}
        self.contents = {operator: {} for operator in OPERATORS}
        for operator, of_operator in tasks.items():
            point = of_operator.restore
            if point.checkpoint:
                self.contents[operator] = restored(self.store, point.manifests, [operator])[operator]
        self.version = task.base_step

    def _acknowledged(self, task: StepTask) -> list[Acknowledgement]:
        return [self._part(task, subtask) for subtask in range(task.parallelism)]

    def _part(self, task: StepTask, subtask: int) -> Acknowledgement:
        operator, groups, order = task.operator.name, task.groups(subtask), task.checkpoint
        rows, owners = table_of(self.contents[operator], groups)
        handles: list[Handle] = []
        stored: list[StoredObject] = []
        if order is not None:
            base = order.form is Form.BASE or self.chance.random() < 0.2
            handle, object_ = (self._base if base else self._delta)(task, order, subtask, groups)
            handles, stored = [handle], [object_]
        digests = group_sums(row_digests(rows), owners, GROUPS)[groups.start : groups.end]
        said = {"digests": {TABLE: digests}, "rows_in": 1, "state_rows": len(rows)}
        return Acknowledgement(operator, subtask, groups, handles, stored, **said)

    def _base(
        self, task: StepTask, order: CheckpointOrder, subtask: int, groups: KeyGroupRange
    ) -> tuple[Handle, StoredObject]:
        operator = task.operator.name
        name = self._path(task, order).base(operator, TABLE, subtask, self._attempt())
        with self.store.create(name) as out:
            rows = write_base(out, SCHEMA, [table_of(self.contents[operator], groups)])
        assert out.stored is not None
        return _handle(operator, Form.BASE, out.stored, groups, rows, 0), out.stored

    def _delta(
        self, task: StepTask, order: CheckpointOrder, subtask: int, groups: KeyGroupRange
    ) -> tuple[Handle, StoredObject]:
        operator = task.operator.name
        keys = sorted((k for k in self.changed[operator] if GROUP_OF[k] in groups), key=lambda k: (GROUP_OF[k], k))
        values = [self.contents[operator].get(k) for k in keys]
        columns = {"k": keys, "n": values, DELETED: [value is None for value in values]}
        changes = pa.table({n: columns[n] for n in SCHEMA.changes.names}, schema=SCHEMA.changes)
        block = encode_block(changes, np.array([GROUP_OF[k] for k in keys], np.uint16))
        stored = self.store.put(self._path(task, order).segment(self._attempt()), block.data)
        return _handle(operator, Form.DELTA, stored, groups, len(keys), order.previous), stored

    def _path(self, task: StepTask, order: CheckpointOrder) -> CheckpointPath:
        return CheckpointPath(NAME, task.epoch, order.checkpoint)

    def _attempt(self) -> str:
        return f"t{self.chance.randrange(1 << 60):x}"


def _handle(operator: str, form: Form, stored: StoredObject, groups: KeyGroupRange, rows: int, previous: int) -> Handle:
    place = (stored.name, 0, stored.bytes, stored.checksum, groups)
    return Handle(operator, TABLE, Kind.INCREMENTAL, form, *place, rows=rows, previous=previous)


class World:
    """All there is, and what of it is known to be so."""

    _ENGINE: Any = None

    def __init__(self) -> None:
        if World._ENGINE is None:
            engine, raw = memory_engine()
            World._ENGINE = engine, raw, raw.serialize()
        self.engine, self.raw, empty = World._ENGINE
        self.raw.deserialize(empty)
        self.raw.execute("PRAGMA foreign_keys = ON")
        self.clock = Clock()
        self.memory = MemoryStore(self.clock.now)
        self.memory.may_delete = self._is_written_down
        self.catalog = Catalog(self.engine, self.clock.now)
        self.store = SimulatedStore(self.memory)
        self.processes: list[Process] = []
        self.counts: Counter[str] = Counter()
        self.oracle = Oracle(self)
        self.catalog.register(NAME, GROUPS, definition_of(STREAM, {}))

    def place_of(self, process: Process) -> Place:
        catalog = SimulatedCatalog(self.engine, self.clock.now, process)
        return Place(cast(Any, SimpleNamespace(store=SimulatedStore(self.memory, process))), catalog)

    def start(self, kind: str, work: Callable[[Process, Place], Any]) -> Process:
        process = Process(kind, lambda self_: work(self_, self.place_of(self_)))
        self.processes.append(process)
        return process

    def row(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self.raw.execute(query, values).fetchall()

    @property
    def epoch(self) -> int:
        [(epoch,)] = self.row("SELECT epoch FROM stream WHERE name = ?", NAME)
        return epoch

    def _is_written_down(self, name: str) -> bool:
        return bool(self.row("SELECT 1 FROM deletion WHERE name = ?", name))

    # What a schedule can do

    def act(self, action: str, a: int, b: int) -> None:
        """One action, and then everything must hold."""
        self.counts[action] += 1
        alive = [p for p in self.processes if not p.ended]
        if action in _STARTS:
            if len(alive) < PROCESSES:
                self.start(action, getattr(self, f"_{action}")(a)).resume(b)
        elif action == "clock":
            self.clock.time += [timedelta(seconds=s) for s in (10, 130, 3600, 4 * 86400, -60, -7200)][a % 6]
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

    def _run(self, a: int) -> Callable[[Process, Place], Any]:
        chance = random.Random(a)
        options = RegionOptions(parallelism=chance.choice([1, 2]), checkpoint_steps=chance.choice([1, 1, 2]))

        def work(process: Process, place: Place) -> None:
            region = Region.open(STREAM, place.warehouse, place.catalog, POLICY, options, "a writer")
            process.epoch = region.epoch
            Writer(self, process, chance).run(region)

        return work

    def _materialize(self, a: int) -> Callable[[Process, Place], Any]:
        def work(process: Process, place: Place) -> None:
            visible = [c.id for c in place.catalog.checkpoints(NAME)]
            checkpoint = visible[-1 - a // 2 % len(visible)] if visible else 1
            id, operator = uuid.uuid5(uuid.NAMESPACE_OID, f"{a}{len(self.processes)}").hex, OPERATORS[a % 2]
            if place.catalog.firsts(NAME, checkpoint).get(operator) != checkpoint:
                run = lambda of, tasks: [of(task) for task in tasks]  # noqa: E731
                materialize(place, NAME, operator, checkpoint, id=id, parallelism=1 + a % 2, run=run)
                self.counts["materialized"] += 1

        return work

    def _truncate(self, a: int) -> Callable[[Process, Place], Any]:
        options = RetentionOptions(keep_last=1 + a % 3)
        return lambda process, place: truncate(place, NAME, options, dry_run=a % 11 == 0)

    def _delete(self, a: int) -> Callable[[Process, Place], Any]:
        def work(process: Process, place: Place) -> None:
            last = place.catalog.last_id(NAME)
            delete_checkpoints(place, NAME, random.Random(a).sample(range(1, last + 1), min(last, 1 + a % 3)))

        return work

    def _sweep(self, a: int) -> Callable[[Process, Place], Any]:
        options = SweepOptions(limit=None if a % 3 else 2, dry_run=a % 13 == 0, incomplete=a % 4 == 1, age_guard=GUARD)
        return lambda process, place: sweep(place, NAME, options)

    def _read(self, a: int) -> Callable[[Process, Place], Any]:
        def work(process: Process, place: Place) -> None:
            visible = [c.id for c in place.catalog.checkpoints(NAME)]
            checkpoint = visible[a % len(visible)] if visible else 1
            with reading(place.catalog, NAME, [checkpoint] if a % 5 else None, id=f"r{len(self.processes)}-{a}"):
                lease = f"r{len(self.processes)}-{a}"
                try:
                    manifests = chain_manifests(place.catalog, NAME, checkpoint)
                    found = restored(cast(Any, place.warehouse.store), manifests)
                except CorruptObject:
                    assert self.oracle.lost(lease), "what is leased was deleted"
                    raise
                assert found == self.oracle.contents[checkpoint]
                self.counts["read"] += 1

        return work

    def _snapshot(self, a: int) -> Callable[[Process, Place], Any]:
        def work(process: Process, place: Place) -> None:
            record = place.catalog.latest(NAME)
            epoch = place.catalog.stream(NAME).epoch
            with reading(place.catalog, NAME, [record.id], id=f"s{len(self.processes)}-{a}"):
                path = CheckpointPath(NAME, record.epoch, record.id).snapshot("a", TABLE, 0, f"s{id(process)}")
                stored = place.warehouse.store.put(path, b"rows")
                place.catalog.add_snapshot(NAME, epoch, record.id, [stored], 1)

        return work

    def _savepoint(self, a: int) -> Callable[[Process, Place], Any]:
        def work(process: Process, place: Place) -> None:
            name = f"p{a % 3}"
            if a % 4 == 0:
                drop_savepoint(place.catalog, NAME, name)
            else:
                last = place.catalog.last_id(NAME)
                expires = timedelta(hours=1) if a % 4 == 1 else None
                set_savepoint(place.catalog, NAME, name, at=str(max(1, last - a % 3)), expires_in=expires)

        return work

    # What must hold

    def check(self) -> None:
        """After every action."""
        for process in self.processes:
            if process.ended and process.error is not None:
                self._judge(process)
        self.oracle.check()

    def _judge(self, process: Process) -> None:
        """Whether a process may end so."""
        error, process.error = process.error, None
        if process.dead:
            return
        self.counts[f"{process.kind}: {type(error).__name__}"] += 1
        if isinstance(error, Unreachable) and "the schedule says so" in str(error):
            return
        if isinstance(error, Unreachable) and "discarded" in str(error):
            return
        if isinstance(error, Fenced | UsageError):
            return  # whether it was right to refuse, the oracle's checks tell
        if type(error) is StateError and "was deleted by" in str(error):
            return
        if isinstance(error, CorruptObject) and process.kind == "run" and process.epoch < self.epoch:
            return
        if isinstance(error, CorruptObject) and process.kind == "read":
            return
        assert error is not None
        raise AssertionError(f"{process.kind} failed") from error

    def end(self, finish: bool) -> None:
        """Everybody ends, time passes; one more run, truncation and sweep leave nothing behind."""
        for process in self.processes:
            process.finish() if finish else process.kill()
            self.check()
        self.clock.time = max(self.clock.time, NOON) + timedelta(days=10)
        for action in ("run", "truncate", "sweep"):
            work = getattr(self, f"_{action}")(2)
            last = self.start(action, work)
            last.finish()
            if last.error is not None:
                raise AssertionError(f"{action} fails in the end") from last.error
            self.check()
        named = {o.name for o in self.catalog.objects(NAME)}
        assert named == set(self.memory.objects), named ^ set(self.memory.objects)
        for checkpoint in self.catalog.checkpoints(NAME):
            self.oracle.restore(checkpoint.id)
        assert not self.memory.begun and not self.catalog.live_leases(NAME)
        self.counts["checkpoints"] += len(self.oracle.contents)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


class Oracle:
    """What each checkpoint is, from the input log alone; and what the store must hold for each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.contents: dict[int, Contents] = {0: {operator: {} for operator in OPERATORS}}
        """checkpoint -> what it is"""
        self._needed: dict[Any, frozenset[str]] = {}
        """a checkpoint and what its chain is made of -> the objects that a restore reads"""
        self._last_step = 0
        self._lost: set[str] = set()
        self._seen: set[str] = set()

    def lost(self, lease: str) -> bool:
        """Whether a lease has, at any time, not been there any more."""
        return lease in self._lost or not self.world.row("SELECT 1 FROM lease WHERE id = ?", lease)

    def check(self) -> None:
        """Everything that must hold at any time."""
        world = self.world
        self._follow()
        now = world.clock.now()
        for lease in world.row("SELECT id FROM lease WHERE expires_at <= ?", _sql_time(now)):
            self._lost.add(lease[0])
        stored = world.memory.objects.keys()
        for (id,) in world.row("SELECT id FROM checkpoint WHERE stream = ? AND deleted_at IS NULL", NAME):
            needed = self._objects_of(id)
            assert needed <= stored, f"checkpoint {id} lacks {sorted(needed - stored)}"
        visible = world.row(
            "SELECT o.name FROM object o JOIN checkpoint c ON c.stream = o.stream AND c.id = o.checkpoint "
            "WHERE c.deleted_at IS NULL"
        )
        gone = {name for (name,) in visible} - stored
        assert not gone, f"rows of visible checkpoints refer to {sorted(gone)}"
        dangling = {name for (name,) in world.row("SELECT name FROM object")} - stored
        assert all(map(world._is_written_down, dangling)), dangling
        pinned = world.row(
            "SELECT p.name FROM savepoint p LEFT JOIN checkpoint c ON c.stream = p.stream AND c.id = p.checkpoint "
            "WHERE (p.expires_at IS NULL OR p.expires_at > ?) AND (c.id IS NULL OR c.deleted_at IS NOT NULL)",
            _sql_time(now),
        )
        assert not pinned, pinned

    def _follow(self) -> None:
        """What was committed since: by the newest writer, with the steps that come next."""
        world, last = self.world, max(self.contents)
        found = world.row("SELECT id, epoch FROM checkpoint WHERE stream = ? AND id > ? ORDER BY id", NAME, last)
        for id, epoch in found:
            assert id == last + 1 and epoch == world.epoch, f"checkpoint {id} of epoch {epoch}"
            contents = {operator: dict(rows) for operator, rows in self.contents[last].items()}
            steps = "SELECT step, offsets FROM step WHERE stream = ? AND checkpoint = ? ORDER BY step"
            for step, packed in world.row(steps, NAME, id):
                offsets = unpack(packed)
                assert step == self._last_step + 1
                apply(contents, offsets)
                self._last_step = step
            self.contents[id] = contents
            last = id

    def restore(self, id: int) -> None:
        """A checkpoint is what it was when it was made."""
        stored = chain_manifests(self.world.catalog, NAME, id)
        assert restored(self.world.store, stored) == self.contents[id], f"checkpoint {id} is not what it was"

    def _objects_of(self, id: int) -> frozenset[str]:
        """All that a restore of a checkpoint reads. Its digests are compared; of some, the rows as well."""
        firsts = "SELECT operator, first FROM dependency WHERE stream = ? AND checkpoint = ? ORDER BY operator"
        chain = tuple(self.world.row(firsts, NAME, id))
        made = "SELECT operator, checkpoint, id FROM materialization WHERE stream = ? AND manifest IS NOT NULL"
        based = tuple(m for m in sorted(self.world.row(made, NAME)) if (m[0], m[1]) in chain)
        key = (id, chain, based)
        if key not in self._needed:
            world = self.world
            manifests = read_manifests(world.store, chain_manifests(world.catalog, NAME, id))
            assert digests_of(self.contents[id]) == {op: d[TABLE].tolist() for op, d in manifests[id].digests.items()}
            reads = [r for task in unit_tasks(manifests, id, 1, None)[0] for r in task.unit.reads]
            names = {stored.name for stored in chain_manifests(world.catalog, NAME, id)}
            self._needed[key] = frozenset(names | {read.handle.object for read in reads})
            if len(self._needed) % _RESTORED == 0:
                self.restore(id)
        return self._needed[key]


def _sql_time(time: Any) -> str:
    return time.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


_STARTS = ("run", "materialize", "truncate", "delete", "sweep", "read", "snapshot", "savepoint")
ACTIONS = (
    *("run", "run", "run", "materialize", "materialize", "truncate", "delete", "sweep", "sweep", "read", "snapshot"),
    *("savepoint", "go", "go", "go", "go", "go", "go", "finish", "finish", "finish", "kill", "fail", "clock"),
)
STOPS = (1, 2, 3, 5, 8, 13, 30, 60, 200)
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999), st.sampled_from(STOPS)), min_size=25, max_size=35
)
"""an action, what it chooses by, and how many stops the process it starts or wakes goes past"""


def perform(schedule: list[tuple[str, int, int]], finish: bool) -> Counter[str]:
    """One schedule from beginning to end, after a few checkpoints; what happened in it, counted.

    Args:
        finish: whether processes that are left in the end go on to their ends, or are killed.

    Raises:
        AssertionError: a promise was broken.
    """
    world = World()
    try:
        for action, a, b in [("run", 7, 60), *schedule]:
            world.act(action, a, b)
        world.end(finish)
    finally:
        world.close()
    return world.counts


def main() -> None:
    """Very many schedules; stops at the first that breaks a promise, made as short as can be."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    pa.set_cpu_count(1)
    total: Counter[str] = Counter()
    start = time.perf_counter()

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @seed(arguments.seed)
    @settings(max_examples=arguments.schedules, database=None, deadline=None, suppress_health_check=slow)
    @given(SCHEDULES, st.booleans())
    def run(schedule: list[tuple[str, int, int]], finish: bool) -> None:
        total.update(perform(schedule, finish))
        total["schedules"] += 1

    run()
    print(f"{total['schedules']} schedules of seed {arguments.seed}, no violation, {time.perf_counter() - start:.0f} s")
    for what, count in sorted(total.items()):
        print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
