"""Bring working state of an older version to a newer one by the logged changes since, instead of restoring it.

Another machine ran the steps between. Those of the interval are in the task (`changelog.log`), earlier ones in the
manifests of the chain. A table that a pending checkpoint has written whole is emptied and read from there. The caller
compares digests afterwards, so a change that is missing cannot go unnoticed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from siltstone.changelog.log import NOWHERE
from siltstone.format.manifests import read_manifest
from siltstone.format.segment import Segment
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.live_rules import replaces
from siltstone.restore.merge import Delta, newest_changes
from siltstone.restore.restore import Block, apply_handle
from siltstone.restore.tables import open_changes
from siltstone.run.task import StepTask
from siltstone.state.backend import SubtaskState
from siltstone.state.protocol import apply_delta, key_batch
from siltstone.store.ahead import read_ahead
from siltstone.store.blocks import BlockReader, Wanted
from siltstone.store.paths import is_materialization_manifest

_Block = tuple[Handle, pa.Buffer | None]
"""a handle, and its bytes if the driver has not stored them"""


def is_logged(task: StepTask, version: int) -> bool:
    """Whether every step of the task's interval after `version` was logged."""
    first = max(version, task.restore.step) + 1
    return {step.step for step in task.log if not step.unlogged}.issuperset(range(first, task.base_step + 1))


def roll_forward(state: SubtaskState, task: StepTask, subtask: int) -> bool:
    """Bring state of an older version to version `task.base_step`, in one step.

    Returns:
        False, with the state unchanged, if a step was not logged, if a complete checkpoint has a base in place of its
        changes, or if any has files.

    Raises:
        CorruptObject: a change is damaged; nothing is committed.
        Unreachable: the store does not answer; nothing is committed.
    """
    if not is_logged(task, state.version):
        return False
    blocks, objects = _list_logged(task, subtask, state.version)
    if state.version < task.restore.step:
        stored = _list_stored(task, state, state.version)
        if stored is None:
            return False
        blocks, objects = [*stored[0], *blocks], [*stored[1], *objects]
    mine = [each for each in blocks if each[0].variable in {*state.tables, *state.opaque}]
    if any(handle.form is Form.FILES for handle, _ in mine):
        return False
    if any(_is_base(handle) and handle.sqn <= task.restore.step for handle, _ in mine):
        return False
    whole = [handle for handle, _ in mine if _is_base(handle)]
    replaced = [_is_replaced(handle, whole, _held(state, handle)) for handle, _ in mine]
    if None in replaced:
        return False
    mine = [each for each, gone in zip(mine, replaced, strict=True) if not gone]
    state.begin(task.base_step, tracking=False)
    for handle, _ in mine:
        if _is_base(handle):
            _clear(state, handle)
    _apply(state, task, mine, BlockReader(task.warehouse.store, objects))
    for table in state.tables.values():
        table.mark()
    state.commit()
    return True


def _is_base(handle: Handle) -> bool:
    return handle.form is Form.BASE and handle.kind is Kind.INCREMENTAL


def _held(state: SubtaskState, handle: Handle) -> KeyGroupRange:
    """Return the key groups of a handle that the subtask has."""
    table = state.tables.get(handle.variable)
    held = state.groups if table is None else table.schema.held(state.groups, state.max_parallelism)
    return handle.key_groups.intersect(held)


def _is_replaced(handle: Handle, whole: Sequence[Handle], groups: KeyGroupRange) -> bool | None:
    """Whether later bases hold what a change has in some key groups; None if they hold a part of it."""
    later = [each for each in whole if each.variable == handle.variable and each.sqn > handle.sqn]
    parts = [each.key_groups.intersect(groups) for each in later]
    held = {group for part in parts for group in range(part.start, part.end)}
    return bool(held) if len(held) in (0, len(groups)) else None


def _clear(state: SubtaskState, base: Handle) -> None:
    """Delete the rows that a base replaces."""
    table, groups = state.tables[base.variable], _held(state, base)
    keys = [(rows.select(table.schema.primary_key.names), owners) for rows, owners in table.scan(groups)]
    for rows, owners in keys:
        table.delete(key_batch(table.schema, rows, state.max_parallelism, owners))


