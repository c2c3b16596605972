"""The task of a subtask for one step, with what it needs to find its state: plain values that the driver sends."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.changelog.log import LoggedStep
from siltstone.changelog.upload_options import UploadOptions
from siltstone.model import Form, KeyGroupRange, StoredObject
from siltstone.operator import SOURCE, Operator
from siltstone.state.digest import checkpoint_digest
from siltstone.state.hashing import key_groups
from siltstone.state.schema import TableSchema
from siltstone.store.open import Warehouse
from siltstone.store.paths import StepPath
from siltstone.time.clock_rules import OperatorClock
from siltstone.time.event_time import RowTimes


@dataclass(frozen=True)
class RestorePoint:
    """The checkpoint from which a subtask without usable working state restores it: the newest completed one.

    Attributes:
        checkpoint: its id, 0 before the first.
        step: its last step.
        manifests: the manifest objects of its chain, oldest first, its own last; empty for an operator that it does not
            have.
        files: the checksums of its `.files` objects, if subtasks of this run acknowledged it: this run wrote their
            files, even if the catalog or the store was changed since.
    """

    checkpoint: int = 0
    step: int = 0
    manifests: tuple[StoredObject, ...] = ()
    files: Collection[str] = ()


@dataclass(frozen=True)
class CheckpointOrder:
    """The form of each table of this operator in the checkpoint in which a step ends.

    Attributes:
        forms: table or opaque variable -> its form, for all of them; "table" stands for both here.
        limits_bytes: table -> per subtask, the largest delta; beyond it the subtask writes a base, so that the bound on
            restore cost holds (promise 7). A table that is left out has no limit.
        base_only: tables whose chain is one base: a subtask keeps it, even if a base is ordered, unless the table
            changed.
        files: key groups of a subtask -> its `.files` object in the checkpoint before this one, whose files this one
            may refer to again (`run.persist_files`).
        kept_files: the `.files` objects of all checkpoints from the newest completed one on.
    """

    forms: Mapping[str, Form]
    limits_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    base_only: Collection[str] = ()
    files: Mapping[KeyGroupRange, str] = field(default_factory=dict)
    kept_files: Collection[str] = ()


@dataclass(frozen=True)
class DeadLetterOrder:
    """What a step leaves out, as dead letters.

    Attributes:
        checkpoint: the checkpoint with which they are staged for their sink; None if that output is already decided.
        table: whether their sink is a table.
        offsets: the offsets that the step read, as JSON.
        rows: whether rows that the operator cannot process are left out; otherwise they fail the step.
        files: the files that the step was run without; only one operator has them.
    """

    checkpoint: int | None = None
    offsets: str = ""
    table: bool = False
    rows: bool = True
    files: Sequence[LoggedFile] = ()


@dataclass(frozen=True)
class StepTask:
    """One step of one operator, the same for each of its subtasks.

    Attributes:
        base_step: the version the working state must be at before the step.
        base: per subtask, the identity of the accepted attempt at that version (`identities`); working state of another
            attempt is not used. Empty if the state must be restored.
        oldest_epoch: reuse working state only from this epoch on, because older state may predate a rollback; 0 if
            there is none.
        former_parallelism: that of the epoch which completed `restore`, 0 if there is none: if it is another one, its
            working state may have some of the key groups.
        interval: id of the checkpoint that will include the step; the names of what the step stores begin with it.
        begins_after: the last step of the checkpoint before that; a step after `restore.step` if it is still pending.
        versions: table or opaque variable -> which checkpoint wrote it last, per key group (`format.versions`), pending
            ones included.
        tracked: tables and opaque variables of which the step logs what it changes; a base needs no tracking.
        logs: whether it does; if not, the tables of `tracked` keep what it changes, for the checkpoint.
        log: the steps since the newest complete checkpoint, with the changes that were logged.
        checkpoint: set if the step ends in the checkpoint.
        drains: whether the operator drains at its end, and prepares the checkpoint.
        staged: output of the operator -> whether its sink is a table, whose files the staged rows become; of those that
            are staged for a sink with the checkpoint `interval`.
        hands_on: whether another operator reads an output.
        sinks: the names of outputs that have a sink, whose rows are digested (`run.step_digests`).
        resets: whether the step is the first of its run, or after a reset: the operator is told (`run.callbacks`).
        sources: the names of the stream's sources, of which the operator may read some.
        times: input -> how its rows tell their event time, of the inputs of which somebody asks that.
        clock: the step's clock; None if it has none, and so fires nothing.
        stores: whether it stores its part of the checkpoint; False where lost output is made again.
        dead_letters: what the step leaves out; None for a stream without dead letters.
        fused: the task of the operator that reads this one's output, if it runs in the same tasks of Spark
            (`run.fusing`).
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
    tracked: Collection[str]
    restore: RestorePoint
    checkpoint: CheckpointOrder | None
    upload: UploadOptions
    interval: int = 0
    begins_after: int = 0
    versions: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    log: Sequence[LoggedStep] = ()
    oldest_epoch: int = 0
    former_parallelism: int = 0
    sources: Sequence[str] = (SOURCE,)
    times: Mapping[str, RowTimes] = field(default_factory=dict)
    clock: OperatorClock | None = None
    staged: Mapping[str, bool] = field(default_factory=dict)
    hands_on: bool = True
    sinks: Collection[str] = ()
    resets: bool = False
    stores: bool = True
    dead_letters: DeadLetterOrder | None = None
    drains: bool = False
    logs: bool = True
    fused: "StepTask | None" = None

    @property
    def together(self) -> tuple["StepTask", ...]:
        """This task and those that are fused to it, each behind the one whose output it reads."""
        return (self,) if self.fused is None else (self, *self.fused.together)

    @property
    def last(self) -> "StepTask":
        """The last of the tasks that run together."""
        return self.together[-1]

    @property
    def sorts_out(self) -> bool:
        """Whether rows that the operator cannot process become dead letters; otherwise they fail the step."""
        return self.dead_letters is not None and self.dead_letters.rows

    @property
    def sets_aside(self) -> bool:
        """Whether rows may become dead letters: bad ones, or late ones."""
        return self.sorts_out or (self.late == "dead-letter" and self.clock is not None)

    @property
    def late(self) -> str | None:
        """What happens to late rows, one of `time.event_time.LATE`; None if the operator has none."""
        return next((times.late for times in self.times.values()), None)

    @property
    def read_sources(self) -> tuple[str, ...]:
        """The sources that the operator reads."""
        return tuple(name for name in self.operator.input_names if name in self.sources)

    @property
    def path(self) -> StepPath:
        """Names what the step logs."""
        return StepPath(self.stream, self.epoch, self.interval, self.step)

    def groups(self, subtask: int) -> KeyGroupRange:
        """Return the key groups that one subtask owns."""
        return KeyGroupRange(0, self.max_parallelism).split(self.parallelism)[subtask]

    def owns(self, subtask: int, hashes: np.ndarray) -> np.ndarray:
        """Return which of some keys, by their hashes, are of key groups that one subtask owns (bool[n])."""
        own, groups = self.groups(subtask), key_groups(hashes, self.max_parallelism)
        return (groups >= own.start) & (groups < own.end)


