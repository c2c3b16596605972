"""Decide what of its variables a subtask writes if not all of them changed.

Tracking shows what changed: the working state knows the open step's changes and those that no step has logged, the log
those of the interval's earlier steps.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from siltstone.errors import StateError
from siltstone.format.opaque import encode_opaque
from siltstone.format.segment import Segment
from siltstone.format.versions import expand_runs
from siltstone.model import Form, KeyGroupRange, Kind
from siltstone.run.task import StepTask
from siltstone.state.backend import StateTable, SubtaskState


@dataclass(frozen=True)
class OpaqueChanges:
    """What a step writes of opaque variables.

    Attributes:
        groups: variable -> the key groups whose values are written; None for all of the subtask's. One that did not
            change is left out.
        too_large: variables that are written whole because the values that changed are too large, or are all -> their
            bytes.
    """

    groups: Mapping[str, Collection[int] | None]
    too_large: Mapping[str, int]


def version_of(task: StepTask, variable: str) -> np.ndarray:
    """Return per key group (int64[max_parallelism]) the checkpoint that wrote a variable last; 0 if none did."""
    return expand_runs(task.versions.get(variable, ()), task.max_parallelism)


def opaque_to_write(task: StepTask, subtask: int, state: SubtaskState, before: Collection[str]) -> OpaqueChanges:
    """Decide which values of opaque variables a step writes.

    In a checkpoint these are all values (a non-incremental variable of US 9471438, whose newest version is enough)
    where the policy decided so, or where those that changed are larger than it allows, or are all; else those that
    changed.

    Args:
        before: what earlier steps of the interval changed (`list_changed`).
    """
    changed, order = state.changed_opaque, task.checkpoint
    groups, too_large = dict[str, Collection[int] | None](), dict[str, int]()
    for name in state.opaque:
        new = not version_of(task, name)[state.groups.start : state.groups.end].all()
        if order is None:
            if name in changed and name in task.tracked:
                groups[name] = None if new else changed[name]
        elif new:
            groups[name] = None
        elif order.forms[name] is Form.DELTA:
            limits = order.limits_bytes.get(name)
            own = {group: state.opaque[name][group] for group in changed.get(name, ())}
            size = len(encode_opaque(own)) if own else 0
            every = bool(own) and own.keys() >= state.opaque[name].keys()
            if every or (limits is not None and size > limits[subtask]):
                groups[name], too_large[name] = None, size
            elif name in changed:
                groups[name] = changed[name]
        elif name not in order.base_only or name in changed or name in before:
            groups[name] = None
    return OpaqueChanges(groups, too_large)


def list_unlogged(task: StepTask, state: SubtaskState) -> frozenset[str]:
    """Return the tables and opaque variables that the open step changed and does not log."""
    own, logged = slice(state.groups.start, state.groups.end), set(task.tracked if task.logs else ())
    changed = {name for name in state.tables.keys() - logged if not _is_unchanged(state.tables[name], own)}
    return frozenset(changed | state.changed_opaque.keys() - logged)


def unchanged_tables(task: StepTask, state: SubtaskState, tables: Collection[str], before: Collection[str]) -> set[str]:
    """Return which of these tables did not change in the interval, so that an earlier checkpoint holds them already.

    Args:
        before: what earlier steps of the interval changed (`list_changed`).
    """
    own = slice(state.groups.start, state.groups.end)
    found = {name for name in tables if version_of(task, name)[own].all()} - set(before)
    return {name for name in found if _is_unchanged(state.tables[name], own)}


def _is_unchanged(table: StateTable, own: slice) -> bool:
    """Whether no row of the subtask's own key groups changed since the last mark, tracked or not."""
    try:
        return not table.count_changed()[own].any()
    except StateError:
        return False


def list_changed(task: StepTask, subtask: int) -> set[str]:
    """Return the tables and opaque variables that earlier steps of the interval changed, as far as the log knows."""
    steps = [step for step in task.log if step.step > task.begins_after]
    parts = [step.part(subtask) for step in steps]
    segments = [Segment.unpack(each) for part in parts for each in part.inline]
    found = {h.variable for part in parts for h in part.handles if h.kind is not Kind.INDEX}
    found |= {name for segment in segments for name, _ in segment.opaque}
    found |= {entry.variable for segment in segments for entry in segment.entries()}
    return found.union(*(step.unlogged[subtask] for step in steps if step.unlogged))


def values_in(state: SubtaskState, name: str, groups: Collection[int] | None, part: KeyGroupRange) -> dict[int, bytes]:
    """Return key group -> bytes of an opaque variable, for the given key groups in a part; None for all."""
    return {g: v for g, v in state.opaque[name].items() if g in part and (groups is None or g in groups)}
