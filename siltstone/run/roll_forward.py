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
from siltstone.model import Form, Handle, Kind, StoredObject
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
    return {step.step for step in task.log}.issuperset(range(first, task.base_step + 1))


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
    whole = {handle.variable: handle.sqn for handle, _ in mine if _is_base(handle)}
    if any(_is_base(handle) and handle.sqn <= task.restore.step for handle, _ in mine):
        return False
    mine = [each for each in mine if each[0].sqn >= whole.get(each[0].variable, 0)]
    state.begin(task.base_step, tracking=False)
    for name in whole:
        _clear(state, name)
    _apply(state, task, mine, BlockReader(task.warehouse.store, objects))
    for table in state.tables.values():
        table.mark()
    state.commit()
    return True


def _is_base(handle: Handle) -> bool:
    return handle.form is Form.BASE and handle.kind is Kind.INCREMENTAL


def _clear(state: SubtaskState, name: str) -> None:
    table = state.tables[name]
    keys = [(rows.select(table.schema.primary_key.names), owners) for rows, owners in table.scan(state.groups)]
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
        block_or_file, groups = next(fetched) if block is None else block, handle.key_groups.intersect(state.groups)
        if handle.kind is Kind.OPAQUE or _is_base(handle):
            others.append((handle, block_or_file))
        else:
            assert isinstance(block_or_file, pa.Buffer), "only bases are read in parts"
            schema = state.tables[handle.variable].schema
            deltas[handle.variable].append(open_changes(handle, schema, [groups], block_or_file))
    for handle, block in others[::-1]:
        apply_handle(state, handle, [handle.key_groups.intersect(state.groups)], block)
    for name, of in deltas.items():
        for rows, owners in newest_changes(of, state.tables[name].schema, state.groups, task.max_parallelism):
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
    blocks: list[_Block] = []
    objects: list[StoredObject] = []
    for step in task.log:
        if step.step > version:
            part = step.part(subtask)
            blocks += [(handle, None) for handle in part.handles]
            blocks += [each for packed in part.inline for each in _unpack(packed)]
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
    for manifest in read_ahead(lambda each: read_manifest(task.warehouse.store, each, task.stream), newest_first):
        if manifest.step <= version:
            return blocks, objects
        wanted = [
            handle
            for handle in manifest.handles
            if handle.operator == task.operator.name
            and handle.key_groups.intersect(state.groups)
            and (handle.sqn > version or replaces(handle))
        ]
        blocks = [*((handle, None) for handle in sorted(wanted, key=lambda handle: handle.sqn)), *blocks]
        objects += manifest.objects
    return None
