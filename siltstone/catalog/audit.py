"""The part of the catalog that says what was deleted from the store, and decides whether something may be.

A row is written before the object is deleted, in one transaction that holds the stream. It stays, and is two things:
the record of a deletion, and a sentence: nothing can refer to an object of that name any more (`rows.insert_objects`).
So of a commit and a deletion of the same object, whichever comes first keeps the other from happening (promise 3).

What several streams refer to, as forks do, none of them deletes but the last: the others only let go of it. Where the
last two let go at once, each may see the other still; then the object is an orphan of the stream it is named after.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Select, delete, func, insert, select, union_all

from siltstone.catalog import fencing, rows
from siltstone.catalog import tables as t
from siltstone.catalog.leases import leases, remove_expired
from siltstone.catalog.passes import Pass, note_pass
from siltstone.catalog.records import CatalogView
from siltstone.catalog.rewinding import rewindings
from siltstone.catalog.transactions import Transactions
from siltstone.store.paths import stream_prefix

_REFERRING = (t.object_, t.output_object)
"""the tables whose rows keep objects"""
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
class DeletionRecord:
    """One deletion: as `Tombstone`, by whom and when."""

    stream: str
    name: str
    bytes: int
    modified_at: datetime | None
    reason: str
    who: str
    deleted_at: datetime


class Audit(Transactions):
    """Deletions from the store."""

    def standing(self, stream: str, names: Iterable[str] | None = None) -> CatalogView:
        """How things stand; references among `names`, or for None among all names of the stream."""
        with self._reading() as connection:
            return _standing(connection, stream, names, self._time(connection))

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
        with self._writing(f"the deletion of orphans of stream {stream}") as connection:
            fencing.lock(connection, stream)
            now = self._time(connection)
            remove_expired(connection, stream, now)
            doomed = list(decide(_standing(connection, stream, names, now)))
            _record(connection, stream, who, doomed, now, by)
            return doomed

    def record_deletion(
        self, stream: str, epoch: int, who: str, doomed: Sequence[Tombstone], by: Pass | None = None
    ) -> list[Tombstone]:
        """Write down what is about to be deleted of checkpoints marked as deleted, guarded by the writer epoch; `by` is
        the pass that it is a part of.

        Returns:
            Only that may be deleted then: what another stream refers to, such as a fork, is left out.

        Raises:
            Fenced
        """
        with self._writing(f"the deletion of checkpoints of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            spared = _shared(connection, stream, [each.name for each in doomed])
            doomed = [each for each in doomed if each.name not in spared]
            _record(connection, stream, who, doomed, self._time(connection), by)
            _forget_old(connection, stream, {each.reason for each in doomed})
            return doomed

    def shared(self, stream: str, names: Iterable[str]) -> frozenset[str]:
        """Those of the names that another stream refers to."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return _shared(connection, stream, names)

    def deletions(self, stream: str, limit: int | None = None) -> list[DeletionRecord]:
        """What was deleted, or the newest `limit` of it; oldest first."""
        d = t.deletion.c
        query = select(t.deletion).where(d.stream == stream).order_by(d.deleted_at.desc(), d.name.desc()).limit(limit)
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return [DeletionRecord(**row) for row in connection.execute(query).mappings()][::-1]


def _standing(connection: Connection, stream: str, names: Iterable[str] | None, now: datetime) -> CatalogView:
    """The order matters where statements see what is committed between them: a lease ends after what its holder wrote
    is referred to, and a checkpoint is the newest when all it refers to is; so references are read last, but for
    rewindings, which take references away."""
    c, r = t.checkpoint.c, t.run.c
    epoch = rows.get_stream(connection, stream).epoch
    ended = connection.scalar(select(r.ended_at).where(r.stream == stream, r.epoch == epoch)) is not None
    newest = connection.scalar(select(func.max(c.id)).where(c.stream == stream)) or 0
    epochs = connection.scalars(select(c.epoch).where(c.stream == stream).distinct())
    return CatalogView(
        stream=stream,
        epoch=epoch,
        ended=ended,
        newest=newest,
        epochs=frozenset(epochs),
        leases=tuple(leases(connection, stream, now)),
        referenced=_referenced(connection, stream, names),
        at=now,
        rewindings=rewindings(connection, stream),
    )


def _referenced(connection: Connection, stream: str, names: Iterable[str] | None) -> frozenset[str]:
    """By any stream: a fork refers to objects of the stream it was made from."""
    if names is None:
        return frozenset(
            name
            for table in _REFERRING
            for name in connection.scalars(
                select(table.c.name).where(table.c.name.startswith(stream_prefix(stream), autoescape=True))
            )
        )
    return _referring(connection, select(t.stream.c.name), names)


def _shared(connection: Connection, stream: str, names: Iterable[str]) -> frozenset[str]:
    return _referring(connection, select(t.stream.c.name).where(t.stream.c.name != stream), names)


def _referring(connection: Connection, streams: Select[tuple[str]], names: Iterable[str]) -> frozenset[str]:
    """The names that one of these streams refers to. That streams are named lets the primary key find the names."""

    def query(part: list[str]) -> CompoundSelect[Any]:
        return union_all(
            *(select(each.c.name).where(each.c.stream.in_(streams), each.c.name.in_(part)) for each in _REFERRING)
        )

    return frozenset(str(row[0]) for part in rows.parts(names) for row in connection.execute(query(part)))


def _record(
    connection: Connection, stream: str, who: str, doomed: Sequence[Tombstone], now: datetime, by: Pass | None
) -> None:
    """A row each, and their sum in the row of the pass. What a deletion that did not end has written down already stays
    as it is. Old ones make room."""
    d = t.deletion.c
    if by is not None:
        note_pass(connection, stream, by, now, objects=len(doomed), bytes=sum(each.bytes for each in doomed))
    connection.execute(delete(t.deletion).where(d.stream == stream, d.deleted_at < now - RECORDS_KEPT))
    for part in rows.parts(each.name for each in doomed):
        known = set(connection.scalars(select(d.name).where(d.stream == stream, d.name.in_(part))))
        wanted = set(part) - known
        new = {each.name: asdict(each) for each in doomed if each.name in wanted}
        if new:
            place = {"stream": stream, "who": who, "deleted_at": now}
            connection.execute(insert(t.deletion), [each | place for each in new.values()])


def _forget_old(connection: Connection, stream: str, reasons: Collection[str]) -> None:
    """Old records of these reasons, of deletions of checkpoints, make room for many new ones.

    As sentences they are not needed any more: what a checkpoint wrote is named in its one commit, and under names that
    nothing writes again. Of orphans, in contrast, a process that hangs might still make something refer to them.
    """
    d = t.deletion.c
    of_stream = select(d.deleted_at).where(d.stream == stream).order_by(d.deleted_at.desc())
    oldest = connection.scalar(of_stream.offset(RECORDS_MAX).limit(1))
    if oldest is not None:
        old = (d.stream == stream) & (d.deleted_at < oldest) & d.reason.in_(reasons)
        connection.execute(delete(t.deletion).where(old))
