"""Tombstones: objects that were deleted from the store, or are about to be.

A tombstone is written before the object is deleted, in one transaction that locks the stream, and stays: this name can
never be referenced again (`objects.insert_objects`). So if a commit and a deletion of the same object compete, the
first one prevents the other (nothing referenced is ever deleted: promise 3).

An object that several streams refer to, because of forks, is deleted only by the last of them; the others only release
it. If the last two release it at once, each may still see the other; the object is then an orphan of the stream in its
name.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.leases import remove_expired
from siltstone.catalog.records.passes import Pass, note_pass
from siltstone.catalog.records.references import CatalogView, read_shared, read_view
from siltstone.catalog.records.streams import get_stream

RECORDS_KEPT = timedelta(days=90)
"""minimum time for which the tombstone of an orphan is kept"""
RECORDS_MAX = 100_000
"""tombstones of deleted checkpoints' objects are removed once a stream has this many newer deletions"""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An object to delete: its name in the store, its bytes, why, and when it was written, if known."""

    name: str
    bytes: int
    reason: str
    modified_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TombstoneRecord:
    """A recorded tombstone: who deleted the object, and when; other fields as in `Tombstone`."""

    stream: str
    name: str
    bytes: int
    modified_at: datetime | None
    reason: str
    who: str
    deleted_at: datetime


class Tombstones(CatalogPart):
    """Deletions from the store."""

    def record_orphans(
        self,
        stream: str,
        who: str,
        names: Sequence[str],
        decide: Callable[[CatalogView], Sequence[Tombstone]],
        by: Pass | None = None,
    ) -> list[Tombstone]:
        """Record tombstones for orphans and return them; only these objects may then be deleted.

        Args:
            names: the candidates.
            decide: chooses among them, given a current view; no commit and no lease can come between it and the record.
            by: the pass to record this under.
        """
        with self._transactions.begin_write(f"the deletion of orphans of stream {stream}") as connection:
            fencing.lock(connection, stream)
            now = self._transactions.time(connection)
            remove_expired(connection, stream, now)
            tombstones = [*decide(read_view(connection, stream, names, now))]
            _record(connection, stream, who, tombstones, now, by)
            return tombstones

    def record_deletion(
        self, stream: str, epoch: int, who: str, tombstones: Sequence[Tombstone], by: Pass | None = None
    ) -> list[Tombstone]:
        """Record tombstones for objects of checkpoints marked as deleted, guarded by the writer epoch; `by` is the pass
        to record this under.

        Returns:
            The tombstones without objects that another stream, such as a fork, refers to; only these may be deleted.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            spared = read_shared(connection, stream, [each.name for each in tombstones])
            tombstones = [each for each in tombstones if each.name not in spared]
            _record(connection, stream, who, tombstones, self._transactions.time(connection), by)
            _forget_old(connection, stream, {each.reason for each in tombstones})
            return tombstones

    def list(self, stream: str, limit: int | None = None) -> list[TombstoneRecord]:
        """List all tombstones, or the newest `limit`; oldest first."""
        d = t.deletion.c
        query = select(t.deletion).where(d.stream == stream).order_by(d.deleted_at.desc(), d.name.desc()).limit(limit)
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return [TombstoneRecord(**row) for row in connection.execute(query).mappings()][::-1]


def _record(
    connection: Connection, stream: str, who: str, tombstones: Sequence[Tombstone], now: datetime, by: Pass | None
) -> None:
    """Insert one row per tombstone, add their total to the row of the pass, and remove old rows.

    Rows of an interrupted deletion stay as they are.
    """
    d = t.deletion.c
    if by is not None:
        note_pass(connection, stream, by, now, objects=len(tombstones), bytes=sum(each.bytes for each in tombstones))
    connection.execute(delete(t.deletion).where(d.stream == stream, d.deleted_at < now - RECORDS_KEPT))
    for part in in_batches(each.name for each in tombstones):
        known = set(connection.scalars(select(d.name).where(d.stream == stream, d.name.in_(part))))
        wanted = set(part) - known
        new = {each.name: asdict(each) for each in tombstones if each.name in wanted}
        if new:
            place = {"stream": stream, "who": who, "deleted_at": now}
            connection.execute(insert(t.deletion), [each | place for each in new.values()])


def _forget_old(connection: Connection, stream: str, reasons: Collection[str]) -> None:
    """Remove old tombstones with these reasons, of checkpoints' objects, once there are many newer ones.

    They are no longer needed: a checkpoint's objects are named only in its commit, and their names are never written
    again. Orphans, in contrast, might still be referred to by a process that hangs.
    """
    d = t.deletion.c
    of_stream = select(d.deleted_at).where(d.stream == stream).order_by(d.deleted_at.desc())
    oldest = connection.scalar(of_stream.offset(RECORDS_MAX).limit(1))
    if oldest is not None:
        old = (d.stream == stream) & (d.deleted_at < oldest) & d.reason.in_(reasons)
        connection.execute(delete(t.deletion).where(old))
