"""Objects: the stored objects that checkpoints refer to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, insert, select

from siltstone.catalog import tables as t
from siltstone.catalog.limits import ID_END, in_batches
from siltstone.catalog.streams import get_stream
from siltstone.catalog.transactions import CatalogPart
from siltstone.errors import StateError
from siltstone.model import StoredObject


class ObjectKind(StrEnum):
    """What a stored object holds."""

    SEGMENT = "segment"
    BASE = "base"
    MANIFEST = "manifest"
    REFERENCE_COPY = "snapshot"
    MATERIALIZATION = "materialization"
    """a base, or the manifest, of a materialization"""


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """A stored object: the checkpoint and writer epoch that wrote it, its size in bytes, its checksum."""

    name: str
    kind: ObjectKind
    checkpoint: int
    epoch: int
    bytes: int
    checksum: str

    @property
    def stored(self) -> StoredObject:
        """The object as the store knows it."""
        return StoredObject(self.name, self.bytes, self.checksum)


class Objects(CatalogPart):
    """The objects that checkpoints refer to."""

    def list(self, stream: str, checkpoints: Iterable[int] | None = None) -> list[ObjectRecord]:
        """List the objects that these checkpoints wrote (default all), by checkpoint and name."""
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            if checkpoints is None:
                return read_objects(connection, stream, None)
            parts = in_batches(id for id in checkpoints if 0 < id < ID_END)
            return [found for part in parts for found in read_objects(connection, stream, part)]


def read_objects(connection: Connection, stream: str, ids: Iterable[int] | None) -> list[ObjectRecord]:
    """Return the objects of some checkpoints (all if None), by checkpoint and name."""
    o = t.object_.c
    query = select(o.name, o.kind, o.checkpoint, o.epoch, o.bytes, o.checksum).where(o.stream == stream)
    if ids is not None:
        query = query.where(o.checkpoint.in_(list(ids)))
    return [
        ObjectRecord(name, ObjectKind(kind), *rest)
        for name, kind, *rest in connection.execute(query.order_by(o.checkpoint, o.name))
    ]


def insert_objects(
    connection: Connection,
    stream: str,
    epoch: int,
    checkpoint: int,
    objects: Sequence[tuple[ObjectKind, StoredObject]],
) -> None:
    """Insert rows for objects that one checkpoint refers to.

    Raises:
        StateError: one of them was deleted, or is about to be.
    """
    refuse_deleted(connection, [stored.name for _, stored in objects])
    place = {"stream": stream, "checkpoint": checkpoint, "epoch": epoch}
    values = [
        place | {"kind": kind.value, "name": stored.name, "bytes": stored.bytes, "checksum": stored.checksum}
        for kind, stored in objects
    ]
    if values:
        connection.execute(insert(t.object_), values)


def refuse_deleted(connection: Connection, names: Iterable[str]) -> None:
    """Refuse names that have a tombstone: nothing can refer to them again (`catalog.tombstones`).

    Raises:
        StateError: one of these names has one.
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
                "to it: repeat the operation that wrote it"
            )
