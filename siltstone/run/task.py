"""What the driver hands a subtask for one step, and what the subtask needs to find its state: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from siltstone.changelog.upload_options import UploadOptions
from siltstone.model import Form, KeyGroupRange, StoredObject
from siltstone.operator import Operator
from siltstone.state.digest import checkpoint_digest
from siltstone.store.open import Warehouse


@dataclass(frozen=True)
class RestorePoint:
    """The newest completed checkpoint: where a subtask that has no usable working state gets it from.

    Attributes:
        checkpoint: its id, 0 before the first.
        step: the last step it holds.
        manifests: the manifest objects of its chain, oldest first, itself last; none for an operator that it does
            not have.
    """

    checkpoint: int = 0
    step: int = 0
    manifests: tuple[StoredObject, ...] = ()


@dataclass(frozen=True)
class CheckpointOrder:
    """The step ends in a checkpoint: its id and the form this operator is to take."""

    checkpoint: int
    form: Form
    previous: int
    """the checkpoint a delta builds on"""
    delta_limit_bytes: int | None = None
    """a subtask whose delta is larger writes a base instead, so that the restore bound holds (promise 7)"""


@dataclass(frozen=True)
class DeadLetterOrder:
    """Rows that the operator cannot take are left out of the step, and become dead letters.

    Attributes:
        checkpoint: with which they are staged for their sink; None if they are not, since that was decided before.
        offsets: what the sources gave to the step, as JSON.
    """

    checkpoint: int | None = None
    offsets: str = ""


@dataclass(frozen=True)
class StepTask:
    """One step of one operator, the same for each of its subtasks.

    Attributes:
        base_step: the version the working state must be at before the step.
        base: for each subtask the identity of the attempt at that version that was accepted (`identities`): working
            state that is another attempt's is not used. Empty if only a restore will do.
        oldest_epoch: working state of this and later epochs may be taken over: it is the epoch that completed the
            newest checkpoint, or rolled back to it, so whatever they did since can be taken back. 0 if there is none.
        tracking: whether changes are logged during this step.
        checkpoint: set if the step ends in a checkpoint.
        staged_with: the checkpoint with which the operator's output is staged for a sink; None if it is not.
        hands_on: whether another operator reads the output.
        dead_letters: what is done with rows that the operator cannot take; None: they fail the step.
    """

    stream: str
    operator: Operator
    epoch: int
    step: int
    base_step: int
    base: Sequence[str]
    parallelism: int
    max_parallelism: int
    warehouse: Warehouse
    backend: str
    tracking: bool
    restore: RestorePoint
    checkpoint: CheckpointOrder | None
    upload: UploadOptions
    oldest_epoch: int = 0
    event_time: str | None = None
    staged_with: int | None = None
    hands_on: bool = True
    dead_letters: DeadLetterOrder | None = None

    def groups(self, subtask: int) -> KeyGroupRange:
        """The key groups that one subtask owns."""
        return KeyGroupRange(0, self.max_parallelism).split(self.parallelism)[subtask]


def identity(operator: str, digests: Mapping[str, np.ndarray]) -> str:
    """What tells two attempts at one version of a subtask's state apart: the digest of all that each of them holds.

    Attempts that came to the same state have the same identity, on whatever host they ran.

    Args:
        digests: table or opaque variable -> uint64 per key group of the subtask.
    """
    return checkpoint_digest({operator: digests})


def identities(operator: Operator, digests: Mapping[str, np.ndarray], parallelism: int, groups: int) -> tuple[str, ...]:
    """For each subtask the identity of its part of an operator's whole state.

    Args:
        digests: table or opaque variable -> uint64[groups]; what has none is empty.
        groups: how many key groups there are in all.
    """
    nothing = np.zeros(groups, np.uint64)
    whole = {name: digests.get(name, nothing) for name in (*operator.tables(), *operator.opaque())}
    parts = KeyGroupRange(0, groups).split(parallelism)
    return tuple(identity(operator.name, {n: d[part.start : part.end] for n, d in whole.items()}) for part in parts)
