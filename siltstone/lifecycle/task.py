"""What the driver hands a subtask for one step, and what the subtask needs to find its state: plain values."""

from dataclasses import dataclass

from siltstone.changelog.upload_options import UploadOptions
from siltstone.model import Form, KeyGroupRange, StoredObject
from siltstone.operator import Operator
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
class StepTask:
    """One step of one operator, the same for each of its subtasks.

    Attributes:
        base_step: the version the working state must be at before the step.
        oldest_epoch: working state of this and later epochs may be taken over: it is the epoch that completed the
            newest checkpoint, or rewound to it, so whatever they did since can be taken back. 0 if there is none.
        tracking: whether changes are logged during this step.
        checkpoint: set if the step ends in a checkpoint.
    """

    stream: str
    operator: Operator
    epoch: int
    step: int
    base_step: int
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

    def groups(self, subtask: int) -> KeyGroupRange:
        """The key groups that one subtask owns."""
        return KeyGroupRange(0, self.max_parallelism).split(self.parallelism)[subtask]
