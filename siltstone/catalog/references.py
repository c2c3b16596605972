"""References: which objects the catalog refers to, and what else decides whether an object may be deleted.

What several streams refer to, as forks do, none of them deletes but the last.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Select, func, select, union_all

from siltstone.catalog import tables as t
from siltstone.catalog.leases import LeaseRecord, read_leases
from siltstone.catalog.limits import in_batches
from siltstone.catalog.rollbacks import RollbackRecord, read_rollbacks
from siltstone.catalog.streams import get_stream
from siltstone.catalog.transactions import CatalogPart
from siltstone.store.paths import stream_prefix

_REFERRING = (t.object_, t.output_object)
"""the tables whose rows keep objects"""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """What the catalog says at one moment about a stream's objects.

    Attributes:
        epoch: the newest writer epoch; `ended` if its run has ended.
        newest: the newest completed checkpoint, 0 before the first.
        epochs: those of which there is a checkpoint, deleted ones that wait among them.
        leases: those that live.
        referenced: names that a checkpoint, a reference copy or an output of any stream refers to, among those asked
            for.
        at: this moment, UTC.
        rollbacks: all there were, oldest first.
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
    """What refers to objects."""

    def view(self, stream: str, names: Iterable[str] | None = None) -> CatalogView:
        """What the catalog says at this moment; references among `names`, or for None among all names of the stream."""
        with self._transactions.reading() as connection:
            return read_view(connection, stream, names, self._transactions.time(connection))

    def find_shared(self, stream: str, names: Iterable[str]) -> frozenset[str]:
        """Those of the names that another stream refers to."""
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            return read_shared(connection, stream, names)


def read_view(connection: Connection, stream: str, names: Iterable[str] | None, now: datetime) -> CatalogView:
    """The order matters where statements see what is committed between them: a lease ends after what its holder wrote
    is referred to, and a checkpoint is the newest when all it refers to is; so references are read last, but for
    rollbacks, which take references away."""
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
        referenced=_referenced(connection, stream, names),
        at=now,
        rollbacks=read_rollbacks(connection, stream),
    )


def read_shared(connection: Connection, stream: str, names: Iterable[str]) -> frozenset[str]:
    return _referring(connection, select(t.stream.c.name).where(t.stream.c.name != stream), names)


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


def _referring(connection: Connection, streams: Select[tuple[str]], names: Iterable[str]) -> frozenset[str]:
    """The names that one of these streams refers to. That streams are named lets the primary key find the names."""

    def query(part: list[str]) -> CompoundSelect[Any]:
        return union_all(
            *(select(each.c.name).where(each.c.stream.in_(streams), each.c.name.in_(part)) for each in _REFERRING)
        )

    return frozenset(str(row[0]) for part in in_batches(names) for row in connection.execute(query(part)))
