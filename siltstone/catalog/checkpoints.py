"""Checkpoints: which there are, which one a name or a time means, and whether they were proven."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, update

from siltstone.catalog import tables as t
from siltstone.catalog.limits import ID_END
from siltstone.catalog.streams import get_stream
from siltstone.catalog.transactions import CatalogPart
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.model import LATEST, Form, StoredObject
from siltstone.times import as_utc, parse_time


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A completed checkpoint; fields as in `commits.CheckpointCommit`.

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


class Checkpoints(CatalogPart):
    """The completed checkpoints of streams."""

    def last_id(self, stream: str) -> int:
        """The newest checkpoint's id; 0 where there is none."""
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            newest = find_newest(connection, stream)
            return newest.id if newest else 0

    def latest(self, stream: str) -> CheckpointRecord:
        """The newest checkpoint.

        Raises:
            UnknownCheckpoint: there is none yet.
        """
        return self._newest(stream, "no latest checkpoint")

    def get(self, stream: str, id: int) -> CheckpointRecord:
        """One checkpoint; a deleted one too, while it is kept for those that build on it (`deleted_at`).

        Raises:
            UnknownCheckpoint: says which there are.
        """
        return self._newest(stream, f"no checkpoint {id}", has_id(id), marked=True)

    def resolve(self, stream: str, at: str) -> int:
        """The id that `at` means: `latest`, an id, a savepoint, or a time (ISO 8601, UTC): the last commit by then.

        That is the one of the highest id among those that bear that time or an earlier one. Ids say the order of
        commits; their times do too unless a clock was wrong.

        Raises:
            UnknownCheckpoint: none answers to it; says which there are.
        """
        if at == LATEST:
            return self.latest(stream).id
        if at.isascii() and at.isdigit():
            id = int(at) if len(at) < 20 else ID_END
            return self._newest(stream, f"no checkpoint {id}", has_id(id)).id
        try:
            time = parse_time(at)
        except UsageError:
            named = self._savepoints(stream)
            if at in named:
                return self._newest(stream, f"no checkpoint {named[at]}", has_id(named[at])).id
            names = f" ({', '.join(named)})" if named else ""
            use = f"use latest, an id, a savepoint{names}, or an ISO time (UTC)"
            raise UnknownCheckpoint(f"{at!r} is not a checkpoint: {use}") from None
        missing = f"no checkpoint as old as {time.isoformat()}"
        return self._newest(stream, missing, t.checkpoint.c.committed_at <= time).id

    def as_of(self, stream: str, event_time: datetime) -> int:
        """The id of the last checkpoint whose highest event time is not later than `event_time`.

        Raises:
            UnknownCheckpoint: there is none; says which there are.
        """
        time = as_utc(event_time)
        missing = f"no checkpoint of events up to {time.isoformat()}"
        return self._newest(stream, missing, t.checkpoint.c.event_time_max <= time).id

    def successor(self, stream: str, id: int) -> CheckpointRecord | None:
        """The checkpoint after `id`, even if it is marked as deleted; None if it is gone, or there is none yet."""
        with self._transactions.reading() as connection:
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
        """Note the outcome of a proof, in place of the one before; `reason` says why it failed.

        A proof that restored this checkpoint alone also says what that took and read (`restore_s`,
        `restore_bytes`), in place of what was measured before; one that did not leaves that as it is.

        Args:
            epoch: the writer epoch of what was proven: given up and made again meanwhile, it is another's.

        Raises:
            UnknownCheckpoint
        """
        values: dict[str, Any] = {"proof": None if proven else reason or "failed"}
        if restore_s is not None:
            values |= {"restore_s": restore_s, "restore_bytes": restore_bytes}
        with self._transactions.writing(f"the proof of checkpoint {id} of stream {stream}") as connection:
            at = update(t.checkpoint).where(t.checkpoint.c.stream == stream, has_id(id))
            at = at if epoch is None else at.where(t.checkpoint.c.epoch == epoch)
            values["proven_at"] = self._transactions.time(connection) if proven else None
            if connection.execute(at.values(values)).rowcount == 0:
                raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")

    def _newest(self, stream: str, missing: str, *where: ColumnElement[bool], marked: bool = False) -> CheckpointRecord:
        with self._transactions.reading() as connection:
            found = find_newest(connection, stream, *where, marked=marked)
            if found is None:
                raise unknown_checkpoint(connection, stream, missing)
            return to_checkpoint(found)

    def _savepoints(self, stream: str) -> Mapping[str, int]:
        """The checkpoint that each savepoint names."""
        s = t.savepoint.c
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            found = connection.execute(select(s.name, s.checkpoint).where(s.stream == stream).order_by(s.name))
            return {name: checkpoint for name, checkpoint in found}

    def list_after(self, stream: str, id: int, limit: int) -> list[CheckpointRecord]:
        """List the first `limit` checkpoints after `id`, oldest first; empty for an unknown stream."""
        later = select_checkpoints(stream).where(t.checkpoint.c.id > id).order_by(None).order_by(t.checkpoint.c.id)
        with self._transactions.reading() as connection:
            return [to_checkpoint(row) for row in connection.execute(later.limit(limit))]

    def list_retained(self, stream: str) -> list[RetainedCheckpoint]:
        """Every checkpoint the catalog still has, marked ones too, ascending."""
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            return _read_retained(connection, stream)

    def list(self, stream: str, limit: int | None = None, *, marked: bool = False) -> list[CheckpointRecord]:
        """All checkpoints, or the newest `limit`; oldest first.

        With `marked`, deleted ones that are kept for those that build on them are among them.
        """
        query = select_checkpoints(stream, marked=marked).limit(limit)
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            return [to_checkpoint(row) for row in connection.execute(query)][::-1]


