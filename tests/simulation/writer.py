"""A stream of two or three operators in a row with tiny data, and what its executors do.

The first operator has timers in event time, of a source of two partitions; the others by the time of day.

They keep the state and write each subtask's part of a checkpoint, made here directly. All that reads it is the real
code.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from siltstone.catalog.records.steps import Step, StepKind, with_ends
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.format.base import write_base
from siltstone.format.block import encode_block
from siltstone.format.manifests import read_manifests
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.operator import SOURCE, Operator, Rows, State, ValueState
from siltstone.restore.export import rebuild, unit_tasks
from siltstone.restore.tables import decode_changes
from siltstone.run.region import ConsistentRegion
from siltstone.run.roll_forward import is_logged
from siltstone.run.task import StepTask
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import DELETED
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader, Wanted
from siltstone.stream import Stream
from siltstone.time.clock_rules import OperatorClock
from siltstone.time.event_time import EventTime, partition_name
from siltstone.times import to_us
from tests.simulation.processes import NOON

NAME, TABLE, GROUPS = "s", "totals", 2
MINUTE = 60_000_000
EVENT_TIMES = (
    EventTime("at", delay="1 minute"),
    EventTime("at", delay="1 minute", per="part"),
    EventTime("at", delay="1 minute", per="part", idle_after="5 minutes"),
    EventTime("at", delay="1 minute", per="part", idle_after="3 days", on_idle="advance"),
)


class Totals(Operator):
    """Adds up, holds some rows back until an interval ends, and some until a timer. `advance` has its logic, so it
    processes none."""

    key = {"k": pa.int64()}  # noqa: RUF012
    output = pa.schema({"k": pa.int64(), "n": pa.int64()})
    totals = ValueState(value={"n": pa.int64()})

    @property
    def clocks(self) -> frozenset[str]:
        """The clock of its timers, which are rows of `totals`."""
        return frozenset(["event" if self.reads == SOURCE else "processing"])

    def process(self, rows: Rows, state: State) -> None:
        raise NotImplementedError

    def drain(self, state: State) -> None:
        raise NotImplementedError


OPERATORS = ("a", "b", "c")
"""each reads the one before it"""
LATER = "c"
"""the one that a definition may have and may lack"""


def _stream_of(*names: str) -> Stream:
    operators = [Totals(name=name, reads=reads) for name, reads in zip(names, (SOURCE, *names), strict=False)]
    return Stream(NAME, lambda spark, _: spark.sql(""), operators, event_time=EVENT_TIMES[0], max_parallelism=GROUPS)


GROWN = _stream_of(*OPERATORS)
STREAM = _stream_of(*(name for name in OPERATORS if name != LATER))
SCHEMA = STREAM.operators[0].tables()[TABLE]
KEYS, HELD, TIMED = range(6), range(6, 9), range(9, 12)
"""the keys of totals, those of rows that are held back, and those of timers, whose value is when they are due"""
_ALL = range(len(KEYS) + len(HELD) + len(TIMED))
GROUP_OF = dict(zip(_ALL, key_groups(xxhash64([pa.array(_ALL, pa.int64())]), GROUPS).tolist(), strict=True))
Rows_ = dict[int, int]
Contents = dict[str, Rows_]
"""operator -> key -> value"""


Row = tuple[int, int, int | None]
"""key, number, event time"""


def rows_of(step: Step) -> list[Row]:
    """The input of a step: about a minute later for each step, where some partitions lag."""
    if step.batch_id is None:
        return []
    chance = random.Random(step.offsets)
    at = to_us(NOON) + step.step * MINUTE
    lags = [0, chance.choice([0, 0, 1, 5])]
    rows = [(k, chance.randrange(100)) for k in chance.sample(KEYS, chance.randint(0, 3))]
    return [(k, n, at - lags[k % 2] * MINUTE - chance.randrange(MINUTE)) for k, n in rows]


def advance(
    contents: Contents, step: Step, drains: bool, clocks: Mapping[str, OperatorClock | None]
) -> dict[str, set[int]]:
    """Take a step: the input changes the first operator, and what each hands on changes the one that reads it.

    Args:
        contents: what was before it; changed.
        drains: whether operators let go what they hold back.
        clocks: what each operator sees of the step's clock; None if nothing may fire.

    Returns:
        Operator -> the keys that changed.
    """
    rows, changed = rows_of(step), dict[str, set[int]]()
    for operator in (name for name in OPERATORS if name in contents):
        rows, changed[operator] = _process(contents[operator], rows, drains, clocks[operator])
    return changed


def _process(state: Rows_, rows: list[Row], drains: bool, clock: OperatorClock | None) -> tuple[list[Row], set[int]]:
    """One operator's step: what it hands on, and the keys that changed."""
    made, changed = list[Row](), set[int]()
    for k, n, at in rows:
        if at is not None and clock is not None and clock.before_us is not None and at < clock.before_us:
            continue
        if n % 4 == 1 and clock is not None:  # a timer, instead of an earlier one
            key = TIMED[k % len(TIMED)]
            state[key] = (clock.now_us if at is None else at) + MINUTE
        elif n % 3 == 0:  # held back, instead of an earlier one
            key, state[HELD[k % len(HELD)]] = HELD[k % len(HELD)], n
        else:
            key, total = k, (state.get(k, 0) * 7 + n) % 100
            if total % 4:
                state[k] = total
            else:
                state.pop(k, None)
            made.append((k, total, None))
        changed.add(key)
    upto = None if clock is None else clock.now_us if clock.watermark_us is None else clock.watermark_us
    for key in TIMED:
        if upto is not None and (due := state.get(key, upto + 1)) <= upto:
            del state[key]
            made.append((key - TIMED.start, due % 100, None))
            changed.add(key)
    for key in HELD if drains else ():
        if (n := state.pop(key, None)) is not None:
            made.append((key - HELD.start, n + 1, None))
            changed.add(key)
    return made, changed


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


