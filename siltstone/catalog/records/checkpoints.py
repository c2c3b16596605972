"""Checkpoints: list them, find one by name or time, and record whether they were proven."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.model import LATEST, Form, StoredObject
from siltstone.times import as_utc, parse_time


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A completed checkpoint; fields as in `commits.CheckpointCommit`.

    `event_time_max` is the highest event time up to this checkpoint. `proof` is why the newest proof failed.
    `restore_s` and `restore_bytes` are the seconds and bytes of its newest measured restore. `deleted_at` is when it
    was marked as deleted, or None.
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
        """Whether the newest proof succeeded; None if none was tried."""
        return True if self.proven_at else None if self.proof is None else False


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A checkpoint that the catalog still has, marked as deleted or not."""

    id: int
    deleted_at: datetime | None
    committed_at: datetime

    @property
    def deleted(self) -> bool:
        """Whether it is marked as deleted, and only its rows and objects are left."""
        return self.deleted_at is not None


class Checkpoints(CatalogPart):
    """The completed checkpoints of streams."""

    def last_id(self, stream: str) -> int:
        """Return the newest checkpoint's id, 0 if there is none."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            newest = find_newest(connection, stream)
            return newest.id if newest else 0

    def list_newest(self) -> dict[str, tuple[int, int, datetime]]:
        """Map every stream that has checkpoints to the id and the epoch of its newest one, and when it was created."""
        s, c, of = t.stream.c, t.checkpoint.c, t.checkpoint.alias().c
        ids = select(of.id).where(of.stream == s.name, of.deleted_at.is_(None)).order_by(of.id.desc()).limit(1)
        newest = ids.correlate(t.stream).scalar_subquery()
        joined = t.stream.join(t.checkpoint, (c.stream == s.name) & (c.id == newest))
        with self._transactions.begin_read() as connection:
            found = connection.execute(select(s.name, c.id, c.epoch, s.created_at).select_from(joined))
            return {name: (id, epoch, created_at) for name, id, epoch, created_at in found}

    def list_failed(self) -> list[CheckpointRecord]:
        """List the checkpoints of all streams whose newest proof failed, by stream and id; not those marked as
        deleted."""
        c = t.checkpoint.c
        query = select(t.checkpoint).where(t.PROOF_FAILED, c.deleted_at.is_(None)).order_by(c.stream, c.id)
        with self._transactions.begin_read() as connection:
            return [to_checkpoint(row) for row in connection.execute(query)]

    def get_latest(self, stream: str) -> CheckpointRecord:
        """Return the newest checkpoint.

        Raises:
            UnknownCheckpoint: there is none yet.
        """
        return self._get_newest(stream, "no latest checkpoint")

    def get(self, stream: str, id: int) -> CheckpointRecord:
        """Return one checkpoint; also one marked as deleted (`deleted_at`), while others build on it.

        Raises:
            UnknownCheckpoint: it does not exist; the message says which do.
        """
        return self._get_newest(stream, f"no checkpoint {id}", has_id(id), marked=True)

    def resolve(self, stream: str, at: str) -> int:
        """Return the id for `at`: `latest`, an id, a savepoint, or a time (ISO 8601, UTC): the last commit by then.

        For a time, that is the highest id among the checkpoints committed then or earlier. Ids are in the order of
        commits; so are times, unless a clock was wrong.

        Raises:
            UnknownCheckpoint: none matches; the message says which exist.
        """
        if at == LATEST:
            return self.get_latest(stream).id
        if at.isascii() and at.isdigit():
            id = int(at) if len(at) < 20 else ID_END
            return self._get_newest(stream, f"no checkpoint {id}", has_id(id)).id
        try:
            time = parse_time(at)
        except UsageError:
            named = self._savepoints(stream)
            if at in named:
                return self._get_newest(stream, f"no checkpoint {named[at]}", has_id(named[at])).id
            names = f" ({', '.join(named)})" if named else ""
            use = f"use latest, an id, a savepoint{names}, or an ISO time (UTC)"
            raise UnknownCheckpoint(f"{at!r} is not a checkpoint: {use}") from None
        missing = f"no checkpoint as old as {time.isoformat()}"
        return self._get_newest(stream, missing, t.checkpoint.c.committed_at <= time).id

    def as_of(self, stream: str, event_time: datetime) -> int:
        """Return the id of the last checkpoint whose highest event time is not later than `event_time`.

        Raises:
            UnknownCheckpoint: there is none; the message says which exist.
        """
        time = as_utc(event_time)
        missing = f"no checkpoint of events up to {time.isoformat()}"
        return self._get_newest(stream, missing, t.checkpoint.c.event_time_max <= time).id

    def successor(self, stream: str, id: int) -> CheckpointRecord | None:
        """Return the checkpoint after `id`, even if it is marked as deleted; None if it does not exist."""
        with self._transactions.begin_read() as connection:
            found = find_newest(connection, stream, has_id(id + 1), marked=True)
            return None if found is None else to_checkpoint(found)

    def record_proof(
        self,
        stream: str,
        id: int,
        proven: bool,
        reason: str | None = None,
        *,
        epoch: int | None = None,
        restore_s: float | None = None,
        restore_bytes: int | None = None,
    ) -> None:
        """Record the outcome of a proof, replacing the previous one; `reason` says why it failed.

        A proof that restored this checkpoint alone also records its seconds and bytes (`restore_s`, `restore_bytes`);
        without them, the earlier measurement stays.

        Args:
            epoch: the writer epoch of the checkpoint that was proven, in case it was given up and made again meanwhile.

        Raises:
            UnknownCheckpoint: it does not exist.
        """
        values: dict[str, Any] = {"proof": None if proven else reason or "failed"}
        if restore_s is not None:
            values |= {"restore_s": restore_s, "restore_bytes": restore_bytes}
        with self._transactions.begin_write(f"the proof of checkpoint {id} of stream {stream}") as connection:
            at = update(t.checkpoint).where(t.checkpoint.c.stream == stream, has_id(id))
            at = at if epoch is None else at.where(t.checkpoint.c.epoch == epoch)
            values["proven_at"] = self._transactions.time(connection) if proven else None
            if connection.execute(at.values(values)).rowcount == 0:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {id}")

    def record_restore(self, stream: str, id: int, *, epoch: int, restore_s: float, restore_bytes: int) -> None:
        """Record the seconds and bytes of a restore of the whole checkpoint, replacing the previous measurement.

        Nothing is recorded if the checkpoint of this writer epoch no longer exists.
        """
        values = {"restore_s": restore_s, "restore_bytes": restore_bytes}
        with self._transactions.begin_write(f"a restore of checkpoint {id} of stream {stream}") as connection:
            c = t.checkpoint.c
            at = update(t.checkpoint).where(c.stream == stream, has_id(id), c.epoch == epoch)
            connection.execute(at.values(values))

    def list_times_after(self, stream: str, id: int, epoch: int) -> list[datetime]:
        """List when each checkpoint after `id`, or of a later `epoch`, was committed, oldest first."""
        c = t.checkpoint.c
        later = (c.id > id) | (c.epoch > epoch)
        query = select(c.committed_at).where(c.stream == stream, later, c.deleted_at.is_(None)).order_by(c.id)
        with self._transactions.begin_read() as connection:
            return list(connection.scalars(query))

    def list_restored(self, stream: str, limit: int) -> list[CheckpointRecord]:
        """List the newest `limit` checkpoints of which a restore was measured, oldest first; marked ones too."""
        query = select_checkpoints(stream, marked=True).where(t.checkpoint.c.restore_s.is_not(None)).limit(limit)
        with self._transactions.begin_read() as connection:
            return [to_checkpoint(row) for row in connection.execute(query)][::-1]

    def _get_newest(
        self, stream: str, missing: str, *where: ColumnElement[bool], marked: bool = False
    ) -> CheckpointRecord:
        with self._transactions.begin_read() as connection:
            found = find_newest(connection, stream, *where, marked=marked)
            if found is None:
                raise unknown_checkpoint_error(connection, stream, missing)
            return to_checkpoint(found)

    def _savepoints(self, stream: str) -> Mapping[str, int]:
        """Return savepoint -> checkpoint."""
        s = t.savepoint.c
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            found = connection.execute(select(s.name, s.checkpoint).where(s.stream == stream).order_by(s.name))
            return {name: checkpoint for name, checkpoint in found}

    def list_after(self, stream: str, id: int, limit: int, *, marked: bool = False) -> list[CheckpointRecord]:
        """List the first `limit` checkpoints after `id`, oldest first; empty for an unknown stream.

        With `marked`, also those marked as deleted that others need.
        """
        later = (
            select_checkpoints(stream, marked=marked)
            .where(t.checkpoint.c.id > id)
            .order_by(None)
            .order_by(t.checkpoint.c.id)
        )
        with self._transactions.begin_read() as connection:
            return [to_checkpoint(row) for row in connection.execute(later.limit(limit))]

    def list_retained(self, stream: str) -> list[RetainedCheckpoint]:
        """List every checkpoint that the catalog still has, marked ones too, ascending."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return _read_retained(connection, stream)

    def list(self, stream: str, limit: int | None = None, *, marked: bool = False) -> list[CheckpointRecord]:
        """List all checkpoints, or the newest `limit`; oldest first.

        With `marked`, also those marked as deleted that others build on.
        """
        query = select_checkpoints(stream, marked=marked).limit(limit)
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return [to_checkpoint(row) for row in connection.execute(query)][::-1]


