"""Tombstones: what was deleted from the store, and what may be.

A row is written before the object is deleted, in one transaction that holds the stream. It stays, and is two things:
the record of a deletion, and a tombstone: nothing can refer to an object of that name any more
(`objects.insert_objects`). So of a commit and a deletion of the same object, whichever comes first keeps the other from
happening (promise 3).

What several streams refer to, as forks do, none of them deletes but the last: the others only let go of it. Where the
last two let go at once, each may see the other still; then the object is an orphan of the stream it is named after.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from siltstone.catalog import fencing
from siltstone.catalog import tables as t
from siltstone.catalog.leases import remove_expired
from siltstone.catalog.limits import in_batches
from siltstone.catalog.passes import Pass, note_pass
from siltstone.catalog.references import CatalogView, read_shared, read_view
from siltstone.catalog.streams import get_stream
from siltstone.catalog.transactions import CatalogPart

RECORDS_KEPT = timedelta(days=90)
"""how long the deletion of an orphan can be looked up, at least"""
RECORDS_MAX = 100_000
"""how many newer deletions a stream may have until that of what a deleted checkpoint wrote is forgotten"""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is to be deleted: a name in the store, its bytes, why, and when it was written, if that is known."""

    name: str
    bytes: int
    reason: str
    modified_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TombstoneRecord:
    """One deletion: as `Tombstone`, by whom and when."""

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
        """Write down what is about to be deleted of objects that nothing refers to; only that may be deleted then.

        Args:
            names: those in question.
            decide: which of them, as things stand now: no commit and no lease comes between it and the record.
            by: the pass that it is written down as a part of.
        """
        with self._transactions.writing(f"the deletion of orphans of stream {stream}") as connection:
            fencing.lock(connection, stream)
            now = self._transactions.time(connection)
            remove_expired(connection, stream, now)
            tombstones = [*decide(read_view(connection, stream, names, now))]
            _record(connection, stream, who, tombstones, now, by)
            return tombstones

    def record_deletion(
        self, stream: str, epoch: int, who: str, tombstones: Sequence[Tombstone], by: Pass | None = None
    ) -> list[Tombstone]:
        """Write down what is about to be deleted of checkpoints marked as deleted, guarded by the writer epoch; `by` is
        the pass that it is a part of.

        Returns:
            Only that may be deleted then: what another stream refers to, such as a fork, is left out.

        Raises:
            Fenced
        """
        with self._transactions.writing(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            spared = read_shared(connection, stream, [each.name for each in tombstones])
            tombstones = [each for each in tombstones if each.name not in spared]
            _record(connection, stream, who, tombstones, self._transactions.time(connection), by)
            _forget_old(connection, stream, {each.reason for each in tombstones})
            return tombstones

    def list(self, stream: str, limit: int | None = None) -> list[TombstoneRecord]:
        """What was deleted, or the newest `limit` of it; oldest first."""
        d = t.deletion.c
        query = select(t.deletion).where(d.stream == stream).order_by(d.deleted_at.desc(), d.name.desc()).limit(limit)
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            return [TombstoneRecord(**row) for row in connection.execute(query).mappings()][::-1]


def _record(
    connection: Connection, stream: str, who: str, tombstones: Sequence[Tombstone], now: datetime, by: Pass | None
) -> None:
    """Insert one row each, and add their sum to the row of the pass.

    What an interrupted deletion has written down already stays as it is. Old rows make room.
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
    """Old records of these reasons, of deletions of checkpoints, make room for many new ones.

    As tombstones they are not needed any more: what a checkpoint wrote is named in its one commit, and under names that
    nothing writes again. Of orphans, in contrast, a process that hangs might still make something refer to them.
    """
    d = t.deletion.c
    of_stream = select(d.deleted_at).where(d.stream == stream).order_by(d.deleted_at.desc())
    oldest = connection.scalar(of_stream.offset(RECORDS_MAX).limit(1))
    if oldest is not None:
        old = (d.stream == stream) & (d.deleted_at < oldest) & d.reason.in_(reasons)
        connection.execute(delete(t.deletion).where(old))
