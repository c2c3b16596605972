"""What the catalog hands out and takes in: frozen values, free of I/O. All times are UTC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from siltstone.errors import UsageError
from siltstone.model import Form, StoredObject
from siltstone.store.paths import check_object_name


class ObjectKind(StrEnum):
    """What a stored object holds."""

    SEGMENT = "segment"
    BASE = "base"
    MANIFEST = "manifest"
    SNAPSHOT = "snapshot"
    MATERIALIZATION = "materialization"
    """a base, or the manifest, of a materialization"""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream the catalog knows. `epoch` is its newest writer epoch, 0 before the first run.

    `parallelism` is that of runs that name none, where it was set. A fork began as a copy of checkpoint `forked_at` of
    the stream `forked_from`. `retention` is what it keeps (`retention.retention_rules`): None, everything. Sinks know a
    new checkpoint by its id plus `sink_offset` (`catalog.outbox`).
    """

    name: str
    max_parallelism: int
    definition: dict[str, Any]
    epoch: int
    created_at: datetime
    parallelism: int | None = None
    forked_from: str | None = None
    forked_at: int | None = None
    retention: dict[str, Any] | None = None
    sink_offset: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One writer epoch of a stream, whose first checkpoint, if it completed any, is `first_checkpoint`.

    `outcome` says how it ended, None while it has not.
    """

    stream: str
    epoch: int
    first_checkpoint: int
    who: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One input step, Spark's batch `batch_id`: its text in the offset log and in its sources' logs."""

    step: int
    batch_id: int
    offsets: str
    sources: str = "{}"


@dataclass(frozen=True, slots=True)
class StepRecord(Step):
    """A recorded input step, and the checkpoint it is part of, which may have been deleted since."""

    checkpoint: int = field(kw_only=True)


BEFORE_FIRST = -1
"""the batch id of the step that says where a stream's sources begin"""


