"""References: which objects the catalog refers to, and what else decides whether an object may be deleted.

An object that several streams refer to, because of forks, is deleted only by the last of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Select, func, select, union_all

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.leases import LeaseRecord, read_leases
from siltstone.catalog.records.rollbacks import RollbackRecord, read_rollbacks
from siltstone.catalog.records.streams import get_stream
from siltstone.store.paths import stream_prefix

_REFERRING = (t.object_, t.output_object)
"""the tables whose rows refer to objects"""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """What the catalog knows at one moment about a stream's objects.

    Attributes:
        epoch: the newest writer epoch; `ended` if its run has ended.
        newest: the newest completed checkpoint, 0 before the first.
        epochs: the epochs that have a checkpoint, including those marked as deleted.
        leases: the live leases.
        referenced: names, among those asked for, that a checkpoint, a reference copy or an output of any stream refers
            to.
        at: the time of the view, UTC.
        rollbacks: all rollbacks, oldest first.
    """

    stream: str
    epoch: int
    ended: bool
    newest: int
    epochs: frozenset[int]
    leases: tuple[LeaseRecord, ...]
    referenced: frozenset[str]
    at: datetime
    rollbacks: tuple[RollbackRecord, ...] = ()


class References(CatalogPart):
    """References to objects."""

    def view(self, stream: str, names: Iterable[str] | None = None) -> CatalogView:
        """Return a view of now, with references among `names`, or, if None, among all names of the stream."""
        with self._transactions.begin_read() as connection:
            return read_view(connection, stream, names, self._transactions.time(connection))

    def find_shared(self, stream: str, names: Iterable[str]) -> frozenset[str]:
        """Return the names that another stream refers to."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return read_shared(connection, stream, names)


def read_view(connection: Connection, stream: str, names: Iterable[str] | None, now: datetime) -> CatalogView:
    """Read a view.

    The order matters, since each statement sees commits made between them: a lease ends after its holder's objects are
    referred to, and a checkpoint becomes the newest together with its references. So references are read last, except
    for rollbacks, which remove references.
    """
    c, r = t.checkpoint.c, t.run.c
    epoch = get_stream(connection, stream).epoch
    ended = connection.scalar(select(r.ended_at).where(r.stream == stream, r.epoch == epoch)) is not None
    newest = connection.scalar(select(func.max(c.id)).where(c.stream == stream)) or 0
    epochs = connection.scalars(select(c.epoch).where(c.stream == stream).distinct())
    return CatalogView(
        stream=stream,
        epoch=epoch,
        ended=ended,
        newest=newest,
        epochs=frozenset(epochs),
        leases=tuple(read_leases(connection, stream, now)),
        referenced=_find_referenced(connection, stream, names),
        at=now,
        rollbacks=read_rollbacks(connection, stream),
    )


def read_shared(connection: Connection, stream: str, names: Iterable[str]) -> frozenset[str]:
    return _find_referred_by(connection, select(t.stream.c.name).where(t.stream.c.name != stream), names)


def _find_referenced(connection: Connection, stream: str, names: Iterable[str] | None) -> frozenset[str]:
    """Return the names that any stream refers to: a fork refers to objects of its parent."""
    if names is None:
        return frozenset(
            name
            for table in _REFERRING
            for name in connection.scalars(
                select(table.c.name).where(table.c.name.startswith(stream_prefix(stream), autoescape=True))
            )
        )
    return _find_referred_by(connection, select(t.stream.c.name), names)


def _find_referred_by(connection: Connection, streams: Select[tuple[str]], names: Iterable[str]) -> frozenset[str]:
    """Return the names that one of these streams refers to. Naming the streams lets the query use the primary key."""

    def query(part: list[str]) -> CompoundSelect[Any]:
        return union_all(
            *(select(each.c.name).where(each.c.stream.in_(streams), each.c.name.in_(part)) for each in _REFERRING)
        )

    return frozenset(str(row[0]) for part in in_batches(names) for row in connection.execute(query(part)))