def unknown_checkpoint(connection: Connection, stream: str, missing: str) -> UnknownCheckpoint:
    """The error for a checkpoint that is not there: `missing` says which, what is there follows.

    Raises:
        UnknownStream: not even the stream is there.
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
    """All checkpoints of one stream, newest first; those that are marked as deleted only if asked for."""
    c = t.checkpoint.c
    found = select(t.checkpoint).where(c.stream == stream).order_by(c.id.desc())
    return found if marked else found.where(c.deleted_at.is_(None))


def has_id(id: int) -> ColumnElement[bool]:
    """The checkpoint of that id, whatever number it is."""
    return t.checkpoint.c.id == (id if 0 < id < ID_END else 0)


def find_newest(
    connection: Connection, stream: str, *where: ColumnElement[bool], marked: bool = False
) -> Row[Any] | None:
    """The checkpoint of the highest id that fits."""
    return connection.execute(select_checkpoints(stream, marked=marked).where(*where).limit(1)).first()


def to_checkpoint(row: Row[Any]) -> CheckpointRecord:
    """A row of table checkpoint as a record."""
    values = dict(row._mapping)
    size, checksum = values.pop("manifest_bytes"), values.pop("manifest_checksum")
    values["manifest"] = StoredObject(values["manifest"], size, checksum, digest=values["digest"])
    values["forms"] = {operator: Form(form) for operator, form in values["forms"].items()}
    return CheckpointRecord(**values)


def _read_retained(connection: Connection, stream: str) -> list[RetainedCheckpoint]:
    """Every checkpoint of which there is a row, ascending."""
    c, d = t.checkpoint.c, t.dependency.c
    first = func.coalesce(func.min(d.first), c.id)
    joined = t.checkpoint.outerjoin(t.dependency, (d.stream == c.stream) & (d.checkpoint == c.id))
    query = select(c.id, first, c.deleted_at, c.committed_at).select_from(joined).where(c.stream == stream)
    found = connection.execute(query.group_by(c.id, c.deleted_at, c.committed_at).order_by(c.id))
    return [RetainedCheckpoint(*row) for row in found]
