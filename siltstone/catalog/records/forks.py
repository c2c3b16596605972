"""Forks: streams that begin at a checkpoint of another, without copying an object.

A fork is made of rows, copied in one transaction: the checkpoint, the objects that it needs, the earlier checkpoints
that wrote them (marked as deleted: they are kept for it and go with it), and the input log up to it. Both
streams then refer to the objects. A deletion spares objects that another stream refers to (`catalog.tombstones`); the
last stream that releases an object deletes it.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, exists, insert, literal, select
from sqlalchemy import exc as sa

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.beginnings import sources_of
from siltstone.catalog.records.checkpoints import find_newest, has_id, unknown_checkpoint_error
from siltstone.catalog.records.definitions import definition_at
from siltstone.catalog.records.input_log import keep_beginnings
from siltstone.catalog.records.objects import ObjectRecord, insert_objects, read_needed
from siltstone.catalog.records.streams import TABLE, StreamRecord, find_stream, get_stream
from siltstone.errors import UsageError
from siltstone.model import check_name


class Forks(CatalogPart):
    """Streams that began at a checkpoint of another."""

    def create(self, stream: str, new: str, checkpoint: int) -> StreamRecord:
        """Begin the stream `new` at a checkpoint of `stream`, whose objects both refer to from then on.

        `stream` may be running. `new` starts with the newest writer epoch of `stream`, so that its runs have higher
        epochs than any checkpoint it begins with.

        Raises:
            UsageError: `new` is not a valid name, or the stream exists.
            UnknownStream: `stream` does not exist.
            UnknownCheckpoint: the checkpoint does not exist, or is marked as deleted.
        """
        check_name("stream", new)
        with self._transactions.begin_write(f"stream {new}, a fork of {stream},") as connection:
            epoch = fencing.lock(connection, stream)
            if find_stream(connection, new) is not None:
                raise _name_taken_error(new)
            if find_newest(connection, stream, has_id(checkpoint)) is None:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {checkpoint}")
            made = {"name": new, "epoch": epoch, "created_at": self._transactions.time(connection)}
            made["definition"] = definition_at(connection, stream, checkpoint)
            try:
                with connection.begin_nested():
                    made |= {"forked_from": stream, "forked_at": checkpoint, "default_sink": TABLE}
                    _copy(connection, t.stream, t.stream.c.name == stream, **made)
            except sa.IntegrityError:  # another process was first
                raise _name_taken_error(new) from None
            _copy_chain(connection, stream, new, checkpoint, self._transactions.time(connection))
            _copy_history(connection, stream, new, checkpoint)
            return get_stream(connection, new)

    def get_lineage(self, stream: str) -> list[str]:
        """Return the stream, its parent (the stream it was forked from), its parent's parent, and so on.

        Raises:
            UnknownStream: the stream does not exist.
        """
        with self._transactions.begin_read() as connection:
            found, name = [], stream
            while name is not None:
                found.append(name)
                name = get_stream(connection, name).forked_from
            return found


def _name_taken_error(name: str) -> UsageError:
    return UsageError(f"stream {name} exists already: give the fork another name")


def _copy(connection: Connection, table: Table, where: ColumnElement[bool], **changed: Any) -> None:
    """Insert some rows of a table again, with these columns changed."""
    columns = [literal(changed[c.name], c.type).label(c.name) if c.name in changed else c for c in table.c]
    connection.execute(insert(table).from_select([c.name for c in table.c], select(*columns).where(where)))


def _copy_chain(connection: Connection, stream: str, new: str, checkpoint: int, now: datetime) -> None:
    """Copy the rows of a checkpoint, of the objects that it needs, and of the checkpoints that wrote them."""
    c, m = t.checkpoint.c, t.materialization.c
    needed: dict[tuple[int, int], list[ObjectRecord]] = {}
    for stored in read_needed(connection, stream, checkpoint):
        needed.setdefault((stored.checkpoint, stored.epoch), []).append(stored)
    for part in in_batches(at for at, _ in needed if at != checkpoint):
        _copy(connection, t.checkpoint, (c.stream == stream) & c.id.in_(part), stream=new, deleted_at=now)
    _copy(connection, t.checkpoint, (c.stream == stream) & (c.id == checkpoint), stream=new)
    for part in in_batches(stored.name for objects in needed.values() for stored in objects):
        _copy(connection, t.materialization, (m.stream == stream) & m.manifest.in_(part), stream=new)
    for (at, epoch), objects in needed.items():
        insert_objects(connection, new, epoch, at, [(stored.kind, stored.stored) for stored in objects])


def _copy_history(connection: Connection, stream: str, new: str, checkpoint: int) -> None:
    """Copy the input log up to a checkpoint, the edits that are part of it, and its definitions.

    Where the sources begin that `stream` got later is not part of it.
    """
    s, e, r, d = t.step.c, t.edit.c, t.rollback.c, t.definition.c
    _copy(connection, t.definition, (d.stream == stream) & (d.checkpoint <= checkpoint), stream=new)
    _copy(connection, t.step, (s.stream == stream) & (s.checkpoint <= checkpoint), stream=new)
    made_under = [
        *connection.scalars(select(d.definition).where(d.stream == new)),
        definition_at(connection, new, checkpoint),
    ]
    keep_beginnings(connection, new, sources_of(made_under))
    given_up = exists().where(
        r.stream == stream, r.epoch > e.epoch, r.checkpoint < e.checkpoint, r.newest >= e.checkpoint
    )
    _copy(connection, t.edit, (e.stream == stream) & (e.checkpoint <= checkpoint) & ~given_up, stream=new)
