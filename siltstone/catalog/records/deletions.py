"""Deletions of checkpoints: mark them, and remove their rows once their objects are deleted."""

from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import Connection, delete, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, unknown_checkpoint_error
from siltstone.catalog.records.leases import read_leases
from siltstone.catalog.records.passes import Pass, note_pass
from siltstone.catalog.records.savepoints import read_savepoints
from siltstone.errors import UsageError
from siltstone.times import as_utc


class Deletions(CatalogPart):
    """Checkpoints that are being deleted."""

    def mark(
        self, stream: str, epoch: int, ids: Iterable[int], *, spare_leased: bool = False, by: Pass | None = None
    ) -> tuple[int, ...]:
        """Mark checkpoints as deleted, guarded by the writer epoch: from here on they and their copies are invisible.

        Their rows and objects stay until `forget`. Checkpoints that are already marked or gone stay as they are.

        Args:
            spare_leased: leave leased checkpoints alone, and return them.
            by: the pass to record this under.

        Raises:
            UnknownCheckpoint: the stream never had one of these ids; nothing is marked.
            UsageError: they include the newest, from which the stream resumes, or one with a savepoint; nothing is
                marked.
            Fenced: `epoch` is not the stream's newest.
        """
        ids = set(ids)
        with self._transactions.begin_write(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            live = read_leases(connection, stream, self._transactions.time(connection)) if spare_leased else []
            spared = {id for id in ids if any(lease.covers(id) for lease in live)}
            now = self._transactions.time(connection)
            marked = _mark(connection, stream, ids - spared, now)
            if by is not None:
                note_pass(connection, stream, by, now, checkpoints=marked)
        return tuple(sorted(spared))

    def forget(self, stream: str, epoch: int, ids: Iterable[int], objects: Iterable[str]) -> None:
        """Remove the rows of deleted objects and then of deleted checkpoints, guarded by the writer epoch.

        Call it once the objects are gone from the store. Checkpoints that are not marked are left alone.

        Raises:
            UsageError: a checkpoint has objects left, or a checkpoint that is not marked needs one of the objects;
                nothing is removed.
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            _forget(connection, stream, ids, objects)


def _mark(connection: Connection, stream: str, ids: Iterable[int], now: datetime) -> int:
    """Mark checkpoints, remove what only they need, and return how many were not marked before.

    Raises:
        UnknownCheckpoint, UsageError: as `Deletions.mark`.
    """
    last = find_newest(connection, stream)
    pins = {s.checkpoint: s.name for s in read_savepoints(connection, stream) if not s.is_expired(as_utc(now))}
    for id in sorted(set(ids)):
        if last is None or not 1 <= id <= last.id:
            raise unknown_checkpoint_error(connection, stream, f"no checkpoint {id}")
        if id == last.id:
            raise UsageError(
                f"checkpoint {id} of stream {stream} is its newest, which the next run resumes from: "
                "delete others, or run the stream on first"
            )
        if id in pins:
            raise UsageError(
                f"checkpoint {id} of stream {stream} is kept by its savepoint {pins[id]}: "
                "delete others, or drop the savepoint first (siltstone savepoint --drop)"
            )
    marked = 0
    for part in in_batches(ids):
        c, s, expired = t.checkpoint.c, t.reference_copy.c, t.savepoint.c
        at = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_(None)
        marked += connection.execute(update(t.checkpoint).where(at).values(deleted_at=now)).rowcount
        connection.execute(delete(t.reference_copy).where(s.stream == stream, s.checkpoint.in_(part)))
        connection.execute(delete(t.savepoint).where(expired.stream == stream, expired.checkpoint.in_(part)))
    return marked


def _forget(connection: Connection, stream: str, ids: Iterable[int], objects: Iterable[str]) -> None:
    """Remove rows of objects, then of checkpoints, but only of marked checkpoints."""
    c, o = t.checkpoint.c, t.object_.c
    marked = select(c.id).where(c.stream == stream, c.deleted_at.is_not(None))
    needing = select(c.id).where(c.stream == stream, c.deleted_at.is_(None), c.id.between(o.checkpoint, o.until))
    for names in in_batches(objects):
        gone = (o.stream == stream) & o.name.in_(names) & o.checkpoint.in_(marked)
        if needed := connection.execute(select(o.name).where(gone, needing.exists()).limit(1)).scalar():
            raise UsageError(f"object {needed} is needed by a checkpoint of stream {stream}: delete that first")
        connection.execute(delete(t.object_).where(gone))
    for part in in_batches(ids):
        gone = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_not(None)
        connection.execute(delete(t.checkpoint).where(gone))
