"""The outbox: outputs that are still to be delivered to sinks.

An output is one checkpoint's rows for one sink. They are staged in the store, and the transaction that makes the
checkpoint exist makes the output outstanding. From then on its rows are decided:

    outstanding   the staged rows are to be delivered
    lost          the staged rows are damaged and the checkpoint was given up: they come again with that checkpoint
    delivered     the sink has the rows; the staged objects may be deleted, at once or after a while

A rollback leaves outputs alone: a checkpoint that was given up was complete once, so its sink has the rows or gets the
staged ones. When the checkpoint is made again from the same logged steps, it brings no output. So these rows do not
refer to table checkpoint, and retention, which deletes checkpoints, never touches them.

A sink knows an output by its checkpoint's id plus the stream's offset. The offset is 0 unless checkpoints were lost for
good, because their input was pruned or the catalog was restored from a backup. Their ids are then used again for other
rows, which a sink that skips known ids would lose; so the offset grows by as many ids as sinks may know.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, has_id
from siltstone.catalog.records.objects import refuse_deleted
from siltstone.errors import CorruptObject, StateError
from siltstone.model import SinkFile, StoredObject
from siltstone.store.paths import is_table_file

_O, _S = t.output.c, t.output_object.c


@dataclass(frozen=True, slots=True)
class Output:
    """A checkpoint's rows for one sink: `rows` rows, staged in `objects`, in this order.

    `name` is the operator whose output it is. `arrow_schema` is the rows' schema, in Arrow's serialization. The objects
    are of one kind: `SinkFile`, if the sink was a Delta table when they were staged, or rows in Arrow's format. Each
    sink can be given either kind.
    """

    name: str
    arrow_schema: bytes
    rows: int
    objects: tuple[StoredObject, ...]

    @property
    def sink_files(self) -> Sequence[SinkFile]:
        """The objects if they are files of the sink's Delta table, else nothing."""
        return [each for each in self.objects if isinstance(each, SinkFile)]


@dataclass(frozen=True, slots=True)
class OutputRecord(Output):
    """An output in the catalog.

    `sink_id` is the id by which its sink knows it, `epoch` the writer epoch that staged it.
    """

    stream: str
    checkpoint: int
    sink_id: int
    epoch: int
    lost: bool
    delivered_at: datetime | None


class OutboxRecords(CatalogPart):
    """Outputs of completed checkpoints, and whether sinks have them."""

    def mark_delivered(self, stream: str, epoch: int, checkpoint: int, name: str) -> None:
        """Record that a sink has an output, guarded by the writer epoch; a delivered one stays as it is.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(
            f"the delivery of checkpoint {checkpoint} of stream {stream}"
        ) as connection:
            fencing.hold(connection, stream, epoch)
            mine = _is_output(stream, checkpoint, name) & _O.delivered_at.is_(None)
            connection.execute(update(t.output).where(mine).values(delivered_at=self._transactions.time(connection)))

    def mark_lost(self, stream: str, epoch: int, checkpoint: int, name: str) -> None:
        """Let an output come again with its checkpoint, which was given up, because the staged rows cannot be read.

        Raises:
            Fenced: `epoch` is not the stream's newest.
            StateError: the checkpoint exists, or the output was delivered.
        """
        with self._transactions.begin_write(f"the outputs of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            there = find_newest(connection, stream, has_id(checkpoint), marked=True) is not None
            mine = _is_output(stream, checkpoint, name) & _O.delivered_at.is_(None)
            if there or connection.execute(update(t.output).where(mine).values(lost=True)).rowcount == 0:
                raise StateError(f"the output {name} of checkpoint {checkpoint} of stream {stream} cannot come again")
            _delete_objects(connection, stream, [(checkpoint, name)])

    def forget_delivered(self, stream: str, epoch: int, keep: timedelta = timedelta(0)) -> list[str]:
        """Remove the rows of outputs that were delivered longer than `keep` ago, guarded by the writer epoch.

        Returns:
            The names of their staged objects, to which nothing refers now or later.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the outputs of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            done = (_O.stream == stream) & _O.delivered_at.is_not(None)
            if keep:
                now = self._transactions.time(connection)
                done &= _O.delivered_at < now - min(keep, now - datetime.min.replace(tzinfo=UTC))
            found = [
                (row.checkpoint, row.name) for row in connection.execute(select(_O.checkpoint, _O.name).where(done))
            ]
            names = _delete_objects(connection, stream, found)
            connection.execute(delete(t.output).where(done))
            return names

    def list(self, stream: str, *, outstanding: bool = False, checkpoint: int | None = None) -> list[OutputRecord]:
        """List every recorded output, by checkpoint and name; with `outstanding`, those not delivered yet.

        Args:
            checkpoint: list only those of this one.
        """
        with self._transactions.begin_read() as connection:
            query = select(t.output).where(_O.stream == stream).order_by(_O.checkpoint, _O.name)
            query = query if checkpoint is None else query.where(_O.checkpoint == checkpoint)
            found = connection.execute(query.where(_O.delivered_at.is_(None)) if outstanding else query).all()
            staged: dict[tuple[int, str], list[StoredObject]] = {}
            for part in in_batches(row.checkpoint for row in found):
                objects = select(t.output_object).where(_S.stream == stream, _S.checkpoint.in_(part))
                for each in connection.execute(objects.order_by(_S.checkpoint, _S.output, _S.position)):
                    stored = staged_object(each.name, each.bytes, each.checksum, each.statistics)
                    staged.setdefault((each.checkpoint, each.output), []).append(stored)
            return [
                OutputRecord(
                    name=row.name,
                    arrow_schema=row.arrow_schema,
                    rows=row.rows,
                    objects=tuple(staged.get((row.checkpoint, row.name), ())),
                    stream=stream,
                    checkpoint=row.checkpoint,
                    sink_id=row.sink_id,
                    epoch=row.epoch,
                    lost=row.lost,
                    delivered_at=row.delivered_at,
                )
                for row in found
            ]