@dataclass(frozen=True, slots=True)
class InputPosition:
    """What a query needs to read on after a checkpoint, and nothing of what comes before.

    Attributes:
        beginning: where the sources begin: a step of batch `BEFORE_FIRST`, with the initial offset of each source that
            has one (`-` for one that has none, or keeps it in its own log) and the entries of sources' logs so far.
            None for a stream that has begun no batch, or began before beginnings were recorded.
        entries: the steps up to the checkpoint with entries of sources' logs, oldest first.
        newest: the newest two steps up to the checkpoint, oldest first.
    """

    beginning: Step | None
    entries: Sequence[Step]
    newest: Sequence[Step]

    @property
    def next_batch(self) -> int:
        """The id of the batch that comes next."""
        return self.newest[-1].batch_id + 1 if self.newest else 0


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """A stored object: the checkpoint and writer epoch that wrote it, its size in bytes, its checksum."""

    name: str
    kind: ObjectKind
    checkpoint: int
    epoch: int
    bytes: int
    checksum: str

    @property
    def stored(self) -> StoredObject:
        """The object as the store knows it."""
        return StoredObject(self.name, self.bytes, self.checksum)


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one variable's rows by hand: how many rows were put, and how many that were there were deleted.

    `source` says where the rows came from; of a file, `source_checksum` is that of its bytes (`store.checksums`).
    """

    operator: str
    variable: str
    upserts: int
    deletes: int
    source: str
    source_checksum: str | None
    who: str


@dataclass(frozen=True, slots=True)
class EditRecord(Edit):
    """A recorded edit: it is what makes a checkpoint, which `epoch` wrote, differ from the one before."""

    stream: str = field(kw_only=True)
    checkpoint: int = field(kw_only=True)
    epoch: int = field(kw_only=True)
    edited_at: datetime = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Output:
    """What a checkpoint hands to one sink: `rows` rows, staged in `objects`, in this order.

    `name` says whose it is: the operator's whose output it is. `arrow_schema` is that of the rows, in Arrow's own
    serialization.
    """

    name: str
    arrow_schema: bytes
    rows: int
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """Everything that makes one checkpoint exist.

    `rows` is the live rows of the whole state, `bytes` what this checkpoint wrote, `digest` the hex digest of
    the state. `forms` and `d` say per operator whether it wrote a base or a delta, and its D.
    `first` says per operator from which checkpoint on a restore of this one reads that
    operator's objects: this one itself for a base (patent US 9471438: dependencies are kept).
    `event_time_max` is the highest event time seen. `edit` says what was changed by hand. With `parallelism`, runs that
    name none have that one from this checkpoint on. `definition` is what this checkpoint is the first to be made under,
    None where it is that of the one before; with it, the state of `dropped` (`OPERATOR` or `OPERATOR.VARIABLE`) was
    given up. `outputs` are what sinks are to have once it exists. `repeats`: it was given up, and its steps must be
    those logged for it, whose output is decided already (`catalog.outbox`).

    Raises:
        UsageError: an object name that could leave the store, or a dependency that is not earlier.
    """

    id: int
    manifest: StoredObject
    digest: str
    rows: int
    bytes: int
    forms: Mapping[str, Form]
    d: Mapping[str, int] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    event_time_max: datetime | None = None
    segments: Sequence[StoredObject] = ()
    bases: Sequence[StoredObject] = ()
    first: Mapping[str, int] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    edit: Edit | None = None
    parallelism: int | None = None
    definition: Mapping[str, Any] | None = None
    dropped: Sequence[str] = ()
    outputs: Sequence[Output] = ()
    repeats: bool = False

    def __post_init__(self) -> None:
        staged = [stored for output in self.outputs for stored in output.objects]
        for stored in (self.manifest, *self.segments, *self.bases, *staged):
            check_object_name(stored.name)
        late = [i for i in self.first.values() if not 0 < i <= self.id]
        if late:
            raise UsageError(f"checkpoint {self.id} cannot depend on {late[0]}: it builds on earlier ones only")


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """What the checkpoints from `checkpoint` on were made under, until the next record; fields as in
    `CheckpointCommit`."""

    stream: str
    checkpoint: int
    definition: dict[str, Any]
    dropped: tuple[str, ...]
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A completed checkpoint; fields as in `CheckpointCommit`.

    `event_time_max` is that of all steps up to this checkpoint. `proof` is why the newest proof failed.
    `restore_s` and `restore_bytes` are what its newest measured restore took and read. `deleted_at` is when it was
    deleted, None while it is not.
    """

    stream: str
    id: int
    epoch: int
    committed_at: datetime
    manifest: StoredObject
    digest: str
    rows: int
    bytes: int
    forms: dict[str, Form]
    d: dict[str, int]
    statistics: dict[str, Any]
    event_time_max: datetime | None
    proven_at: datetime | None
    proof: str | None
    restore_s: float | None
    restore_bytes: int | None
    deleted_at: datetime | None

    @property
    def proven(self) -> bool | None:
        """Did the newest proof hold? None where none was tried."""
        return True if self.proven_at else None if self.proof is None else False


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A checkpoint the catalog still has. Restoring it reads from checkpoint `first` on.

    One marked as deleted is never restored: its `first` is itself.
    """

    id: int
    first: int
    deleted_at: datetime | None
    committed_at: datetime

    @property
    def deleted(self) -> bool:
        """Whether it is marked as deleted, and only its rows and objects are left."""
        return self.deleted_at is not None


@dataclass(frozen=True, slots=True)
class SavepointRecord:
    """A name that keeps one checkpoint from deletion until `expires_at`; for good, where that is None."""

    stream: str
    name: str
    checkpoint: int
    created_at: datetime
    expires_at: datetime | None

    def expired(self, now: datetime) -> bool:
        """Whether it keeps its checkpoint no longer."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A full copy of the state as it was live at one checkpoint, for row by row comparison."""

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    taken_at: datetime
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class MaterializationRecord:
    """A materialization of one operator at one checkpoint: running, done (`manifest` is set) or failed (`error` is).

    `id` is that of the lease under which it runs, and part of the names of its objects. `rows` and `bytes` are of its
    bases; `seconds` is what it took.
    """

    stream: str
    id: str
    operator: str
    checkpoint: int
    who: str
    began_at: datetime
    ended_at: datetime | None = None
    error: str | None = None
    manifest: StoredObject | None = None
    rows: int | None = None
    bytes: int | None = None
    seconds: float | None = None

    @property
    def outcome(self) -> str:
        """`running`, `done` or `failed`."""
        return "running" if self.ended_at is None else "done" if self.manifest else "failed"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease on checkpoints `first` to `last` of a stream; `id` is its own, `who` tells people whose.

    `process` tells whether its holder lives (`processes`), None where that cannot be told.
    """

    id: str
    stream: str
    first: int
    last: int
    who: str
    taken_at: datetime
    expires_at: datetime
    process: str | None = None

    def covers(self, checkpoint: int) -> bool:
        """Whether the checkpoint is among its own."""
        return self.first <= checkpoint <= self.last


@dataclass(frozen=True, slots=True)
class RewindingRecord:
    """One rewinding, by the writer epoch `epoch`: from checkpoint `newest` to `checkpoint`; 0 is before the first."""

    stream: str
    epoch: int
    checkpoint: int
    newest: int
    reason: str
    who: str
    rewound_at: datetime

    def gave_up(self, epoch: int, checkpoint: int) -> bool:
        """Whether what that epoch wrote for that checkpoint was given up by this one."""
        return epoch < self.epoch and self.checkpoint < checkpoint <= self.newest


@dataclass(frozen=True, slots=True)
class CatalogView:
    """What the catalog says at one moment about a stream's objects.

    Attributes:
        epoch: the newest writer epoch; `ended` if its run has ended.
        newest: the newest completed checkpoint, 0 before the first.
        epochs: those of which there is a checkpoint, deleted ones that wait among them.
        leases: those that live.
        referenced: names that a checkpoint, a snapshot or an output of any stream refers to, among those asked for.
        at: this moment, UTC.
        rewindings: all there were, oldest first.
    """

    stream: str
    epoch: int
    ended: bool
    newest: int
    epochs: frozenset[int]
    leases: tuple[LeaseRecord, ...]
    referenced: frozenset[str]
    at: datetime
    rewindings: tuple[RewindingRecord, ...] = ()


def as_utc(time: datetime) -> datetime:
    """The same instant in UTC; a time without zone is UTC already."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def parse_time(text: str) -> datetime:
    """An ISO 8601 date or time, in UTC unless it names another zone.

    Raises:
        UsageError: it is not one.
    """
    try:
        return as_utc(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time: write it like 2013-07-04T12:00:00 (UTC)") from None
