"""Commits: everything that makes one checkpoint exist, in one transaction.

A checkpoint exists from the end of `Commits.add` on: before it nothing is visible, after it everything is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, update

from siltstone.catalog import fencing
from siltstone.catalog import tables as t
from siltstone.catalog.chains import follow_chains
from siltstone.catalog.checkpoints import find_newest
from siltstone.catalog.definitions import record_definition
from siltstone.catalog.edits import Edit
from siltstone.catalog.objects import ObjectKind, insert_objects
from siltstone.catalog.outbox import Output, insert_outputs
from siltstone.catalog.rollbacks import settle_log
from siltstone.catalog.steps import Step, step_values
from siltstone.catalog.transactions import CatalogPart
from siltstone.errors import UsageError
from siltstone.log import get_logger
from siltstone.model import Form, StoredObject
from siltstone.store.paths import check_object_name
from siltstone.times import as_utc

_LOG = get_logger(__name__)


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


class Commits(CatalogPart):
    """Commits of checkpoints."""

    def add(self, stream: str, epoch: int, commit: CheckpointCommit) -> dict[str, int]:
        """Make a checkpoint exist, whole, in one transaction guarded by the writer epoch (promise 5).

        Its time is the database's own. Where clocks jump, that may be before the time of the checkpoint it follows. Its
        highest event time never is. What the input log held for it gives way to its own steps (`catalog.rollbacks`).

        Returns:
            operator -> the checkpoint its chain begins with: later than `commit.first` says, where a materialization
            has been completed meanwhile.

        Raises:
            Fenced: `epoch` is not the stream's newest.
            UsageError: the id does not follow the newest, or an object, step or dependency does not fit.
            StateError: its output is decided already, and it would bring other rows (`catalog.outbox`).
            Unreachable: whether it exists is known when the catalog answers again.
        """
        with self._transactions.writing(f"checkpoint {commit.id} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            newest = find_newest(connection, stream)
            last = newest.id if newest else 0
            if commit.id != last + 1:
                raise UsageError(f"checkpoint {commit.id} of stream {stream} does not follow the newest, {last}")
            first = follow_chains(connection, stream, newest, commit.forms, commit.first)
            settle_log(connection, stream, commit)
            now = self._transactions.time(connection)
            _insert(connection, stream, epoch, commit, newest, now, first)
            record_definition(connection, stream, commit, now)
            insert_outputs(connection, stream, epoch, commit.id, commit.outputs)
            return first


def _insert(
    connection: Connection,
    stream: str,
    epoch: int,
    commit: CheckpointCommit,
    before: Row[Any] | None,
    now: datetime,
    first: Mapping[str, int],
) -> None:
    """All rows of one checkpoint, its chains beginning at `first`; `before` is the one it follows.

    The highest event time never goes back from one to the next. The time of commit is what the clock says: a wrong one
    is not carried on to those that follow.
    """
    if before is not None and as_utc(now) < before.committed_at:
        _LOG.warning(
            "a checkpoint is committed before the one it follows: the catalog's clock was ahead then or is behind now; "
            "retention by time and `--at TIME` go by these times",
            stream=stream,
            checkpoint=commit.id,
            committed_at=as_utc(now).isoformat(timespec="seconds"),
            before=before.committed_at.isoformat(timespec="seconds"),
        )
    event_times = [commit.event_time_max, before.event_time_max if before else None]
    connection.execute(
        insert(t.checkpoint),
        {
            "stream": stream,
            "id": commit.id,
            "epoch": epoch,
            "committed_at": now,
            "manifest": commit.manifest.name,
            "manifest_bytes": commit.manifest.bytes,
            "manifest_checksum": commit.manifest.checksum,
            "digest": commit.digest,
            "rows": commit.rows,
            "bytes": commit.bytes,
            "forms": {operator: Form(form).value for operator, form in commit.forms.items()},
            "d": dict(commit.d),
            "statistics": dict(commit.statistics),
            "event_time_max": max((as_utc(time) for time in event_times if time), default=None),
        },
    )
    objects = [(ObjectKind.MANIFEST, commit.manifest)]
    objects += [(ObjectKind.SEGMENT, stored) for stored in commit.segments]
    objects += [(ObjectKind.BASE, stored) for stored in commit.bases]
    insert_objects(connection, stream, epoch, commit.id, objects)
    place = {"stream": stream, "checkpoint": commit.id}
    if first:
        rows = [place | {"operator": operator, "first": begins} for operator, begins in sorted(first.items())]
        connection.execute(insert(t.dependency), rows)
    if commit.steps:
        connection.execute(insert(t.step), [place | step_values(step) for step in commit.steps])
    if commit.edit is not None:
        connection.execute(insert(t.edit), place | asdict(commit.edit) | {"epoch": epoch, "edited_at": now})
    if commit.parallelism is not None:
        connection.execute(update(t.stream).where(t.stream.c.name == stream).values(parallelism=commit.parallelism))