def unknown_checkpoint_error(connection: Connection, stream: str, missing: str) -> UnknownCheckpoint:
    """Make the error for a missing checkpoint: `missing` says which; the message lists what exists.

    Raises:
        UnknownStream: the stream does not exist, either.
    """
    get_stream(connection, stream)
    c = t.checkpoint.c
    summary = select(func.count(), func.min(c.id), func.max(c.id), func.min(c.event_time_max), func.min(c.committed_at))
    live = summary.where(c.stream == stream, c.deleted_at.is_(None))
    count, first, last, events, committed = connection.execute(live).one()
    if not count:
        return UnknownCheckpoint(f"{missing} of stream {stream}: it has none yet, run it first")
    seen = f", events from {events.isoformat()}" if events else ", none with an event time"
    there = f"it has {count}, {first} to {last}, committed from {committed.isoformat()}{seen}"
    return UnknownCheckpoint(f"{missing} of stream {stream}: {there}")


def select_checkpoints(stream: str, *, marked: bool = False) -> Select[Any]:
    """Select all checkpoints of one stream, newest first; those marked as deleted only with `marked`."""
    c = t.checkpoint.c
    found = select(t.checkpoint).where(c.stream == stream).order_by(c.id.desc())
    return found if marked else found.where(c.deleted_at.is_(None))


