"""Call what an operator does at the points of the region's protocol (`state_handler.StateHandler`).

Each call has `checkpoint_timeout_s`, like the uploads of a checkpoint. What an operator prepares is an opaque variable
of its own: digests, restores, references and rescaling take it like any other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.upload_retries import OPTION
from siltstone.errors import UsageError
from siltstone.operator import Operator, State
from siltstone.restore.restore import digests_of
from siltstone.run.task import StepTask
from siltstone.run.users_code import call_within
from siltstone.state.backend import SubtaskState
from siltstone.state_handler import PREPARED, PREPARED_BYTES, SENT_BYTES, CheckpointWriter, OperatorCheckpoint

T = TypeVar("T")


def begin(task: StepTask, state: SubtaskState, bound: State) -> None:
    """Reset the operator if the step is the first one of its run, or after a reset.

    Raises:
        SiltstoneError, OperatorFailed: see `users_code.call_within`.
        UsageError: it changed state.
    """
    operator = task.operator
    if not task.resets:
        return
    if not task.restore.checkpoint:
        if operator.defines("reset_to_initial_state"):
            _call(operator, task.upload, operator.reset_to_initial_state)
    elif operator.defines("reset"):
        before, back = digests_of(state), OperatorCheckpoint(task.restore.checkpoint, _parts(state))
        _call(operator, task.upload, operator.reset, back, bound)
        bound.flush()
        if any(not np.array_equal(before[name], each) for name, each in digests_of(state).items()):
            raise UsageError(f"operator {operator.name}: reset changed state: leave that to process")


def drains(task: StepTask) -> bool:
    """Whether the operator may return rows at the end of the step, besides those that it makes of rows."""
    return task.drains and task.operator.defines("drain")


def drain(task: StepTask, state: SubtaskState, bound: State) -> pa.Table | None:
    """Drain the operator and have it prepare, if the task says so; return the rows that it drained.

    Raises:
        SiltstoneError, OperatorFailed: see `users_code.call_within`.
        UsageError: it prepared more than it may, or returned something.
    """
    operator = task.operator
    if not task.drains:
        return None
    output = _call(operator, task.upload, operator.drain, bound) if operator.defines("drain") else None
    prepare = operator.prepare_for_nonblocking_checkpoint
    if operator.defines(prepare.__name__):
        most = SENT_BYTES if operator.defines("checkpoint") else PREPARED_BYTES
        with CheckpointWriter(operator.name, task.interval, most) as writer:
            if _call(operator, task.upload, prepare, writer, bound) is not None:
                raise UsageError(
                    f"operator {operator.name}: {prepare.__name__} returned something",
                    advice="write bytes to the checkpoint that it is given: checkpoint.write(data)",
                )
            written = writer.take()
        # In place of what former subtasks prepared, which may have had other key groups.
        state.set_opaque(PREPARED, {**dict.fromkeys(state.opaque[PREPARED], b""), state.groups.start: written})
    return output


def list_prepared(task: StepTask, state: SubtaskState) -> tuple[bytes, ...]:
    """Return what a checkpoint has of what was prepared, if the operator's `checkpoint` wants it on the driver.

    Raises:
        UsageError: it is more than the driver gets: an older definition, which did not want it there, prepared it.
    """
    if task.checkpoint is None or not task.operator.defines("checkpoint"):
        return ()
    parts = _parts(state)
    if any(len(part) > SENT_BYTES for part in parts):
        raise UsageError(
            f"operator {task.operator.name} has a `checkpoint` that is to get {max(map(len, parts)):,} bytes on the "
            f"driver, which it prepared before it had one; it may be {SENT_BYTES:,}",
            advice="run the stream once before you edit or rescale it, or leave out `checkpoint`",
        )
    return parts


def _parts(state: SubtaskState) -> tuple[bytes, ...]:
    """Return what was prepared for a subtask's key groups, in their order."""
    stored = state.opaque.get(PREPARED, {})
    return tuple(stored[group] for group in sorted(stored) if stored[group])


def checkpoint(
    operators: Iterable[Operator],
    id: int,
    received: Mapping[str, Sequence[Acknowledgement]],
    upload: UploadOptions,
    *,
    blocking: bool,
) -> None:
    """Call `checkpoint` of those operators that are blocking, or of the others, on the driver.

    Args:
        id: the checkpoint.
        received: operator -> the acknowledgements of its subtasks for the last step.

    Raises:
        SiltstoneError, OperatorFailed: see `users_code.call_within`.
    """
    for operator in operators:
        if operator.blocking == blocking and operator.defines("checkpoint"):
            parts = sorted(received.get(operator.name, ()), key=lambda a: a.subtask)
            said = OperatorCheckpoint(id, tuple(part for a in parts for part in a.prepared))
            _call(operator, upload, operator.checkpoint, said)


def region_checkpointed(operators: Iterable[Operator], id: int, upload: UploadOptions) -> None:
    """Tell operators, on the driver, that a checkpoint is complete and its outputs are delivered.

    Raises:
        SiltstoneError, OperatorFailed: see `users_code.call_within`.
    """
    for operator in operators:
        if operator.defines("region_checkpointed"):
            _call(operator, upload, operator.region_checkpointed, id)


def _call(operator: Operator, upload: UploadOptions, callback: Callable[..., T], *args: Any) -> T:
    return call_within(upload.checkpoint_timeout_s, operator, partial(callback, *args), callback.__name__, OPTION)