def identity(operator: str, digests: Mapping[str, np.ndarray]) -> str:
    """Compute the identity of an attempt at a version of a subtask's state: a digest of the whole state.

    Attempts with the same state have the same identity, on any host.

    Args:
        digests: table or opaque variable -> uint64 per key group that the subtask has.
    """
    return checkpoint_digest({operator: digests})


def identities(operator: Operator, digests: Mapping[str, np.ndarray], parallelism: int, groups: int) -> tuple[str, ...]:
    """Compute, per subtask, the identity of its part of an operator's state.

    Args:
        digests: table or opaque variable -> uint64[groups]; one that is missing is empty.
        groups: total number of key groups.
    """
    nothing, tables = np.zeros(groups, np.uint64), operator.tables()
    whole = {name: digests.get(name, nothing) for name in (*tables, *operator.opaque_variables())}
    parts = KeyGroupRange(0, groups).split(parallelism)
    return tuple(identity(operator.name, held_digests(whole, tables, part)) for part in parts)


def held_digests(
    digests: Mapping[str, np.ndarray], tables: Mapping[str, TableSchema], groups: KeyGroupRange
) -> dict[str, np.ndarray]:
    """Return, of digests of all key groups, those of what a subtask has: its own, and all of broadcast tables."""
    shared = {name for name, schema in tables.items() if schema.broadcast}
    return {name: of if name in shared else of[groups.start : groups.end] for name, of in digests.items()}