def has_id(id: int) -> ColumnElement[bool]:
    """Match the checkpoint with this id, which may be any number."""
    return t.checkpoint.c.id == (id if 0 < id < ID_END else 0)


def find_newest(
    connection: Connection, stream: str, *where: ColumnElement[bool], marked: bool = False
) -> Row[Any] | None:
    """Return the checkpoint with the highest id that matches."""
    return connection.execute(select_checkpoints(stream, marked=marked).where(*where).limit(1)).first()


def to_checkpoint(row: Row[Any]) -> CheckpointRecord:
    """Convert a row of table checkpoint to a record."""
    values = dict(row._mapping)
    size, checksum = values.pop("manifest_bytes"), values.pop("manifest_checksum")
    values["manifest"] = StoredObject(values["manifest"], size, checksum, digest=values["digest"])
    values["forms"] = {operator: Form(form) for operator, form in values["forms"].items()}
    return CheckpointRecord(**values)


def _read_retained(connection: Connection, stream: str) -> list[RetainedCheckpoint]:
    """Return every checkpoint that has a row, ascending."""
    c = t.checkpoint.c
    query = select(c.id, c.deleted_at, c.committed_at).where(c.stream == stream).order_by(c.id)
    return [RetainedCheckpoint(*row) for row in connection.execute(query)]
