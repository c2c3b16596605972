"""A subtask's acknowledgement of a step: its numbers, and where the changes or bases are that it hands over.

An executor sends it to the driver as JSON with base64 digests. A `SiltstoneError` is sent in it, too, because a retry
of the task would fail again.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Self

import numpy as np

from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.decoding import parse_json, translate_decode_errors
from siltstone.errors import SiltstoneError, StateError
from siltstone.format.output import Staged
from siltstone.model import Form, Handle, KeyGroupRange, Kind, RangeChecksums, SinkFile, StoredObject
from siltstone.state.digest import checkpoint_digest
from siltstone.state.rows_digest import DigestedRows


@dataclass(frozen=True, eq=False)
class Acknowledgement:
    """One subtask's acknowledgement of one step.

    Attributes:
        key_groups: the key groups that the subtask owns.
        handles: where each variable's bytes are.
        objects: the stored objects, shared or not.
        inline: packed segments too small for an object of their own; the driver stores those of all subtasks together.
        unlogged: tables and opaque variables that the step changed, of which `handles` and `inline` have nothing.
        uploads: statistics of the uploads (`UploadStatistics.to_json`); empty if nothing was sent.
        digests: table or opaque variable -> uint64 per key group of the subtask.
        rows_in: rows that the subtask got.
        row_bytes: the bytes of a row in Arrow, on average over the widest batch of rows that it got; of a batch with
            fewer than 1,024 rows, as if it had so many.
        rows_out: rows that its operator returned.
        dead_letters: rows that its operator could not process, and late ones that are dead letters.
        late: late rows, whatever happened to them.
        rows_of: source -> how many of `rows_in` were of it, of an operator that reads several inputs.
        heard: source -> partition of it -> its highest event time (microseconds since 1970) in the rows.
        due: clock -> when the next of the operator's timers is due by it, in microseconds since 1970; None if it has
            no timers, or the step had no clock.
        wants_checkpoint: whether its operator asked for a checkpoint.
        prepared: the parts of what its operator prepared that the checkpoint has, if the driver is to know them.
        event_time_max: the highest event time of the rows, in UTC; None if there were none.
        seconds: phase -> seconds.
        table_rows: table -> its live rows.
        opaque_bytes: opaque variable of which it has values -> their bytes.
        tracked_bytes: table -> bytes of its delta, if it was too large, so that a base was written instead.
        restored_bytes: bytes read from the store, because the working state was not on this machine.
        outputs: name -> the part of the step's output that was staged for its sink; those without rows are left out.
        read: what it read of the source; None if its operator reads another one.
        made: name -> the rows of the step's output for that sink, also if they are not staged.
        broadcast: broadcast table -> the digest of all its rows, which every subtask has.
        error: (class, message, advice) of the subtask's error; None if it succeeded.
    """

    operator: str
    subtask: int
    key_groups: KeyGroupRange
    handles: Sequence[Handle] = ()
    objects: Sequence[StoredObject] = ()
    inline: Sequence[bytes] = ()
    unlogged: Sequence[str] = ()
    uploads: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows_in: int = 0
    row_bytes: float = 0.0
    rows_out: int = 0
    dead_letters: int = 0
    late: int = 0
    rows_of: Mapping[str, int] = field(default_factory=dict)
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    due: Mapping[str, int] | None = None
    wants_checkpoint: bool = False
    prepared: tuple[bytes, ...] = ()
    event_time_max: datetime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    table_rows: Mapping[str, int] = field(default_factory=dict)
    opaque_bytes: Mapping[str, int] = field(default_factory=dict)
    tracked_bytes: Mapping[str, int] = field(default_factory=dict)
    restored_bytes: int = 0
    outputs: Mapping[str, Staged] = field(default_factory=dict)
    read: DigestedRows | None = None
    made: Mapping[str, DigestedRows] = field(default_factory=dict)
    broadcast: Mapping[str, int] = field(default_factory=dict)
    error: tuple[str, str, str] | None = None

    @property
    def state_rows(self) -> int:
        """Live rows of all tables."""
        return sum(self.table_rows.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes stored for this subtask."""
        return self.bytes_of(*Kind)

    def bytes_of(self, *kinds: Kind) -> int:
        """Return the bytes stored for this subtask in handles of some kinds: each byte belongs to exactly one handle,
        but files, of which each table has handles. Those of earlier checkpoints were not stored for it."""
        own, wanted = {stored.name for stored in self.objects}, [h for h in self.handles if h.kind in kinds]
        files = {h.object: h.length for h in wanted if h.form is Form.FILES and h.object in own}
        return sum(h.length for h in wanted if h.form is not Form.FILES) + sum(files.values())

    @property
    def receipt(self) -> str:
        """What every run of the same task must give: rows in and out, and the state's digests.

        It is part of the acknowledgement, so that Spark's SQL can read it there.
        """
        state = checkpoint_digest({self.operator: self.digests})
        return f"{self.subtask}:{self.rows_in}:{self.rows_out}:{state}"

    @classmethod
    def failure(cls, operator: str, subtask: int, error: SiltstoneError) -> Self:
        """Make the acknowledgement of a step that failed."""
        return cls(operator, subtask, KeyGroupRange(0, 0), error=(type(error).__name__, error.message, error.advice))

    def raise_failure(self) -> None:
        """Raise the subtask's error, if it failed."""
        if self.error is not None:
            kind, message, advice = self.error
            raise _error_classes().get(kind, StateError)(message, advice=advice)

    def to_bytes(self) -> bytes:
        """Serialize to bytes that `from_bytes` reads."""
        plain = asdict(self) | {
            "receipt": self.receipt,
            "inline": [base64.b64encode(segment).decode() for segment in self.inline],
            "prepared": [base64.b64encode(part).decode() for part in self.prepared],
            "digests": {
                name: base64.b64encode(np.ascontiguousarray(part, "<u8").tobytes()).decode()
                for name, part in self.digests.items()
            },
            "event_time_max": None if self.event_time_max is None else self.event_time_max.isoformat(),
            "read": None if self.read is None else self.read.to_json(),
            "made": {name: of.to_json() for name, of in self.made.items()},
        }
        for rare in (
            "outputs",
            "unlogged",
            "opaque_bytes",
            "prepared",
            "wants_checkpoint",
            "read",
            "made",
            "late",
            "rows_of",
            "heard",
            "broadcast",
        ):
            if not getattr(self, rare):
                del plain[rare]
        if self.due is None:
            del plain["due"]
        if self.outputs:
            plain["outputs"] = {
                name: asdict(staged) | {"inline": base64.b64encode(staged.inline).decode()}
                for name, staged in self.outputs.items()
            }
        return json.dumps(plain, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            StateError: the bytes are not an acknowledgement.
        """
        with translate_decode_errors("a subtask's answer", "an acknowledgement", StateError):
            plain = parse_json(data)
            del plain["receipt"]
            return cls(**(plain | _decode_fields(plain)))


def merge_uploads(received: Iterable[Acknowledgement]) -> UploadStatistics:
    """Return the statistics of the uploads of several acknowledgements, together."""
    return reduce(UploadStatistics.merge, (UploadStatistics.from_json(a.uploads) for a in received), UploadStatistics())


def _decode_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that JSON has no types for."""
    time, error = plain["event_time_max"], plain["error"]
    return {
        "key_groups": KeyGroupRange(**plain["key_groups"]),
        "handles": [_decode_handle(handle) for handle in plain["handles"]],
        "objects": [_decode_object(stored) for stored in plain["objects"]],
        "inline": [base64.b64decode(segment, validate=True) for segment in plain["inline"]],
        "prepared": tuple(base64.b64decode(part, validate=True) for part in plain.get("prepared", ())),
        "digests": {
            name: np.frombuffer(base64.b64decode(part, validate=True), "<u8") for name, part in plain["digests"].items()
        },
        "outputs": {name: _decode_staged(staged) for name, staged in plain.get("outputs", {}).items()},
        "read": DigestedRows.from_json(plain["read"]) if "read" in plain else None,
        "made": {name: DigestedRows.from_json(of) for name, of in plain.get("made", {}).items()},
        "event_time_max": None if time is None else datetime.fromisoformat(time).astimezone(UTC),
        "error": None if error is None else tuple(error),
    }


def _decode_staged(plain: Mapping[str, Any]) -> Staged:
    objects = tuple((SinkFile if "statistics" in each else StoredObject)(**each) for each in plain["objects"])
    return Staged(plain["rows"], objects, base64.b64decode(plain["inline"], validate=True))


def _decode_handle(plain: Mapping[str, Any]) -> Handle:
    typed = {
        "kind": Kind(plain["kind"]),
        "form": Form(plain["form"]),
        "key_groups": KeyGroupRange(**plain["key_groups"]),
    }
    return Handle(**{**plain, **typed})


def _decode_object(plain: Mapping[str, Any]) -> StoredObject:
    ranges = plain["ranges"]
    return StoredObject(**{**plain, "ranges": None if ranges is None else RangeChecksums(**ranges)})


def _error_classes() -> dict[str, type[SiltstoneError]]:
    """Every class of the tree, by name."""
    found: dict[str, type[SiltstoneError]] = {}
    waiting: list[type[SiltstoneError]] = [SiltstoneError]
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found
