"""Results of the client's listing methods: recorded facts of a warehouse or a stream, as frozen values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from siltstone.result import Result

if TYPE_CHECKING:
    from siltstone.doctor.findings import Finding
    from siltstone.report.data import ReportData


@dataclass(frozen=True)
class StreamList(Result):
    """The streams in a catalog, by name.

    Each has `stream`, `max_parallelism`, `parallelism` (None: as many subtasks as cores), `forked_from`, `forked_at`,
    and `newest`, its newest completed checkpoint (None before the first).
    """

    streams: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CheckpointList(Result):
    """A stream's completed checkpoints, oldest first.

    Attributes:
        forked_from: the stream that this one was forked from, at checkpoint `forked_at`; None if it is not a fork.
        checkpoints: each with `id`, `forms`, `bytes`, `D`, `rows`, `digest`, `proven`, `event_time_max`,
            `committed_at` and others.
        materialization: operator -> the health of its materialization.
    """

    stream: str
    forked_from: str | None
    forked_at: int | None
    checkpoints: Sequence[Mapping[str, Any]]
    materialization: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CheckpointDetails(Result):
    """One checkpoint's manifest: `details` has the keys of `CheckpointList.checkpoints`, `handles`, `steps`, `chain`
    and others."""

    details: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the details."""
        return dict(self.details)


@dataclass(frozen=True)
class SavepointList(Result):
    """A stream's savepoints by name; expired ones too, until their checkpoint is deleted.

    Each has `name`, `checkpoint`, `created_at`, `expires_at` (None: never) and `expired`.
    """

    stream: str
    savepoints: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Savepoint(Result):
    """One savepoint. Times are ISO 8601 in UTC; `expires_at` is None if it stays until it is dropped."""

    stream: str
    name: str
    checkpoint: int
    created_at: str
    expires_at: str | None
    expired: bool


@dataclass(frozen=True)
class SavepointDropped(Result):
    """A dropped savepoint; its checkpoint stays until it is deleted."""

    stream: str
    name: str
    dropped: bool = True


@dataclass(frozen=True)
class DeletionList(Result):
    """A stream's deletion passes, oldest first: what each deleted, when and by whom."""

    stream: str
    deletions: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OutputList(Result):
    """What a stream's sinks were, or are to be, given; what is forgotten is left out (`retention.outputs`).

    Attributes:
        consistent: the newest checkpoint of which all sinks have their rows, and of all before it; 0 before the first.
        outputs: by checkpoint and name, each with `output`, `checkpoint`, `sink_id` (the id by which its sink knows
            it), `rows`, and `delivered_at` (None: the sink does not have it yet).
    """

    stream: str
    consistent: int
    outputs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Retention(Result):
    """What a stream keeps.

    Attributes:
        recorded: the rules recorded with the stream; None keeps everything.
        in_force: the rules that runs and truncations follow: the recorded ones and those of the settings.
        source: where `in_force` comes from; `from` in JSON.
        described: the rules in force, in words.
    """

    stream: str
    recorded: Mapping[str, Any] | None
    in_force: Mapping[str, Any]
    source: str
    described: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with `from` for `source`."""
        return {"from" if name == "source" else name: value for name, value in super().to_dict().items()}


@dataclass(frozen=True)
class Report(Result):
    """What `report` drew: `data` are the numbers, `picture` the file's path."""

    data: "ReportData"
    picture: str

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and the picture's path."""
        return {**self.data.to_dict(), "picture": self.picture}


@dataclass(frozen=True)
class Diagnosis(Result):
    """What `doctor` found, and how many findings are `ok`, a `warning` or a `problem`."""

    stream: str | None
    ok: int
    warning: int
    problem: int
    findings: "Sequence[Finding]"
