"""Decide which values of opaque variables a subtask writes: those of the key groups that changed, or all.

What changed is known by tracking: the open step's from the working state, the interval's earlier steps' from the log.
"""

from collections.abc import Collection

import numpy as np

from siltstone.format.segment import Segment
from siltstone.format.versions import expand_runs
from siltstone.model import Form, KeyGroupRange, Kind
from siltstone.run.roll_forward import is_logged
from siltstone.run.task import StepTask
from siltstone.state.backend import SubtaskState

CHAIN_MANIFESTS = 16
"""how many manifests a restore reads until an opaque variable that changes is written whole, so that its chain ends"""


def version_of(task: StepTask, variable: str) -> np.ndarray:
    """Return per key group (int64[max_parallelism]) the checkpoint that wrote a variable last; 0 if none did."""
    return expand_runs(task.versions.get(variable, ()), task.max_parallelism)


def opaque_to_write(task: StepTask, subtask: int, state: SubtaskState) -> dict[str, Collection[int] | None]:
    """Return opaque variable -> the key groups whose values the step writes; None for all.

    A variable that did not change is left out. All values are written where no checkpoint has any, where an earlier
    step of the interval was not logged, and, if checkpoints have parts of them, where all tables are written as bases
    or chains have become long.
    """
    changed, found, order = state.changed_opaque, dict[str, Collection[int] | None](), task.checkpoint
    logged = None if order is None else _logged(task, subtask)
    begins = order is not None and (
        len(task.restore.manifests) >= CHAIN_MANIFESTS or {*order.forms.values()} == {Form.BASE}
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


def _logged(task: StepTask, subtask: int) -> set[str] | None:
    """The opaque variables that earlier steps of the interval changed; None if that is not known."""
    if not is_logged(task, task.begins_after):
        return None
    parts = [step.part(subtask) for step in task.log if step.step > task.begins_after]
    stored = {h.variable for part in parts for h in part.handles if h.kind is Kind.OPAQUE}
    return stored | {name for part in parts for each in part.inline for name, _ in Segment.unpack(each).opaque}


def values_in(state: SubtaskState, name: str, groups: Collection[int] | None, part: KeyGroupRange) -> dict[int, bytes]:
    """Return key group -> bytes of an opaque variable, for the given key groups in a part; None for all."""
    return {g: v for g, v in state.opaque[name].items() if g in part and (groups is None or g in groups)}
