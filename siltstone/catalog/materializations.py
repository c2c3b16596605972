"""Materializations in the catalog: a lease while one runs, bases that chains begin with once it is done.

A materialization at a checkpoint makes every chain that runs through that checkpoint begin there: `complete` moves the
dependencies of all checkpoints from it on. A checkpoint that is committed later follows its predecessor's (`followed`).
So what a chain reads is always said by the dependencies alone.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from siltstone.catalog import rows
from siltstone.catalog import tables as t
from siltstone.catalog.fencing import lock
from siltstone.catalog.records import MaterializationRecord, ObjectKind
from siltstone.errors import Fenced, UsageError
from siltstone.model import Form, StoredObject

_M = t.materialization.c


def begin(
    connection: Connection, stream: str, operator: str, checkpoint: int, id: str, who: str, now: datetime, ttl_s: float
) -> None:
    """Take the lease; as `Catalog.begin_materialization`."""
    lock(connection, stream)
    mine = (_M.stream == stream) & (_M.operator == operator) & _M.ended_at.is_(None)
    dead = update(t.materialization).where(mine, _M.expires_at <= now)
    connection.execute(dead.values(ended_at=now, error="its process died, or hung for too long"))
    running = connection.execute(select(t.materialization).where(mine)).first()
    if running is not None:
        raise UsageError(
            f"operator {operator} of stream {stream} is being materialized at checkpoint {running.checkpoint} by "
            f"{running.who}, since {running.began_at.isoformat(timespec='seconds')}: wait for that"
        )
    found = rows.newest(connection, stream, t.checkpoint.c.id == checkpoint, marked=False)
    if found is None:
        raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {checkpoint}")
    begins = firsts(connection, stream, checkpoint)
    if operator not in begins:
        known = ", ".join(sorted(begins)) or "none"
        raise UsageError(f"checkpoint {checkpoint} of stream {stream} has no operator {operator!r}: it has {known}")
    values = {"stream": stream, "id": id, "operator": operator, "checkpoint": checkpoint, "who": who}
    times = {"began_at": now, "expires_at": now + timedelta(seconds=ttl_s)}
    connection.execute(insert(t.materialization), values | times)


def renew(connection: Connection, stream: str, id: str, now: datetime, ttl_s: float) -> None:
    """Keep the lease; as `Catalog.renew_materialization`."""
    mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
    kept = update(t.materialization).where(mine).values(expires_at=now + timedelta(seconds=ttl_s))
    if not connection.execute(kept).rowcount:
        raise _lost(stream, id)


def complete(
    connection: Connection,
    stream: str,
    id: str,
    manifest: StoredObject,
    objects: Sequence[StoredObject],
    measured: Mapping[str, Any],
    now: datetime,
) -> None:
    """Let chains begin with the new bases; as `Catalog.complete_materialization`."""
    lock(connection, stream)
    place = (_M.stream == stream) & (_M.id == id)
    lease = connection.execute(select(t.materialization).where(place, _M.ended_at.is_(None))).first()
    if lease is None:
        raise _lost(stream, id)
    at = rows.newest(connection, stream, t.checkpoint.c.id == lease.checkpoint, marked=True)
    if at is None:
        raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {lease.checkpoint} any more")
    said = {
        "manifest": manifest.name,
        "manifest_bytes": manifest.bytes,
        "manifest_checksum": manifest.checksum,
        "ended_at": now,
    }
    connection.execute(update(t.materialization).where(place).values(said | dict(measured)))
    kinds = [(ObjectKind.MATERIALIZATION, stored) for stored in (manifest, *objects)]
    rows.insert_objects(connection, stream, at.epoch, lease.checkpoint, kinds)
    d = t.dependency.c
    through = (d.stream == stream) & (d.operator == lease.operator)
    through &= (d.checkpoint >= lease.checkpoint) & (d.first < lease.checkpoint)
    connection.execute(update(t.dependency).where(through).values(first=lease.checkpoint))


def fail(connection: Connection, stream: str, id: str, error: str, now: datetime) -> None:
    """Give the lease back; one that has ended already stays as it is."""
    mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
    connection.execute(update(t.materialization).where(mine).values(ended_at=now, error=error))


def every(connection: Connection, stream: str) -> list[MaterializationRecord]:
    """All of a stream, oldest first."""
    found = connection.execute(select(t.materialization).where(_M.stream == stream).order_by(_M.began_at, _M.id))
    return [_record(row) for row in found]


def of_chain(connection: Connection, stream: str, checkpoint: int) -> list[MaterializationRecord]:
    """Those whose bases a restore of a checkpoint begins with, one an operator at most."""
    d = t.dependency.c
    joined = t.materialization.join(
        t.dependency, (d.stream == _M.stream) & (d.operator == _M.operator) & (d.first == _M.checkpoint)
    )
    done = (_M.stream == stream) & (d.checkpoint == checkpoint) & _M.manifest.is_not(None)
    query = select(t.materialization).select_from(joined).where(done).order_by(_M.operator, _M.ended_at)
    return list({row.operator: _record(row) for row in connection.execute(query)}.values())


def firsts(connection: Connection, stream: str, checkpoint: int) -> dict[str, int]:
    """Operator -> the checkpoint that its chain at `checkpoint` begins with."""
    d = t.dependency.c
    found = connection.execute(select(d.operator, d.first).where(d.stream == stream, d.checkpoint == checkpoint))
    return {operator: first for operator, first in found}


def followed(
    connection: Connection, stream: str, before: Row[Any] | None, forms: Mapping[str, Form], first: Mapping[str, int]
) -> dict[str, int]:
    """Where the chains of a new checkpoint begin: a delta's where that of the checkpoint `before` it does by now."""
    if before is None:
        return dict(first)
    begins = firsts(connection, stream, before.id)
    return {
        operator: max(said, begins.get(operator, said)) if Form(forms.get(operator, Form.BASE)) is Form.DELTA else said
        for operator, said in first.items()
    }


def _record(row: Row[Any]) -> MaterializationRecord:
    values = dict(row._mapping)
    name, size, checksum = (values.pop(key) for key in ("manifest", "manifest_bytes", "manifest_checksum"))
    return MaterializationRecord(**values, manifest=StoredObject(name, size, checksum) if name else None)


def _lost(stream: str, id: str) -> Fenced:
    return Fenced(f"materialization {id} of stream {stream} has lost its lease: another may have begun; run it again")
