"""Savepoints: names that keep checkpoints from deletion."""

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, has_id, unknown_checkpoint_error
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import UsageError
from siltstone.model import LATEST, check_name


@dataclass(frozen=True, slots=True)
class SavepointRecord:
    """A name that keeps one checkpoint from deletion until `expires_at`, or for good if that is None."""

    stream: str
    name: str
    checkpoint: int
    created_at: datetime
    expires_at: datetime | None

    def is_expired(self, now: datetime) -> bool:
        """Whether it no longer keeps its checkpoint."""
        return self.expires_at is not None and self.expires_at <= now


class Savepoints(CatalogPart):
    """The savepoints of streams."""

    def add(
        self, stream: str, epoch: int, name: str, checkpoint: int, expires_in: timedelta | None = None
    ) -> SavepointRecord:
        """Give a checkpoint a name that keeps it from deletion; guarded by the writer epoch like a reference copy.

        With `expires_in`, only for that time; an expired name stays until the checkpoint is deleted.

        Raises:
            UsageError: the name is not valid or is taken, or the expiry is out of range.
            UnknownCheckpoint: the checkpoint does not exist, or is marked as deleted.
            Fenced: `epoch` is not the stream's newest.
        """
        if check_name("savepoint", name) == LATEST:
            raise UsageError(f"a savepoint cannot be named {LATEST}, which means the newest checkpoint: choose another")
        with self._transactions.begin_write(f"savepoint {name} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            created = self._transactions.time(connection)
            savepoint = SavepointRecord(stream, name, checkpoint, created, _expiry(name, created, expires_in))
            _insert(connection, savepoint)
        return savepoint

    def drop(self, stream: str, epoch: int, name: str) -> None:
        """Drop a savepoint, guarded by the writer epoch; its checkpoint stays until it is deleted.

        Raises:
            UsageError: it does not exist; the message lists those that do.
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"savepoint {name} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            _delete(connection, stream, name)

    def list(self, stream: str) -> list[SavepointRecord]:
        """List all savepoints of a stream, by name; expired ones too, until their checkpoint is deleted."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return read_savepoints(connection, stream)


def read_savepoints(connection: Connection, stream: str) -> list[SavepointRecord]:
    """Return all savepoints of a stream, by name; expired ones too."""
    query = select(t.savepoint).where(t.savepoint.c.stream == stream).order_by(t.savepoint.c.name)
    return [SavepointRecord(**row) for row in connection.execute(query).mappings()]


def _insert(connection: Connection, savepoint: SavepointRecord) -> None:
    """Insert a savepoint of a checkpoint that is not marked as deleted.

    Raises:
        UnknownCheckpoint: the checkpoint does not exist.
        UsageError: the name is taken.
    """
    stream, name, id = savepoint.stream, savepoint.name, savepoint.checkpoint
    if find_newest(connection, stream, has_id(id)) is None:
        raise unknown_checkpoint_error(connection, stream, f"no checkpoint {id}")
    for taken in read_savepoints(connection, stream):
        if taken.name == name:
            raise UsageError(
                f"stream {stream} has a savepoint {name} already, of checkpoint {taken.checkpoint}: "
                "drop it first (--drop), or choose another name"
            )
    connection.execute(insert(t.savepoint), asdict(savepoint))


def _delete(connection: Connection, stream: str, name: str) -> None:
    """Remove a savepoint; its checkpoint stays.

    Raises:
        UsageError: it does not exist; the message lists those that do.
    """
    s = t.savepoint.c
    if connection.execute(delete(t.savepoint).where(s.stream == stream, s.name == name)).rowcount == 0:
        names = ", ".join(savepoint.name for savepoint in read_savepoints(connection, stream))
        raise UsageError(f"no savepoint {name!r} of stream {stream}: it has {names or 'none'}")


def _expiry(name: str, created: datetime, expires_in: timedelta | None) -> datetime | None:
    """Return when a savepoint created at `created` expires.

    Raises:
        UsageError: the time is out of range or already over.
    """
    try:
        expires = None if expires_in is None else created + expires_in
    except OverflowError:
        raise UsageError(f"savepoint {name} cannot expire in {expires_in}: use less, or none at all") from None
    if expires is not None and expires <= created:
        raise UsageError(f"savepoint {name} would have expired already: use a longer time, or none at all")
    return expires
