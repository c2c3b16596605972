"""A stream of two or three operators in a row with tiny data, and what its executors do.

They keep the state and write each subtask's part of a checkpoint, made here directly. All that reads it is the real
code.
"""

import random
from collections import Counter
from collections.abc import Sequence

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

NAME, TABLE, GROUPS = "s", "totals", 2


class Totals(Operator):
    """Adds up, and holds some rows back until an interval ends. `advance` has its logic, so it processes none."""

    key = {"k": pa.int64()}  # noqa: RUF012
    output = pa.schema({"k": pa.int64(), "n": pa.int64()})
    totals = ValueState(value={"n": pa.int64()})

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
    return Stream(NAME, lambda spark, _: spark.sql(""), operators=operators, max_parallelism=GROUPS)


GROWN = _stream_of(*OPERATORS)
STREAM = _stream_of(*(name for name in OPERATORS if name != LATER))
SCHEMA = STREAM.operators[0].tables()[TABLE]
KEYS, HELD = range(6), range(6, 9)
"""the keys of totals, and those of rows that are held back"""
_ALL = range(len(KEYS) + len(HELD))
GROUP_OF = dict(zip(_ALL, key_groups(xxhash64([pa.array(_ALL, pa.int64())]), GROUPS).tolist(), strict=True))
Rows_ = dict[int, int]
Contents = dict[str, Rows_]
"""operator -> key -> value"""


def advance(contents: Contents, step: Step, drains: bool) -> dict[str, set[int]]:
    """Take a step: the input changes the first operator, and what each hands on changes the one that reads it.

    Args:
        contents: what was before it; changed.
        drains: whether operators let go what they hold back.

    Returns:
        Operator -> the keys that changed.
    """
    chance, rows, changed = random.Random(step.offsets), list[tuple[int, int]](), dict[str, set[int]]()
    if step.batch_id is not None:
        rows = [(k, chance.randrange(100)) for k in chance.sample(KEYS, chance.randint(0, 3))]
    for operator in (name for name in OPERATORS if name in contents):
        rows, changed[operator] = _process(contents[operator], rows, drains)
    return changed


def _process(state: Rows_, rows: list[tuple[int, int]], drains: bool) -> tuple[list[tuple[int, int]], set[int]]:
    """One operator's step: what it hands on, and the keys that changed."""
    made, changed = [], set[int]()
    for k, n in rows:
        if n % 3 == 0:  # held back, instead of an earlier one
            key, state[HELD[k % len(HELD)]] = HELD[k % len(HELD)], n
        else:
            key, total = k, (state.get(k, 0) * 7 + n) % 100
            if total % 4:
                state[k] = total
            else:
                state.pop(k, None)
            made.append((k, total))
        changed.add(key)
    for key in HELD if drains else ():
        if (n := state.pop(key, None)) is not None:
            made.append((key - len(KEYS), n + 1))
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
                empty = region.has_steps and self.chance.random() < 0.15
                self._take(region, Step.without_rows(number) if empty else new, ends=True if empty else None)
            else:
                self._take(region, step, ends if follows or step.batch_id is None else None)
        if region.has_steps and self.chance.random() < 0.5:
            self._take(region, Step.without_rows(region.step + 1), ends=True)
        region.close("done")

    def _take(self, region: ConsistentRegion, step: Step, ends: bool | None) -> None:
        tasks = region.begin_step(step, ends=ends)
        self._have_state(tasks)
        [drains] = {task.drains for task in tasks.values()}
        for operator, keys in advance(self.contents, step, drains).items():
            self.changed[operator] |= keys
            if keys and step.batch_id is None:
                self.counts[f"{operator} drained or read without input"] += 1
        self.version = region.step
        for operator, task in tasks.items():
            region.acknowledge(operator, self._acknowledged(task))
            if task.tracking or task.checkpoint:
                self.changed[operator] = set()
        if region.checkpoint_due:
            region.complete()

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
        if order is not None or task.tracking:
            base = order is not None and (order.forms[TABLE] is Form.BASE or self.chance.random() < 0.2)
            handle, object_ = (self._base if base else self._delta)(task, subtask, groups)
            handles, stored = [handle], [object_]
        digests = group_sums(row_digests(rows), owners, GROUPS)[groups.start : groups.end]
        said = {"digests": {TABLE: digests}, "rows_in": 1, "table_rows": {TABLE: len(rows)}, "logged": bool(handles)}
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
