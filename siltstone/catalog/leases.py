"""Leases: who is at work on checkpoints right now, each with a time-out.

A lease covers checkpoints from `first` to `last`. While it lives, deletions let these checkpoints wait and sweeps leave
everything named under them alone: for a reader, what it reads; for a writer beside the run, such as a snapshot, what it
has written and nothing refers to yet. Whoever finds a lease expired removes it before acting, so that one that was
not renewed in time cannot come back to life. A process of the same machine that has died holds nobody up: its leases
are gone as soon as somebody looks.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, insert, select, update

from siltstone.catalog import fencing
from siltstone.catalog import tables as t
from siltstone.catalog.checkpoints import unknown_checkpoint
from siltstone.catalog.limits import in_batches
from siltstone.catalog.processes import is_known_dead, this_process_identity
from siltstone.catalog.transactions import CatalogPart

_ALL = (0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease on checkpoints `first` to `last` of a stream; `id` is its own, `who` tells people whose.

    `process` tells whether its holder lives (`processes`), None where that cannot be told.
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
        """Whether the checkpoint is among its own."""
        return self.first <= checkpoint <= self.last


class Leases(CatalogPart):
    """Leases on checkpoints."""

    def take(
        self, stream: str, checkpoints: Iterable[int] | None, *, id: str, who: str, lasts: timedelta
    ) -> LeaseRecord:
        """Lease some checkpoints and all that their restores read; the whole stream, for None.

        From here on none of it is deleted while the lease lives: a deletion either marked one of them before, and
        then there is no lease, or sees the lease.

        Args:
            id: at most 32 characters that no other lease has.

        Raises:
            UnknownCheckpoint: one of them is not there, or marked as deleted.
        """
        with self._transactions.writing(f"a lease on stream {stream}") as connection:
            fencing.lock(connection, stream)
            remove_expired(connection, stream, self._transactions.time(connection))
            first, last = _ALL if checkpoints is None else _span(connection, stream, checkpoints)
            taken = self._transactions.time(connection)
            lease = LeaseRecord(id, stream, first, last, who, taken, taken + lasts, this_process_identity())
            connection.execute(insert(t.lease), asdict(lease))
        return lease

    def renew(self, id: str, lasts: timedelta) -> bool:
        """Let a lease live on from now; False if it expired and somebody has acted on that."""
        with self._transactions.writing("a lease") as connection:
            changed = (
                update(t.lease).where(t.lease.c.id == id).values(expires_at=self._transactions.time(connection) + lasts)
            )
            return connection.execute(changed).rowcount > 0

    def release(self, id: str) -> None:
        """End a lease; one that is gone is no error."""
        with self._transactions.writing("a lease") as connection:
            connection.execute(delete(t.lease).where(t.lease.c.id == id))

    def list_live(self, stream: str) -> list[LeaseRecord]:
        """The leases that live, oldest first; expired ones, and those of dead processes, are removed."""
        with self._transactions.writing(f"the leases of stream {stream}") as connection:
            fencing.lock(connection, stream)
            remove_expired(connection, stream, self._transactions.time(connection))
            return read_leases(connection, stream)

    def list(self, stream: str) -> list[LeaseRecord]:
        """Every lease there is a row of, oldest first: expired ones, and those of dead processes, too."""
        with self._transactions.reading() as connection:
            return read_leases(connection, stream)


def read_leases(connection: Connection, stream: str, now: datetime | None = None) -> list[LeaseRecord]:
    """The leases of a stream, oldest first; with `now`, only those that live."""
    c = t.lease.c
    query = select(t.lease).where(c.stream == stream).order_by(c.taken_at, c.id)
    if now is not None:
        query = query.where(c.expires_at > now)
    found = [LeaseRecord(**row) for row in connection.execute(query).mappings()]
    return [lease for lease in found if now is None or not is_known_dead(lease.process)]


def remove_expired(connection: Connection, stream: str, now: datetime) -> None:
    """Remove leases that have expired, and those of processes that are known to have died."""
    c = t.lease.c
    connection.execute(delete(t.lease).where(c.stream == stream, c.expires_at <= now))
    held = connection.execute(select(c.id, c.process).where(c.stream == stream, c.process.is_not(None)))
    dead = [id for id, process in held if is_known_dead(process)]
    if dead:
        connection.execute(delete(t.lease).where(c.id.in_(dead)))


def _span(connection: Connection, stream: str, checkpoints: Iterable[int]) -> tuple[int, int]:
    """(the first checkpoint that a restore of any of them reads, the last of them)."""
    c, d = t.checkpoint.c, t.dependency.c
    joined = t.checkpoint.outerjoin(t.dependency, (d.stream == c.stream) & (d.checkpoint == c.id))
    first, last = _ALL[1], 0
    for part in in_batches(checkpoints):
        visible = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_(None)
        query = select(c.id, func.coalesce(func.min(d.first), c.id)).select_from(joined).where(visible)
        found = {id: earliest for id, earliest in connection.execute(query.group_by(c.id))}
        for id in part:
            if id not in found:
                raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")
        first, last = min([first, *found.values()]), max(last, part[-1])
    return first, last
