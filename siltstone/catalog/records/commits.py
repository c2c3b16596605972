"""Commits: make one checkpoint exist, in one transaction.

A checkpoint exists once `Commits.add` ends: before that nothing of it is visible, afterwards everything is.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.chains import read_manifests
from siltstone.catalog.records.checkpoints import find_newest
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.definitions import record_definition
from siltstone.catalog.records.objects import ObjectKind, close_objects, insert_objects
from siltstone.catalog.records.outbox import insert_outputs
from siltstone.catalog.records.rollbacks import settle_log
from siltstone.catalog.records.steps import step_values
from siltstone.errors import UsageError
from siltstone.log import get_logger
from siltstone.model import Form, StoredObject
from siltstone.store.paths import check_object_name
from siltstone.times import as_utc

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """Everything that makes one checkpoint exist.

    Attributes:
        digest: the hex digest of the state.
        rows: live rows of the whole state.
        bytes: bytes that this checkpoint wrote.
        forms, d: per operator, whether it wrote a base or a delta, and its D.
        oldest_needed: a restore of this checkpoint needs no object of a checkpoint before this one; 0 if that is not
            known.
        replaced: further objects that neither it nor any later checkpoint needs (`restore.live_rules`; patent
            US 9471438: dependencies are kept).
        event_time_max: the highest event time seen.
        details: what else it adds to the catalog, which its manifest carries, too.

    Raises:
        UsageError: an object name could leave the store.
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
    oldest_needed: int = 0
    replaced: Collection[str] = ()
    details: CommitDetails = field(default_factory=CommitDetails)

    def __post_init__(self) -> None:
        staged = [stored for output in self.details.outputs for stored in output.objects]
        for stored in (self.manifest, *self.segments, *self.bases, *staged):
            check_object_name(stored.name)


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that was committed at `at`.

    `manifests` are the manifests that its restore reads (`Chains.list_manifests`), also of materializations completed
    meanwhile.
    """

    manifests: Sequence[StoredObject]
    at: datetime


class Commits(CatalogPart):
    """Commits of checkpoints."""

    def add(
        self,
        stream: str,
        epoch: int,
        commit: CheckpointCommit,
        at: datetime | None = None,
        made_by: int | None = None,
    ) -> Committed:
        """Make a checkpoint exist in one transaction, guarded by the writer epoch (a fenced writer commits nothing:
        promise 5).

        Its time is the database's. If clocks jump, it may be earlier than that of the previous checkpoint; its highest
        event time never is. Its own steps replace those that the input log held for it (`catalog.rollbacks`).

        Args:
            at: when it was committed before, in a catalog that lost it (`run.take_over`).
            made_by: the earlier epoch that made it, if it is committed for that one.

        Raises:
            Fenced: `epoch` is not the stream's newest.
            UsageError: the id does not follow the newest, or an object or step does not fit.
            StateError: its output is decided already, and it would bring other rows (`catalog.outbox`).
            Unreachable: the outcome is unknown until the catalog answers.
        """
        with self._transactions.begin_write(f"checkpoint {commit.id} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            newest = find_newest(connection, stream)
            last = newest.id if newest else 0
            if commit.id != last + 1:
                raise UsageError(f"checkpoint {commit.id} of stream {stream} does not follow the newest, {last}")
            now = self._transactions.time(connection) if at is None else at
            return add_checkpoint(connection, stream, made_by or epoch, commit, newest, now)


def add_checkpoint(
    connection: Connection,
    stream: str,
    epoch: int,
    commit: CheckpointCommit,
    newest: Row[Any] | None,
    now: datetime,
) -> Committed:
    """Make a checkpoint exist after the `newest` one, in a transaction of a caller that has checked that it may."""
    details = commit.details
    settle_log(connection, stream, commit.id, details.steps, repeats=details.repeats)
    _insert(connection, stream, epoch, commit, newest, now)
    if details.definition is not None:
        record_definition(connection, stream, commit.id, details.definition, details.dropped, now)
    insert_outputs(connection, stream, epoch, commit.id, details.outputs)
    before = newest.id if newest else 0
    close_objects(connection, stream, before, before=commit.oldest_needed, names=commit.replaced)
    return Committed(read_manifests(connection, stream, commit.id), as_utc(now))


def _insert(
    connection: Connection,
    stream: str,
    epoch: int,
    commit: CheckpointCommit,
    before: Row[Any] | None,
    now: datetime,
) -> None:
    """Insert all rows of one checkpoint, `before` is the previous one.

    The highest event time never decreases. The commit time is the clock's, so that a wrong time does not affect later
    checkpoints.
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
    place, details = {"stream": stream, "checkpoint": commit.id}, commit.details
    if details.steps:
        connection.execute(insert(t.step), [place | step_values(step) for step in details.steps])
    if details.edit is not None:
        connection.execute(insert(t.edit), place | asdict(details.edit) | {"epoch": epoch, "edited_at": now})
    if details.parallelism is not None:
        connection.execute(update(t.stream).where(t.stream.c.name == stream).values(parallelism=details.parallelism))
