"""Reference copies: full copies of a checkpoint's live state, to compare with a restore row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, unknown_checkpoint_error
from siltstone.catalog.records.objects import ObjectKind, insert_objects
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import UsageError
from siltstone.model import StoredObject
from siltstone.store.paths import check_object_name


@dataclass(frozen=True, slots=True)
class ReferenceCopyRecord:
    """A full copy of the live state at one checkpoint."""

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    taken_at: datetime
    objects: tuple[StoredObject, ...]


class ReferenceCopies(CatalogPart):
    """The reference copies of checkpoints."""

    def add(self, stream: str, epoch: int, checkpoint: int, objects: Sequence[StoredObject], copied_rows: int) -> None:
        """Record a reference copy of the state at a checkpoint, guarded by the writer epoch.

        A process other than the run passes the epoch in `streams.get(name).epoch` when it began.

        Raises:
            UsageError: an object name could leave the store, or the checkpoint has a reference copy already.
            Fenced: `epoch` is not the stream's newest.
            UnknownCheckpoint: the checkpoint does not exist.
        """
        for stored in objects:
            check_object_name(stored.name)
        with self._transactions.begin_write(
            f"the reference copy of checkpoint {checkpoint} of stream {stream}"
        ) as connection:
            fencing.hold(connection, stream, epoch)
            if find_newest(connection, stream, t.checkpoint.c.id == checkpoint) is None:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {checkpoint}")
            at = (t.reference_copy.c.stream == stream) & (t.reference_copy.c.checkpoint == checkpoint)
            if connection.scalar(select(t.reference_copy.c.checkpoint).where(at)) is not None:
                raise UsageError(f"checkpoint {checkpoint} of {stream} has a reference copy already")
            size = sum(stored.bytes for stored in objects)
            values = {"stream": stream, "checkpoint": checkpoint, "rows": copied_rows, "bytes": size}
            connection.execute(insert(t.reference_copy), values | {"taken_at": self._transactions.time(connection)})
            kinds = [(ObjectKind.REFERENCE_COPY, stored) for stored in objects]
            insert_objects(connection, stream, epoch, checkpoint, kinds, until=checkpoint)

    def drop(self, stream: str, epoch: int, checkpoint: int) -> None:
        """Drop the reference copy of a checkpoint, if it has one, guarded by the writer epoch.

        Its objects become orphans, which sweeps delete.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(
            f"the reference copy of checkpoint {checkpoint} of stream {stream}"
        ) as connection:
            fencing.hold(connection, stream, epoch)
            s, o = t.reference_copy.c, t.object_.c
            connection.execute(delete(t.reference_copy).where(s.stream == stream, s.checkpoint == checkpoint))
            of_it = (o.stream == stream) & (o.checkpoint == checkpoint) & (o.kind == ObjectKind.REFERENCE_COPY)
            connection.execute(delete(t.object_).where(of_it))

    def list(self, stream: str) -> list[ReferenceCopyRecord]:
        """List all reference copies, oldest checkpoint first."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return read_copies(connection, stream)


def read_copies(connection: Connection, stream: str) -> list[ReferenceCopyRecord]:
    """Return all reference copies of a stream, oldest checkpoint first."""
    o, s = t.object_.c, t.reference_copy.c
    stored: dict[int, list[StoredObject]] = {}
    query = select(o.checkpoint, o.name, o.bytes, o.checksum).where(
        o.stream == stream, o.kind == ObjectKind.REFERENCE_COPY
    )
    for checkpoint, *rest in connection.execute(query.order_by(o.name)):
        stored.setdefault(checkpoint, []).append(StoredObject(*rest))
    found = connection.execute(select(t.reference_copy).where(s.stream == stream).order_by(s.checkpoint))
    return [ReferenceCopyRecord(**row, objects=tuple(stored.get(row["checkpoint"], ()))) for row in found.mappings()]
