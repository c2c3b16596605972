"""Queries of the catalog, and its rows as records. Each runs in its caller's transaction."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, select, update

from siltstone.catalog import tables as t
from siltstone.catalog.fencing import unknown
from siltstone.catalog.records import (
    CheckpointCommit,
    CheckpointRecord,
    ObjectKind,
    ObjectRecord,
    RetainedCheckpoint,
    SavepointRecord,
    SnapshotRecord,
    Step,
    StepRecord,
    StreamRecord,
    as_utc,
)
from siltstone.catalog.source_entries import NO_ENTRIES
from siltstone.errors import StateError, UnknownCheckpoint, UsageError
from siltstone.log import get_logger
from siltstone.model import Form, StoredObject

_LOG = get_logger(__name__)
Value = TypeVar("Value", int, str)
ID_END = 2**63
"""ids from here on are no integers of a database"""
_AT_ONCE = 500
"""how many values one statement names; databases bound its parameters"""


def parts(values: Iterable[Value]) -> Iterator[list[Value]]:
    """The values without repetition, ascending, as many at a time as one statement can name."""
    ordered = sorted(set(values))
    return (ordered[i : i + _AT_ONCE] for i in range(0, len(ordered), _AT_ONCE))


def find_stream(connection: Connection, name: str) -> StreamRecord | None:
    """One stream, None where it is not recorded."""
    row = connection.execute(select(t.stream).where(t.stream.c.name == name)).mappings().first()
    return StreamRecord(**row) if row else None


def get_stream(connection: Connection, name: str) -> StreamRecord:
    """One stream.

    Raises:
        UnknownStream: lists the streams there are.
    """
    found = find_stream(connection, name)
    if found is None:
        raise unknown(connection, name)
    return found


def unknown_checkpoint(connection: Connection, stream: str, missing: str) -> UnknownCheckpoint:
    """The error for a checkpoint that is not there: `missing` says which, what is there follows.

    Raises:
        UnknownStream: not even the stream is there.
    """
    get_stream(connection, stream)
    c = t.checkpoint.c
    summary = select(func.count(), func.min(c.id), func.max(c.id), func.min(c.event_time_max), func.min(c.committed_at))
    live = summary.where(c.stream == stream, c.deleted_at.is_(None))
    count, first, last, events, committed = connection.execute(live).one()
    if not count:
        return UnknownCheckpoint(f"{missing} of stream {stream}: it has none yet, run it first")
    seen = f", events from {events.isoformat()}" if events else ", none with an event time"
    there = f"it has {count}, {first} to {last}, committed from {committed.isoformat()}{seen}"
    return UnknownCheckpoint(f"{missing} of stream {stream}: {there}")


def checkpoints_of(stream: str, *, marked: bool = False) -> Select[Any]:
    """All checkpoints of one stream, newest first; those that are marked as deleted only if asked for."""
    c = t.checkpoint.c
    found = select(t.checkpoint).where(c.stream == stream).order_by(c.id.desc())
    return found if marked else found.where(c.deleted_at.is_(None))


def is_(id: int) -> ColumnElement[bool]:
    """The checkpoint of that id, whatever number it is."""
    return t.checkpoint.c.id == (id if 0 < id < ID_END else 0)


def newest(connection: Connection, stream: str, *where: ColumnElement[bool], marked: bool = False) -> Row[Any] | None:
    """The checkpoint of the highest id that fits."""
    return connection.execute(checkpoints_of(stream, marked=marked).where(*where).limit(1)).first()


def to_checkpoint(row: Row[Any]) -> CheckpointRecord:
    """A row of table checkpoint as a record."""
    values = dict(row._mapping)
    size, checksum = values.pop("manifest_bytes"), values.pop("manifest_checksum")
    values["manifest"] = StoredObject(values["manifest"], size, checksum, digest=values["digest"])
    values["forms"] = {operator: Form(form) for operator, form in values["forms"].items()}
    return CheckpointRecord(**values)


def to_step(row: Row[Any]) -> StepRecord:
    """A row of table step as a record."""
    return StepRecord(row.step, row.batch_id, row.offsets, row.sources or NO_ENTRIES, checkpoint=row.checkpoint)


def step_values(step: Step) -> dict[str, Any]:
    """The columns of table step that say what was read."""
    sources = None if step.sources == NO_ENTRIES else step.sources
    return {"step": step.step, "batch_id": step.batch_id, "offsets": step.offsets, "sources": sources}


def insert_checkpoint(
    connection: Connection,
    stream: str,
    epoch: int,
    commit: CheckpointCommit,
    before: Row[Any] | None,
    now: datetime,
    first: Mapping[str, int],
) -> None:
    """All rows of one checkpoint, its chains beginning at `first`; `before` is the one it follows.

    The highest event time never goes back from one to the next. The time of commit is what the clock says: a wrong one
    is not carried on to those that follow.
    """
    if before is not None and as_utc(now) < before.committed_at:
        _LOG.warning(
            "a checkpoint is committed before the one it follows: the catalog's clock was ahead then or is behind now; "
            "retention by time and `--at TIME` go by these times",
            stream=stream,
            checkpoint=commit.id,
            committed_at=as_utc(now).isoformat(timespec="seconds"),
            before=before.committed_at.isoformat(timespec="seconds"),
        )
    event_times = [commit.event_time_max, before.event_time_max if before else None]
    connection.execute(
        insert(t.checkpoint),
        {
            "stream": stream,
            "id": commit.id,
            "epoch": epoch,
            "committed_at": now,
            "manifest": commit.manifest.name,
            "manifest_bytes": commit.manifest.bytes,
            "manifest_checksum": commit.manifest.checksum,
            "digest": commit.digest,
            "rows": commit.rows,
            "bytes": commit.bytes,
            "forms": {operator: Form(form).value for operator, form in commit.forms.items()},
            "d": dict(commit.d),
            "statistics": dict(commit.statistics),
            "event_time_max": max((as_utc(time) for time in event_times if time), default=None),
        },
    )
    objects = [(ObjectKind.MANIFEST, commit.manifest)]
    objects += [(ObjectKind.SEGMENT, stored) for stored in commit.segments]
    objects += [(ObjectKind.BASE, stored) for stored in commit.bases]
    insert_objects(connection, stream, epoch, commit.id, objects)
    place = {"stream": stream, "checkpoint": commit.id}
    if first:
        rows = [place | {"operator": operator, "first": begins} for operator, begins in sorted(first.items())]
        connection.execute(insert(t.dependency), rows)
    if commit.steps:
        connection.execute(insert(t.step), [place | step_values(step) for step in commit.steps])
    if commit.edit is not None:
        connection.execute(insert(t.edit), place | asdict(commit.edit) | {"epoch": epoch, "edited_at": now})
    if commit.parallelism is not None:
        connection.execute(update(t.stream).where(t.stream.c.name == stream).values(parallelism=commit.parallelism))


def insert_objects(
    connection: Connection,
    stream: str,
    epoch: int,
    checkpoint: int,
    objects: Sequence[tuple[ObjectKind, StoredObject]],
) -> None:
    """Objects that one checkpoint refers to.

    Raises:
        StateError: one of them was deleted, or is about to be.
    """
    refuse_deleted(connection, [stored.name for _, stored in objects])
    place = {"stream": stream, "checkpoint": checkpoint, "epoch": epoch}
    rows = [
        place | {"kind": kind.value, "name": stored.name, "bytes": stored.bytes, "checksum": stored.checksum}
        for kind, stored in objects
    ]
    if rows:
        connection.execute(insert(t.object_), rows)


def refuse_deleted(connection: Connection, names: Iterable[str]) -> None:
    """What a sweep has written down as deleted, nothing can refer to any more (`catalog.audit`).

    Raises:
        StateError: one of these names is.
    """
    d = t.deletion.c
    for part in parts(names):
        gone = (d.stream.in_(select(t.stream.c.name))) & d.name.in_(part)
        found = connection.execute(
            select(d.name, d.reason, d.who, d.deleted_at).where(gone).order_by(d.name).limit(1)
        ).first()
        if found is not None:
            when = found.deleted_at.isoformat(timespec="seconds")
            raise StateError(
                f"object {found.name} ({found.reason}) was deleted by {found.who} at {when}, before anything referred "
                "to it: do again what wrote it"
            )


def chain(connection: Connection, stream: str, id: int) -> list[int]:
    """Every checkpoint that a restore of `id` reads from, itself included; ascending.

    All operators take part in every checkpoint, so those of a chain follow each other without a gap.
    """
    d = t.dependency.c
    first = connection.scalar(select(func.min(d.first)).where(d.stream == stream, d.checkpoint == id))
    return list(range(id if first is None else first, id + 1))


def objects(connection: Connection, stream: str, ids: Iterable[int] | None) -> list[ObjectRecord]:
    """Objects of some checkpoints (all, for None), by checkpoint and name."""
    o = t.object_.c
    query = select(o.name, o.kind, o.checkpoint, o.epoch, o.bytes, o.checksum).where(o.stream == stream)
    if ids is not None:
        query = query.where(o.checkpoint.in_(list(ids)))
    return [
        ObjectRecord(name, ObjectKind(kind), *rest)
        for name, kind, *rest in connection.execute(query.order_by(o.checkpoint, o.name))
    ]


def snapshots(connection: Connection, stream: str) -> list[SnapshotRecord]:
    """All full snapshots of a stream, oldest checkpoint first."""
    o, s = t.object_.c, t.snapshot.c
    stored: dict[int, list[StoredObject]] = {}
    query = select(o.checkpoint, o.name, o.bytes, o.checksum).where(o.stream == stream, o.kind == "snapshot")
    for checkpoint, *rest in connection.execute(query.order_by(o.name)):
        stored.setdefault(checkpoint, []).append(StoredObject(*rest))
    found = connection.execute(select(t.snapshot).where(s.stream == stream).order_by(s.checkpoint))
    return [SnapshotRecord(**row, objects=tuple(stored.get(row["checkpoint"], ()))) for row in found.mappings()]


def retained(connection: Connection, stream: str) -> list[RetainedCheckpoint]:
    """Every checkpoint of which there is a row, ascending."""
    c, d = t.checkpoint.c, t.dependency.c
    first = func.coalesce(func.min(d.first), c.id)
    joined = t.checkpoint.outerjoin(t.dependency, (d.stream == c.stream) & (d.checkpoint == c.id))
    query = select(c.id, first, c.deleted_at, c.committed_at).select_from(joined).where(c.stream == stream)
    found = connection.execute(query.group_by(c.id, c.deleted_at, c.committed_at).order_by(c.id))
    return [RetainedCheckpoint(*row) for row in found]


def savepoints(connection: Connection, stream: str) -> list[SavepointRecord]:
    """All savepoints of a stream, by name; expired ones too."""
    query = select(t.savepoint).where(t.savepoint.c.stream == stream).order_by(t.savepoint.c.name)
    return [SavepointRecord(**row) for row in connection.execute(query).mappings()]


def insert_savepoint(connection: Connection, savepoint: SavepointRecord) -> None:
    """A savepoint of a checkpoint that is not marked as deleted.

    Raises:
        UnknownCheckpoint, UsageError: as `Catalog.add_savepoint`.
    """
    stream, name, id = savepoint.stream, savepoint.name, savepoint.checkpoint
    if newest(connection, stream, is_(id)) is None:
        raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")
    for taken in savepoints(connection, stream):
        if taken.name == name:
            raise UsageError(
                f"stream {stream} has a savepoint {name} already, of checkpoint {taken.checkpoint}: "
                "drop it first (--drop), or choose another name"
            )
    connection.execute(insert(t.savepoint), asdict(savepoint))


def delete_savepoint(connection: Connection, stream: str, name: str) -> None:
    """Remove a savepoint; its checkpoint stays.

    Raises:
        UsageError: there is none of that name; says which there are.
    """
    s = t.savepoint.c
    if connection.execute(delete(t.savepoint).where(s.stream == stream, s.name == name)).rowcount == 0:
        names = ", ".join(savepoint.name for savepoint in savepoints(connection, stream))
        raise UsageError(f"no savepoint {name!r} of stream {stream}: it has {names or 'none'}")


def mark_deleted(connection: Connection, stream: str, ids: Iterable[int], now: datetime) -> int:
    """Mark checkpoints that are not the newest, unknown or kept by a savepoint; what only they need is forgotten.
    How many were not marked before.

    Raises:
        UnknownCheckpoint, UsageError: as `Catalog.mark_deleted`.
    """
    last = newest(connection, stream)
    pins = {s.checkpoint: s.name for s in savepoints(connection, stream) if not s.expired(as_utc(now))}
    for id in sorted(set(ids)):
        if last is None or not 1 <= id <= last.id:
            raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")
        if id == last.id:
            raise UsageError(
                f"checkpoint {id} of stream {stream} is its newest, which the next run resumes from: "
                "delete others, or run the stream on first"
            )
        if id in pins:
            raise UsageError(
                f"checkpoint {id} of stream {stream} is kept by its savepoint {pins[id]}: "
                "delete others, or drop the savepoint first (siltstone savepoint --drop)"
            )
    marked = 0
    for part in parts(ids):
        c, d, s, expired = t.checkpoint.c, t.dependency.c, t.snapshot.c, t.savepoint.c
        at = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_(None)
        marked += connection.execute(update(t.checkpoint).where(at).values(deleted_at=now)).rowcount
        connection.execute(delete(t.dependency).where(d.stream == stream, d.checkpoint.in_(part)))
        connection.execute(delete(t.snapshot).where(s.stream == stream, s.checkpoint.in_(part)))
        connection.execute(delete(t.savepoint).where(expired.stream == stream, expired.checkpoint.in_(part)))
    return marked


def forget(connection: Connection, stream: str, ids: Iterable[int], objects: Iterable[str]) -> None:
    """Remove rows of objects, then of checkpoints, as far as the checkpoints are marked."""
    c, o = t.checkpoint.c, t.object_.c
    marked = select(c.id).where(c.stream == stream, c.deleted_at.is_not(None))
    for names in parts(objects):
        gone = (o.stream == stream) & o.name.in_(names) & o.checkpoint.in_(marked)
        connection.execute(delete(t.object_).where(gone))
    for part in parts(ids):
        gone = (c.stream == stream) & c.id.in_(part) & c.deleted_at.is_not(None)
        connection.execute(delete(t.checkpoint).where(gone))
