"""Decide which values of opaque variables, and which bases of tables, a subtask writes if not all of them changed.

Tracking shows what changed: the working state knows the open step's changes, the log those of the interval's earlier
steps.
"""

from collections.abc import Collection

import numpy as np

from siltstone.errors import StateError
from siltstone.format.segment import Segment
from siltstone.format.versions import expand_runs
from siltstone.model import Form, KeyGroupRange, Kind
from siltstone.run.roll_forward import is_logged
from siltstone.run.task import StepTask
from siltstone.state.backend import StateTable, SubtaskState

CHAIN_MANIFESTS = 16
"""maximum manifests that a restore reads for an opaque variable that changes; then it is written whole"""


def version_of(task: StepTask, variable: str) -> np.ndarray:
    """Return per key group (int64[max_parallelism]) the checkpoint that wrote a variable last; 0 if none did."""
    return expand_runs(task.versions.get(variable, ()), task.max_parallelism)


def opaque_to_write(task: StepTask, subtask: int, state: SubtaskState) -> dict[str, Collection[int] | None]:
    """Return opaque variable -> the key groups whose values the step writes; None for all.

    A variable that did not change is left out. All values are written where no checkpoint has any, where an earlier
    step of the interval was not logged, and, if checkpoints have parts of them, where all tables are written as bases
    or files, or chains have become long.
    """
    changed, found, order = state.changed_opaque, dict[str, Collection[int] | None](), task.checkpoint
    logged = None if order is None else _list_logged(task, subtask)
    begins = order is not None and (
        len(task.restore.manifests) >= CHAIN_MANIFESTS or (order.forms and Form.DELTA not in order.forms.values())
    )
    for name in state.opaque:
        versions = version_of(task, name)[state.groups.start : state.groups.end]
        if not versions.all():
            if order is not None or name in changed:
                found[name] = None
        elif order is None:
            if name in changed:
                found[name] = changed[name]
        elif logged is None or (begins and name in {*changed, *logged}):
            found[name] = None
        elif name in changed:
            found[name] = changed[name]
    return found


def unchanged_tables(task: StepTask, subtask: int, state: SubtaskState, tables: Collection[str]) -> set[str]:
    """Return which of these tables did not change in the interval, so that an earlier checkpoint holds them already.

    If no step of the interval was logged, the working state knows what changed, tracked or not. If all were, the log
    knows. If only some were, nothing is known, and the result is empty.
    """
    logged = _list_logged(task, subtask) if tables else None
    if logged is None and any(step.step > task.begins_after for step in task.log):
        return set()
    own = slice(state.groups.start, state.groups.end)
    found = {name for name in tables if version_of(task, name)[own].all()} - (logged or set())
    return {name for name in found if _is_unchanged(state.tables[name], own)}


def _is_unchanged(table: StateTable, own: slice) -> bool:
    """Whether no row of the subtask's own key groups changed since the last mark, tracked or not."""
    try:
        return not table.count_changed()[own].any()
    except StateError:
        return False


def _list_logged(task: StepTask, subtask: int) -> set[str] | None:
    """The tables and opaque variables that earlier steps of the interval changed; None if that is not known."""
    if not is_logged(task, task.begins_after):
        return None
    parts = [step.part(subtask) for step in task.log if step.step > task.begins_after]
    segments = [Segment.unpack(each) for part in parts for each in part.inline]
    found = {h.variable for part in parts for h in part.handles if h.kind is not Kind.INDEX}
    found |= {name for segment in segments for name, _ in segment.opaque}
    return found | {entry.variable for segment in segments for entry in segment.entries()}


def values_in(state: SubtaskState, name: str, groups: Collection[int] | None, part: KeyGroupRange) -> dict[int, bytes]:
    """Return key group -> bytes of an opaque variable, for the given key groups in a part; None for all."""
    return {g: v for g, v in state.opaque[name].items() if g in part and (groups is None or g in groups)}