def _apply(state: SubtaskState, task: StepTask, blocks: Sequence[_Block], reader: BlockReader) -> None:
    """Apply changes, given oldest first, bases before them: of each key only the newest, since a key may change in each
    step."""
    _expect(state, blocks)
    newest_first = blocks[::-1]
    fetched = reader.blocks([Wanted(handle) for handle, block in newest_first if block is None])
    deltas: dict[str, list[Delta]] = {name: [] for name in state.tables}
    others: list[tuple[Handle, Block]] = []
    for handle, block in newest_first:
        block_or_file, groups = next(fetched) if block is None else block, _held(state, handle)
        if handle.kind is Kind.OPAQUE or _is_base(handle):
            others.append((handle, block_or_file))
        else:
            assert isinstance(block_or_file, pa.Buffer), "only bases are read in parts"
            schema = state.tables[handle.variable].schema
            deltas[handle.variable].append(open_changes(handle, schema, [groups], block_or_file))
    for handle, block in others[::-1]:
        apply_handle(state, handle, [_held(state, handle)], block)
    for name, of in deltas.items():
        schema = state.tables[name].schema
        held = schema.held(state.groups, state.max_parallelism)
        for rows, owners in newest_changes(of, schema, held, task.max_parallelism):
            apply_delta(state, name, rows, owners)


def _expect(state: SubtaskState, blocks: Sequence[_Block]) -> None:
    """Let tables prepare for their changes while these are read.

    A key changes at most once in a step, so a table has at least as many changes as its largest step.
    """
    changes: Counter[tuple[str, int]] = Counter()
    for handle, _ in blocks:
        if handle.variable in state.tables:
            changes[handle.variable, handle.sqn] += handle.rows
    for name, table in state.tables.items():
        table.expect_changes(max((rows for (of, _), rows in changes.items() if of == name), default=0))


def _list_logged(task: StepTask, subtask: int, version: int) -> tuple[list[_Block], list[StoredObject]]:
    """Return the changes of the interval's steps after a version, oldest first, and the objects that hold them."""
    shared = {name for name, schema in task.operator.tables().items() if schema.broadcast}
    blocks: list[_Block] = []
    objects: list[StoredObject] = []
    for step in task.log:
        if step.step > version:
            for number in range(task.parallelism) if shared else [subtask]:
                part = step.part(number)
                found = [(handle, None) for handle in part.handles]
                found += [each for packed in part.inline for each in _unpack(packed)]
                blocks += [each for each in found if number == subtask or each[0].variable in shared]
                objects += part.objects
    return blocks, objects


def _unpack(packed: bytes) -> Iterator[_Block]:
    segment, data = Segment.unpack(packed), pa.py_buffer(packed)
    for handle in segment.handles(segment.places(NOWHERE)):
        is_here = handle.object == NOWHERE  # a base is an object of its own
        yield handle, data.slice(handle.offset, handle.length) if is_here else None


def _list_stored(task: StepTask, state: SubtaskState, version: int) -> tuple[list[_Block], list[StoredObject]] | None:
    """Return the same for the completed checkpoints; None if the chain does not reach back to the version."""
    blocks: list[_Block] = []
    objects: list[StoredObject] = []
    newest_first = [each for each in task.restore.manifests[::-1] if not is_materialization_manifest(each.name)]
    # Each checkpoint has a step of its own, so no more are needed.
    newest_first = newest_first[: task.restore.step - version + 1]
    # Not `read_many`: what is older than the version is not needed, and may be damaged.
    for manifest in read_ahead(lambda each: read_manifest(task.warehouse.store, each, task.stream), newest_first):
        if manifest.step <= version:
            return blocks, objects
        wanted = [
            handle
            for handle in manifest.handles
            if handle.operator == task.operator.name
            and _held(state, handle)
            and (handle.sqn > version or replaces(handle))
        ]
        blocks = [*((handle, None) for handle in sorted(wanted, key=lambda handle: handle.sqn)), *blocks]
        objects += manifest.objects
    return None