def restored(store: Store, stored: Sequence[StoredObject], operators: Sequence[str] | None = None) -> Contents:
    """The state that a chain holds, its digests proven; `stored` are its manifests; None is all operators."""
    manifests = read_manifests(store, stored)
    if operators is None:
        operators = [*manifests[max(manifests)].operators]
    found: Contents = {operator: {} for operator in operators}
    only = {(operator, TABLE) for operator in operators}
    for task in unit_tasks(manifests, max(manifests), 1, None, only)[0]:
        for rows, _ in rebuild(store, task).tables[TABLE].scan(KeyGroupRange(0, GROUPS)):
            found[task.unit.operator] |= dict(zip(*rows.to_pydict().values(), strict=True))
    return found


class Writer:
    """What the executors of one run do: keep the state, and write each subtask's part of a checkpoint."""

    def __init__(self, store: Store, chance: random.Random, counts: Counter[str]) -> None:
        self.chance, self.store, self.counts = chance, store, counts
        self.version = -1
        self.contents: Contents = {}
        self.changed: dict[str, set[int]] = {}
        self.heard: dict[str, int] = {}

    def run(self, region: ConsistentRegion) -> None:
        """Some steps, and the clean end of the run."""
        logged = {step.step: (step, ends) for step, ends in with_ends(region.logged_steps())}
        follows = self.chance.random() < 0.8
        if not logged and self.chance.random() < 0.2:
            self._take(region, Step.without_rows(region.step + 1, StepKind.CHANGE), ends=True)
        for _ in range(self.chance.randint(1, 6)):
            number = region.step + 1
            step, ends = logged.get(number, (None, None))
            if step is None:
                new = Step(number, number - 1, f"{region.epoch}.{number}.{self.chance.random()}")
                due = region.clock.is_due() and self.chance.random() < 0.5
                empty = region.has_steps and self.chance.random() < 0.15
                taken = Step.without_rows(number) if empty or due else new
                self._take(region, taken, ends=True if empty else None)
            else:
                self._take(region, step, ends if follows or step.batch_id is None else None)
        if region.has_steps and self.chance.random() < 0.5:
            self._take(region, Step.without_rows(region.step + 1), ends=True)
        region.close("done")

    def _take(self, region: ConsistentRegion, step: Step, ends: bool | None) -> None:
        tasks = region.begin_step(step, ends=ends)
        self._have_state(tasks)
        [drains] = {task.drains for task in tasks.values()}
        self._note_times(region, step)
        timed = {(op, key) for op, rows in self.contents.items() for key in rows if key in TIMED}
        clocks = {operator: task.clock for operator, task in tasks.items()}
        for operator, keys in advance(self.contents, step, drains, clocks).items():
            self.changed[operator] |= keys
            if any(op == operator and key not in self.contents[op] for op, key in timed):
                self.counts[f"{operator} fired {'without' if step.batch_id is None else 'with'} rows"] += 1
            if keys and step.batch_id is None:
                self.counts[f"{operator} drained or read without input"] += 1
        self.version = region.step
        for operator, task in tasks.items():
            region.acknowledge(operator, self._acknowledged(task))
            if task.tracked or task.checkpoint:
                self.changed[operator] = set()
        if region.checkpoint_due:
            region.complete()

    def _note_times(self, region: ConsistentRegion, step: Step) -> None:
        """Note the highest event time of each partition, as the first operator hears it."""
        event_time = region.stream.event_time
        assert isinstance(event_time, EventTime)
        self.heard = {}
        for k, _, at in rows_of(step):
            name = partition_name(event_time.partition, [k % 2]) if event_time.partition else ""
            self.heard[name] = max(at or 0, self.heard.get(name, 0))

    def _have_state(self, tasks: dict[str, StepTask]) -> None:
        """An executor that starts, or has lost its state, restores it where that can be, and rolls it forward."""
        task = next(iter(tasks.values()))
        lost = self.chance.random() < 0.2 and all(is_logged(task, task.restore.step) for task in tasks.values())
        if self.version == task.base_step and not lost:
            return
        self.changed = {operator: set() for operator in tasks}
        self.contents = {operator: {} for operator in tasks}
        for operator, of_operator in tasks.items():
            point = of_operator.restore
            if point.manifests:
                self.contents[operator] = restored(self.store, point.manifests, [operator])[operator]
            for step in of_operator.log:
                for subtask in range(of_operator.parallelism):
                    self._roll_forward(operator, step.part(subtask))
        assert task.base_step == task.restore.step or lost
        self.version = task.base_step

    def _roll_forward(self, operator: str, part: Acknowledgement) -> None:
        blocks = BlockReader(self.store, part.objects).blocks(Wanted(handle) for handle in part.handles)
        for handle, block in zip(part.handles, blocks, strict=True):
            assert isinstance(block, pa.Buffer)
            changes, _ = decode_changes(handle, SCHEMA, [handle.key_groups], block)
            for change in changes.to_pylist():
                if change[DELETED]:
                    self.contents[operator].pop(change["k"], None)
                else:
                    self.contents[operator][change["k"]] = change["n"]

    def _acknowledged(self, task: StepTask) -> list[Acknowledgement]:
        return [self._part(task, subtask) for subtask in range(task.parallelism)]

    def _part(self, task: StepTask, subtask: int) -> Acknowledgement:
        operator, groups, order = task.operator.name, task.groups(subtask), task.checkpoint
        rows, owners = table_of(self.contents[operator], groups)
        handles: list[Handle] = []
        stored: list[StoredObject] = []
        if order is not None or task.tracked:
            base = order is not None and (order.forms[TABLE] is Form.BASE or self.chance.random() < 0.2)
            handle, object_ = (self._base if base else self._delta)(task, subtask, groups)
            handles, stored = [handle], [object_]
        digests = group_sums(row_digests(rows), owners, GROUPS)[groups.start : groups.end]
        said = {"digests": {TABLE: digests}, "rows_in": 1, "table_rows": {TABLE: len(rows)}}
        said["unlogged"] = () if handles else (TABLE,)
        due = [at for key, at in self.contents[operator].items() if key in TIMED and GROUP_OF[key] in groups]
        said["due"] = {next(iter(task.operator.clocks)): min(due)} if due else {}
        said["heard"] = {SOURCE: self.heard} if task.operator.reads == SOURCE and subtask == 0 else {}
        return Acknowledgement(operator, subtask, groups, handles, stored, **said)

    def _base(self, task: StepTask, subtask: int, groups: KeyGroupRange) -> tuple[Handle, StoredObject]:
        operator = task.operator.name
        name = task.path.base(operator, TABLE, subtask, self._attempt())
        with self.store.create(name) as out:
            rows = write_base(out, SCHEMA, [table_of(self.contents[operator], groups)])
        assert out.stored is not None
        return _handle(operator, Form.BASE, out.stored, groups, rows, 0), out.stored

    def _delta(self, task: StepTask, subtask: int, groups: KeyGroupRange) -> tuple[Handle, StoredObject]:
        operator = task.operator.name
        keys = sorted((k for k in self.changed[operator] if GROUP_OF[k] in groups), key=lambda k: (GROUP_OF[k], k))
        values = [self.contents[operator].get(k) for k in keys]
        columns = {"k": keys, "n": values, DELETED: [value is None for value in values]}
        changes = pa.table({n: columns[n] for n in SCHEMA.changes.names}, schema=SCHEMA.changes)
        block = encode_block(changes, np.array([GROUP_OF[k] for k in keys], np.uint16))
        stored = self.store.put(task.path.segment(self._attempt()), block.data)
        return _handle(operator, Form.DELTA, stored, groups, len(keys), task.restore.checkpoint, task.step), stored

    def _attempt(self) -> str:
        return f"t{self.chance.randrange(1 << 60):x}"


def _handle(
    operator: str, form: Form, stored: StoredObject, groups: KeyGroupRange, rows: int, previous: int, sqn: int = 0
) -> Handle:
    place = (stored.name, 0, stored.bytes, stored.checksum, groups)
    return Handle(operator, TABLE, Kind.INCREMENTAL, form, *place, rows=rows, previous=previous, sqn=sqn)
