"""The part of the catalog that says what is kept: savepoints, and checkpoints being deleted."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from siltstone.catalog import fencing, rows
from siltstone.catalog.leases import leases
from siltstone.catalog.passes import Pass, note_pass
from siltstone.catalog.records import RetainedCheckpoint, SavepointRecord
from siltstone.catalog.transactions import Transactions
from siltstone.errors import UsageError
from siltstone.model import LATEST, check_name


class Retaining(Transactions):
    """Savepoints and deletion."""

    def add_savepoint(
        self, stream: str, epoch: int, name: str, checkpoint: int, expires_in: timedelta | None = None
    ) -> SavepointRecord:
        """Give a checkpoint a name, which keeps it from deletion; guarded by the writer epoch as a snapshot is.

        With `expires_in`, only for so long: then the name stays until the checkpoint is deleted, and keeps nothing.

        Raises:
            UsageError: not a savepoint's name, one that is taken, or a time to expire that is out of range.
            UnknownCheckpoint: there is none of that id, or it is marked as deleted.
            Fenced
        """
        if check_name("savepoint", name) == LATEST:
            raise UsageError(f"a savepoint cannot be named {LATEST}, which means the newest checkpoint: choose another")
        with self._writing(f"savepoint {name} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            created = self._time(connection)
            savepoint = SavepointRecord(stream, name, checkpoint, created, _expiry(name, created, expires_in))
            rows.insert_savepoint(connection, savepoint)
        return savepoint

    def drop_savepoint(self, stream: str, epoch: int, name: str) -> None:
        """Forget a savepoint, guarded by the writer epoch; its checkpoint stays until it is deleted.

        Raises:
            UsageError: there is none of that name; says which there are.
            Fenced
        """
        with self._writing(f"savepoint {name} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            rows.delete_savepoint(connection, stream, name)

    def savepoints(self, stream: str) -> list[SavepointRecord]:
        """All savepoints of a stream, by name; expired ones too, until their checkpoint is deleted."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return rows.savepoints(connection, stream)

    # Deletion

    def retained(self, stream: str) -> list[RetainedCheckpoint]:
        """Every checkpoint the catalog still has, marked ones too, ascending."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return rows.retained(connection, stream)

    def mark_deleted(
        self, stream: str, epoch: int, ids: Iterable[int], *, spare_leased: bool = False, by: Pass | None = None
    ) -> tuple[int, ...]:
        """Mark checkpoints as deleted, guarded by the writer epoch: from here on nobody sees them or their snapshots.

        Their rows and objects stay until `forget`. One that is marked or gone already stays as it is.

        Args:
            spare_leased: leave those alone that somebody has a lease on, and return them.
            by: the pass that it is written down as a part of.

        Raises:
            UnknownCheckpoint: the stream never had one of that id; nothing is marked.
            UsageError: the newest is among them, which the stream resumes from, or one that a savepoint keeps;
                nothing is marked.
            Fenced
        """
        ids = set(ids)
        with self._writing(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            live = leases(connection, stream, self._time(connection)) if spare_leased else []
            spared = {id for id in ids if any(lease.covers(id) for lease in live)}
            now = self._time(connection)
            marked = rows.mark_deleted(connection, stream, ids - spared, now)
            if by is not None:
                note_pass(connection, stream, by, now, checkpoints=marked)
        return tuple(sorted(spared))

    def forget(self, stream: str, epoch: int, ids: Iterable[int], objects: Iterable[str]) -> None:
        """Remove the rows of deleted objects and then of deleted checkpoints, guarded by the writer epoch.

        To be called when the objects are gone from the store. Nothing of a checkpoint that is not marked is removed.

        Raises:
            UsageError: a checkpoint has objects left, or another one's chain begins with it; nothing is removed.
            Fenced
        """
        with self._writing(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            rows.forget(connection, stream, ids, objects)


def _expiry(name: str, created: datetime, expires_in: timedelta | None) -> datetime | None:
    """When a savepoint that was created then expires.

    Raises:
        UsageError: it cannot, or has already.
    """
    try:
        expires = None if expires_in is None else created + expires_in
    except OverflowError:
        raise UsageError(f"savepoint {name} cannot expire in {expires_in}: use less, or none at all") from None
    if expires is not None and expires <= created:
        raise UsageError(f"savepoint {name} would have expired already: use a longer time, or none at all")
    return expires
