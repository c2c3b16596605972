"""Leases: who is working on checkpoints right now, each with a time-out.

A lease covers checkpoints from `first` to `last`. While it lives, deletions of these checkpoints wait, and sweeps leave
alone every object named under them: what a reader reads, or what a writer beside the run, such as a snapshot, has
written and nothing refers to yet. An expired lease is removed by the next process that finds it, before it acts, so
that a late renewal fails. Leases of dead processes on the same machine are removed at once.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import unknown_checkpoint_error
from siltstone.catalog.records.processes import is_known_dead, this_process_identity

_ALL = (0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease on checkpoints `first` to `last` of a stream; `who` is the holder's name for people.

    `process` is the holder's identity, by which to check whether it lives (`processes`); None if not known.
    """

    id: str
    stream: str
    first: int
    last: int
    who: str
    taken_at: datetime
    expires_at: datetime
    process: str | None = None

    def covers(self, checkpoint: int) -> bool:
        """Whether the lease covers the checkpoint."""
        return self.first <= checkpoint <= self.last


class Leases(CatalogPart):
    """Leases on checkpoints."""

    def take(
        self, stream: str, checkpoints: Iterable[int] | None, *, id: str, who: str, lasts: timedelta
    ) -> LeaseRecord:
        """Lease some checkpoints and all that their restores read; the whole stream if None.

        None of it is deleted while the lease lives: a deletion either marked one of them earlier, and then the lease is
        refused, or it sees the lease.

        Args:
            id: at most 32 characters, unique among leases.

        Raises:
            UnknownCheckpoint: one of them does not exist, or is marked as deleted.
        """
        with self._transactions.begin_write(f"a lease on stream {stream}") as connection:
            fencing.lock(connection, stream)
            remove_expired(connection, stream, self._transactions.time(connection))
            first, last = _ALL if checkpoints is None else _span(connection, stream, checkpoints)
            taken = self._transactions.time(connection)
            lease = LeaseRecord(id, stream, first, last, who, taken, taken + lasts, this_process_identity())
            connection.execute(insert(t.lease), asdict(lease))
        return lease

    def renew(self, id: str, lasts: timedelta) -> bool:
        """Extend a lease by `lasts` from now; return False if it expired and was removed."""
        with self._transactions.begin_write("a lease") as connection:
            changed = (
                update(t.lease).where(t.lease.c.id == id).values(expires_at=self._transactions.time(connection) + lasts)
            )
            return connection.execute(changed).rowcount > 0

    def release(self, id: str) -> None:
        """End a lease, if it still exists."""
        with self._transactions.begin_write("a lease") as connection:
            connection.execute(delete(t.lease).where(t.lease.c.id == id))

    def list_live(self, stream: str) -> list[LeaseRecord]:
        """List live leases, oldest first; remove expired ones, and those of dead processes."""
        with self._transactions.begin_write(f"the leases of stream {stream}") as connection:
            fencing.lock(connection, stream)
            remove_expired(connection, stream, self._transactions.time(connection))
            return read_leases(connection, stream)

    def list(self, stream: str) -> list[LeaseRecord]:
        """List every recorded lease, oldest first; also expired ones, and those of dead processes."""
        with self._transactions.begin_read() as connection:
            return read_leases(connection, stream)


def read_leases(connection: Connection, stream: str, now: datetime | None = None) -> list[LeaseRecord]:
    """Return the leases of a stream, oldest first; with `now`, only live ones."""
    c = t.lease.c
    query = select(t.lease).where(c.stream == stream).order_by(c.taken_at, c.id)
    if now is not None:
        query = query.where(c.expires_at > now)
    found = [LeaseRecord(**row) for row in connection.execute(query).mappings()]
    return [lease for lease in found if now is None or not is_known_dead(lease.process)]


def remove_expired(connection: Connection, stream: str, now: datetime) -> None:
    """Remove expired leases, and those of processes that are known to have died."""
    c = t.lease.c
    connection.execute(delete(t.lease).where(c.stream == stream, c.expires_at <= now))
    held = connection.execute(select(c.id, c.process).where(c.stream == stream, c.process.is_not(None)))
    dead = [id for id, process in held if is_known_dead(process)]
    if dead:
        connection.execute(delete(t.lease).where(c.id.in_(dead)))


def _span(connection: Connection, stream: str, checkpoints: Iterable[int]) -> tuple[int, int]:
    """Return (the first checkpoint that a restore of any of them reads from, the last of them)."""
    c, o = t.checkpoint.c, t.object_.c
    first, last = _ALL[1], 0
    for part in in_batches(checkpoints):
        visible = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_(None)
        found = set(connection.scalars(select(c.id).where(visible)))
        for id in part:
            if id not in found:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {id}")
        # An object older than these checkpoints that a later one of them needs is needed by all of them.
        needed = (o.stream == stream) & (o.checkpoint <= part[0]) & (o.until >= part[0])
        oldest = connection.scalar(select(func.min(o.checkpoint)).where(needed))
        first, last = min(first, part[0] if oldest is None else oldest), max(last, part[-1])
    return first, last
