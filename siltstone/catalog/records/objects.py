"""Objects: the stored objects that checkpoints refer to, and which checkpoints need each of them.

Every object is needed by consecutive checkpoints, from the one that wrote it to its `until`. `restore.live_rules` says
what a new checkpoint, or a materialization, no longer needs. Here this is recorded, and everything that reads or
deletes goes by it: what a restore reads, what may be deleted, what a lease protects, and what a fork shares. If two
processes change chains at once, an interval may be too long until the run notices. It is never too short.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, Connection, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END, in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import StateError
from siltstone.model import StoredObject

_O = t.object_.c


class ObjectKind(StrEnum):
    """What a stored object holds."""

    SEGMENT = "segment"
    BASE = "base"
    MANIFEST = "manifest"
    REFERENCE_COPY = "reference_copy"
    MATERIALIZATION = "materialization"
    """a base, or the manifest, of a materialization"""


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """A stored object: the checkpoint and writer epoch that wrote it, its size in bytes, its checksum.

    `until` is the last checkpoint that needs it; `tables.OPEN` if the newest does. `replaced_at` is the newest
    checkpoint when a materialization replaced it; None if none did.
    """

    name: str
    kind: ObjectKind
    checkpoint: int
    epoch: int
    bytes: int
    checksum: str
    until: int = t.OPEN
    replaced_at: int | None = None

    def is_needed_by(self, checkpoint: int) -> bool:
        """Whether a restore of the checkpoint needs it, or the checkpoint wrote it."""
        return self.checkpoint <= checkpoint <= self.until

    def may_be_restored(self, newest: int) -> bool:
        """Whether a running step may restore it: it was replaced after checkpoint `newest`, on which the step builds.

        A step restores the newest checkpoint by the chain that it had when the step began.
        """
        return self.replaced_at is not None and self.replaced_at >= newest

    @property
    def stored(self) -> StoredObject:
        """The object as the store knows it."""
        return StoredObject(self.name, self.bytes, self.checksum)


class Objects(CatalogPart):
    """The objects that checkpoints refer to."""

    def list(self, stream: str, checkpoints: Iterable[int] | None = None) -> list[ObjectRecord]:
        """List the objects that these checkpoints wrote (default all), by checkpoint and name."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            if checkpoints is None:
                return read_objects(connection, stream, None)
            parts = in_batches(id for id in checkpoints if 0 < id < ID_END)
            return [found for part in parts for found in read_objects(connection, stream, part)]


def read_objects(connection: Connection, stream: str, ids: Iterable[int] | None) -> list[ObjectRecord]:
    """Return the objects that some checkpoints wrote (all if None), by checkpoint and name."""
    return _read(connection, stream, *(() if ids is None else [_O.checkpoint.in_(list(ids))]))


def needed_by(checkpoint: int, since: int | None = None) -> ColumnElement[bool]:
    """Match what a restore of a checkpoint needs, and reference copies of it; with `since`, of any from that one on."""
    return (_O.until >= (checkpoint if since is None else since)) & (_O.checkpoint <= checkpoint)


def read_needed(connection: Connection, stream: str, checkpoint: int) -> list[ObjectRecord]:
    """Return the objects that a restore of a checkpoint needs, by checkpoint and name."""
    return _read(connection, stream, needed_by(checkpoint), _O.kind != ObjectKind.REFERENCE_COPY)


def _read(connection: Connection, stream: str, *where: ColumnElement[bool]) -> list[ObjectRecord]:
    columns = (_O.name, _O.kind, _O.checkpoint, _O.epoch, _O.bytes, _O.checksum, _O.until, _O.replaced_at)
    found = connection.execute(select(*columns).where(_O.stream == stream, *where).order_by(_O.checkpoint, _O.name))
    return [ObjectRecord(name, ObjectKind(kind), *rest) for name, kind, *rest in found]


def close_objects(
    connection: Connection,
    stream: str,
    until: int,
    *,
    before: int = 0,
    names: Iterable[str] = (),
    replaced_at: int | None = None,
) -> None:
    """Record that no checkpoint after `until` needs these objects: those of checkpoints below `before`, and `names`.

    The checkpoint that wrote an object still needs it, and an object whose need ends earlier keeps its end.

    Args:
        replaced_at: the newest checkpoint, if a materialization replaces the objects; None if a new checkpoint does.
    """
    longer = (_O.stream == stream) & (_O.until > until) & (_O.checkpoint <= until)
    at = update(t.object_).values({"until": until} | ({} if replaced_at is None else {"replaced_at": replaced_at}))
    if before:
        connection.execute(at.where(longer, _O.checkpoint < before))
    for part in in_batches(names):
        connection.execute(at.where(longer, _O.name.in_(part)))


def reopen_objects(connection: Connection, stream: str, newest: int) -> None:
    """Record that `newest` is the newest checkpoint again: later checkpoints may need all that it needs."""
    needed = (_O.stream == stream) & (_O.checkpoint <= newest) & (_O.until >= newest)
    copies = _O.kind == ObjectKind.REFERENCE_COPY
    connection.execute(update(t.object_).where(needed, ~copies).values(until=t.OPEN))


def insert_objects(
    connection: Connection,
    stream: str,
    epoch: int,
    checkpoint: int,
    objects: Sequence[tuple[ObjectKind, StoredObject]],
    until: int = t.OPEN,
) -> None:
    """Insert rows for objects that one checkpoint refers to, needed up to checkpoint `until`.

    Raises:
        StateError: one of them was deleted, or is about to be.
    """
    refuse_deleted(connection, [stored.name for _, stored in objects])
    place = {"stream": stream, "checkpoint": checkpoint, "epoch": epoch, "until": until}
    values = [
        place | {"kind": kind.value, "name": stored.name, "bytes": stored.bytes, "checksum": stored.checksum}
        for kind, stored in objects
    ]
    if values:
        connection.execute(insert(t.object_), values)


def refuse_deleted(connection: Connection, names: Iterable[str]) -> None:
    """Refuse names that have a tombstone: they can never be referenced again (`catalog.tombstones`).

    Raises:
        StateError: a name has a tombstone.
    """
    d = t.deletion.c
    for part in in_batches(names):
        gone = (d.stream.in_(select(t.stream.c.name))) & d.name.in_(part)
        found = connection.execute(
            select(d.name, d.reason, d.who, d.deleted_at).where(gone).order_by(d.name).limit(1)
        ).first()
        if found is not None:
            when = found.deleted_at.isoformat(timespec="seconds")
            raise StateError(
                f"object {found.name} ({found.reason}) was deleted by {found.who} at {when}, before anything referred "
                "to it",
                advice="repeat the operation that wrote it",
            )
