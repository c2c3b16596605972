"""What an operator may do where the consistent region drains, is checkpointed and is reset: Teracloud's callbacks.

`run.callbacks` calls them. An operator with variables alone needs none.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.state.variables import OpaqueState

if TYPE_CHECKING:
    from siltstone.operator import State

Returned: TypeAlias = pa.Table | Mapping[str, pa.Table] | None
"""output rows; of an operator with side outputs, output -> rows"""
PREPARED = "prepared"
"""the name of the variable with what an operator prepares (`StateHandler.prepare_for_nonblocking_checkpoint`)"""
PREPARED_STATE = OpaqueState(create=bytes, serialize=bytes, deserialize=bytes)
"""that variable"""
PREPARED_BYTES = 1 << 30
"""most bytes that a subtask may prepare"""
SENT_BYTES = 1 << 20
"""most bytes that it may prepare if the operator's `checkpoint` gets them on the driver"""


class CheckpointWriter(io.RawIOBase):
    """The checkpoint that a subtask prepares for: a binary file to write, from its beginning on.

    Whatever writes to a file may write to it: `numpy.save(checkpoint, weights)`, `zipfile.ZipFile(checkpoint, "w")`.

    Attributes:
        id: the checkpoint.
    """

    def __init__(self, operator: str, id: int, most_bytes: int) -> None:
        super().__init__()
        self.id = id
        self._operator, self._most, self._file = operator, most_bytes, io.BytesIO()
        self._refused = False

    def writable(self) -> bool:
        """Return True."""
        return True

    # Takes any buffer, which Python 3.11 has no type for.
    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes; return how many.

        Raises:
            UsageError: they are more than a subtask may prepare.
        """
        view = memoryview(data)
        if self._file.tell() + view.nbytes > self._most:
            self._refused = True
            raise self._error()
        return self._file.write(view)

    def take(self) -> bytes:
        """Return what was written, and close the file; for the engine.

        Raises:
            UsageError: something was refused, also if the operator caught the error.
        """
        if self._refused:
            raise self._error()
        written = self._file.getvalue()
        self._file.close()
        return written

    def _error(self) -> UsageError:
        advice = "keep what is larger in variables"
        if self._most == SENT_BYTES:
            advice += f", or leave out `checkpoint`: without it, a subtask may write {PREPARED_BYTES:,} bytes"
        return UsageError(
            f"operator {self._operator} prepared more than {self._most:,} bytes in a subtask"
            f"{', which `checkpoint` is to get on the driver' if self._most == SENT_BYTES else ''}",
            advice=advice,
        )


@dataclass(frozen=True)
class OperatorCheckpoint:
    """What an operator prepared for a checkpoint of its stream, besides its variables.

    Attributes:
        id: the checkpoint.
        prepared: the bytes that its subtasks wrote for this checkpoint, or for the one before an edit or a rescale, in
            the order of their key groups; empty ones are left out.
    """

    id: int
    prepared: tuple[bytes, ...]

    def open(self) -> list[io.BytesIO]:
        """Return `prepared` as binary files to read: `numpy.load(file)`."""
        return [io.BytesIO(part) for part in self.prepared]


class StateHandler:
    """What an operator may do where the consistent region drains, is checkpointed and is reset.

    The callbacks of Teracloud Streams' `StateHandler`, for operators that use something besides their variables: rows
    that wait for more rows, a session with a service, objects elsewhere. Variables need none of them. By default each
    does nothing. `docs/operators.md` has the order in which they come.

    Attributes:
        blocking: whether the next step waits for `checkpoint`; otherwise it runs behind the stream if checkpoints may
            be pending (`max_pending`).
    """

    blocking: bool = False

    def drain(self, state: "State") -> Returned:
        """Finish what the interval has left undone, since a checkpoint follows; may change state and return rows.

        Called in the task of each subtask, at the end of a step that ends in a checkpoint, after the last `process`;
        also in a step without rows, such as at the end of a run, but not in an edit or a rescale. As with `process`,
        equal rows must have equal effects.

        Returns:
            Output rows with the columns `output`, for the sink and the operators that read this one; or None.
        """

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: "State") -> None:
        """Write what is to be known after a reset and is in no variable: a position in another system, a model.

        Called in the task of each subtask, right after `drain`, in the same steps; a replay calls both as the run did.
        The bytes are state: a checkpoint's digests, restores and retention include them. They are kept in memory in
        each step, so large state belongs in variables: at most 1 GiB for each subtask, and at most 1 MiB if the
        operator has `checkpoint`, which gets them on the driver.

        Args:
            checkpoint: `checkpoint.write(data)` appends bytes that a reset brings back; `checkpoint.id` is its id. For
                the same checkpoint and key groups, equal state must give equal bytes.
        """

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Make durable what the prepared bytes refer to; an error here keeps the checkpoint from completing.

        Called on the driver, once the operator's subtasks have prepared and before the checkpoint is committed; for the
        same id again after a reset.
        """

    def reset(self, checkpoint: OperatorCheckpoint, state: "State") -> None:
        """Go back to the checkpoint from which the run starts or restarts; leave the state as it is.

        Called in the task of each subtask, in the first step of a run and after each reset, before `process`.
        `checkpoint.prepared` is what was prepared for the subtask's key groups. What a subtask prepared goes to the one
        that has its first key group now: after a change of parallelism, a subtask may get what several prepared, or
        nothing. The checkpoint of an edit or a rescale has what was prepared for the checkpoint before it.
        """

    def reset_to_initial_state(self) -> None:
        """Go back to the start: the run starts or restarts before the first checkpoint. Called like `reset`."""

    def region_checkpointed(self, checkpoint: int) -> None:
        """React to a completed checkpoint of the stream, whose outputs were delivered.

        Called on the driver, in the order of ids, once the deliveries are recorded. If a delivery fails, or the process
        dies before it, the next run delivers the outputs and then makes the call. `docs/operators.md` lists when a call
        comes twice or not at all: treat it as if it had come for all earlier ids, too.
        """