def staged_object(name: str, size: int, checksum: str, statistics: str | None) -> StoredObject:
    """Return a staged object: a file of a table, if its name says so, or rows in Arrow's format.

    Args:
        statistics: see `SinkFile`; None if it is not a file of a table.

    Raises:
        CorruptObject: its name says otherwise than its statistics.
    """
    if is_table_file(name) != (statistics is not None):
        raise CorruptObject(f"{name} is a file of a table without statistics, or has some and is none")
    if statistics is None:
        return StoredObject(name, size, checksum)
    return SinkFile(name, size, checksum, statistics=statistics)


def insert_outputs(connection: Connection, stream: str, epoch: int, checkpoint: int, outputs: Sequence[Output]) -> None:
    """Make the outputs of a new checkpoint outstanding.

    Raises:
        StateError: the sink has, or will get, other rows under this id; or an object was deleted.
    """
    if not outputs:
        return
    sink_ids = {}
    offset = connection.scalar(select(t.stream.c.sink_offset).where(t.stream.c.name == stream)) or 0
    for output in outputs:
        lost = delete(t.output).where(_is_output(stream, checkpoint, output.name), _O.lost).returning(_O.sink_id)
        sink_ids[output.name] = connection.scalar(lost)
        if sink_ids[output.name] is not None:
            continue
        sink_ids[output.name] = checkpoint + offset
        if connection.scalar(select(_O.epoch).where(_is_output(stream, checkpoint, output.name))) is not None:
            raise StateError(
                f"checkpoint {checkpoint} of stream {stream} has already brought output {output.name}: other rows "
                "under its id would be lost or doubled"
            )
    refuse_deleted(connection, [stored.name for output in outputs for stored in output.objects])
    place = {"stream": stream, "checkpoint": checkpoint}
    values = [
        place
        | {"name": o.name, "sink_id": sink_ids[o.name], "epoch": epoch, "lost": False}
        | {"rows": o.rows, "arrow_schema": o.arrow_schema}
        for o in outputs
    ]
    connection.execute(insert(t.output), values)
    objects = [
        place
        | {"output": o.name, "name": each.name, "position": n, "bytes": each.bytes, "checksum": each.checksum}
        | {"statistics": each.statistics if isinstance(each, SinkFile) else None}
        for o in outputs
        for n, each in enumerate(o.objects)
    ]
    if objects:
        connection.execute(insert(t.output_object), objects)


def skip_sink_ids(connection: Connection, stream: str, count: int) -> None:
    """Raise the ids by which sinks know new checkpoints by `count`: that many ids were lost and are used again."""
    s = t.stream.c
    connection.execute(update(t.stream).where(s.name == stream).values(sink_offset=s.sink_offset + count))


def forget_outputs(connection: Connection, stream: str, after: int = 0) -> None:
    """Forget all outputs after checkpoint `after`: their input comes again, if at all, under other ids. A sweep deletes
    what they staged."""
    for table in (t.output_object, t.output):
        connection.execute(delete(table).where(table.c.stream == stream, table.c.checkpoint > after))


def _is_output(stream: str, checkpoint: int, name: str) -> ColumnElement[bool]:
    return (_O.stream == stream) & (_O.checkpoint == checkpoint) & (_O.name == name)


def _delete_objects(connection: Connection, stream: str, outputs: Iterable[tuple[int, str]]) -> list[str]:
    """Remove the rows of these outputs' staged objects, and return the objects' names."""
    wanted = set(outputs)
    names = []
    for part in in_batches(checkpoint for checkpoint, _ in wanted):
        found = select(_S.name, _S.checkpoint, _S.output).where(_S.stream == stream, _S.checkpoint.in_(part))
        names += [row.name for row in connection.execute(found) if (row.checkpoint, row.output) in wanted]
    for part in in_batches(names):
        connection.execute(delete(t.output_object).where(_S.stream == stream, _S.name.in_(part)))
    return names
