"""The part of the catalog that says what was materialized: bases that chains begin with.

A materialization at a checkpoint makes every chain that runs through that checkpoint begin there: completing it moves
the dependencies of all checkpoints from it on, and a checkpoint that is committed later follows its predecessor's
(`followed`). So what a chain reads is always said by the dependencies alone.

It runs under a lease of the same id (`catalog.leases`), which keeps what it reads and writes. At most one runs for
an operator: the next may begin when it has ended, or its lease has.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from siltstone.catalog import fencing, rows
from siltstone.catalog import tables as t
from siltstone.catalog.audit import RECORDS_KEPT
from siltstone.catalog.leases import leases
from siltstone.catalog.records import MaterializationRecord, ObjectKind
from siltstone.catalog.transactions import Transactions
from siltstone.errors import Fenced, UsageError
from siltstone.model import Form, StoredObject
from siltstone.store.paths import check_object_name

_M = t.materialization.c


class Materializations(Transactions):
    """Materializations of operators."""

    def begin_materialization(self, stream: str, operator: str, checkpoint: int, *, id: str, who: str) -> None:
        """Begin to materialize one operator at a checkpoint, under the lease `id`.

        Raises:
            UsageError: another process is at it, or there is no such operator.
            UnknownCheckpoint
        """
        with self._writing(f"a materialization of stream {stream}") as connection:
            fencing.lock(connection, stream)
            self._refuse_second(connection, stream, operator)
            if rows.newest(connection, stream, t.checkpoint.c.id == checkpoint) is None:
                raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {checkpoint}")
            begins = firsts(connection, stream, checkpoint)
            if operator not in begins:
                known = ", ".join(sorted(begins)) or "none"
                raise UsageError(
                    f"checkpoint {checkpoint} of stream {stream} has no operator {operator!r}: it has {known}"
                )
            self._forget_old(connection, stream, operator)
            values = {"stream": stream, "id": id, "operator": operator, "checkpoint": checkpoint, "who": who}
            connection.execute(insert(t.materialization), values | {"began_at": self._time(connection)})

    def _forget_old(self, connection: Connection, stream: str, operator: str) -> None:
        """Of long ago and at checkpoints that are gone; the newest that was completed stays, whenever that was."""
        mine = (_M.stream == stream) & (_M.operator == operator)
        newest = select(func.max(_M.ended_at)).where(mine, _M.manifest.is_not(None)).scalar_subquery()
        there = select(t.checkpoint.c.id).where(t.checkpoint.c.stream == stream)
        old = mine & (_M.ended_at < self._time(connection) - RECORDS_KEPT) & _M.checkpoint.not_in(there)
        connection.execute(delete(t.materialization).where(old, _M.manifest.is_(None) | (_M.ended_at < newest)))

    def _refuse_second(self, connection: Connection, stream: str, operator: str) -> None:
        running = (_M.stream == stream) & (_M.operator == operator) & _M.ended_at.is_(None)
        live = {lease.id for lease in leases(connection, stream, self._time(connection))}
        for row in connection.execute(select(t.materialization).where(running)).all():
            if row.id in live:
                raise UsageError(
                    f"operator {operator} of stream {stream} is being materialized at checkpoint {row.checkpoint} by "
                    f"{row.who}, since {row.began_at.isoformat(timespec='seconds')}: wait for that"
                )
            died = {"ended_at": self._time(connection), "error": "its process died, or hung for too long"}
            connection.execute(update(t.materialization).where(running, _M.id == row.id).values(died))

    def complete_materialization(
        self,
        stream: str,
        id: str,
        manifest: StoredObject,
        objects: Sequence[StoredObject],
        *,
        rows_: int,
        bytes_: int,
        seconds: float,
    ) -> None:
        """Let every chain through its checkpoint begin with the new bases, in one transaction guarded by the lease.

        Raises:
            Fenced: the lease was lost; nothing changed.
            UnknownCheckpoint: its checkpoint is gone.
        """
        for stored in (manifest, *objects):
            check_object_name(stored.name)
        with self._writing(f"a materialization of stream {stream}") as connection:
            fencing.lock(connection, stream)
            place = (_M.stream == stream) & (_M.id == id)
            begun = connection.execute(select(t.materialization).where(place, _M.ended_at.is_(None))).first()
            if begun is None or id not in {lease.id for lease in leases(connection, stream, self._time(connection))}:
                raise Fenced(
                    f"materialization {id} of stream {stream} has lost its lease: another may have begun; run it again"
                )
            at = rows.newest(connection, stream, t.checkpoint.c.id == begun.checkpoint, marked=True)
            if at is None:
                raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {begun.checkpoint} any more")
            said = {
                "manifest": manifest.name,
                "manifest_bytes": manifest.bytes,
                "manifest_checksum": manifest.checksum,
                "ended_at": self._time(connection),
                "rows": rows_,
                "bytes": bytes_,
                "seconds": seconds,
            }
            connection.execute(update(t.materialization).where(place).values(said))
            kinds = [(ObjectKind.MATERIALIZATION, stored) for stored in (manifest, *objects)]
            rows.insert_objects(connection, stream, at.epoch, begun.checkpoint, kinds)
            d = t.dependency.c
            through = (d.stream == stream) & (d.operator == begun.operator)
            through &= (d.checkpoint >= begun.checkpoint) & (d.first < begun.checkpoint)
            connection.execute(update(t.dependency).where(through).values(first=begun.checkpoint))

    def fail_materialization(self, stream: str, id: str, error: str) -> None:
        """Note why nothing came of it; one that has ended already stays as it is."""
        with self._writing(f"a materialization of stream {stream}") as connection:
            mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
            failed = {"ended_at": self._time(connection), "error": error}
            connection.execute(update(t.materialization).where(mine).values(failed))

    def materializations(self, stream: str) -> list[MaterializationRecord]:
        """All materializations of a stream, oldest first."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            query = select(t.materialization).where(_M.stream == stream).order_by(_M.began_at, _M.id)
            return [_record(row) for row in connection.execute(query)]

    def last_materialized(self, stream: str) -> dict[str, datetime]:
        """Operator -> when its newest materialization was completed."""
        done = (_M.stream == stream) & _M.manifest.is_not(None)
        query = select(_M.operator, func.max(_M.ended_at, type_=t.UtcTime())).where(done).group_by(_M.operator)
        with self._reading() as connection:
            return {operator: ended for operator, ended in connection.execute(query)}

    def failed_materializations(
        self, stream: str, operator: str, since: datetime
    ) -> tuple[int, MaterializationRecord | None]:
        """How many materializations of one operator that began at `since` or later failed, and the last of them."""
        failed = (_M.stream == stream) & (_M.operator == operator) & _M.error.is_not(None) & (_M.began_at >= since)
        with self._reading() as connection:
            count = connection.scalar(select(func.count()).where(failed)) or 0
            query = select(t.materialization).where(failed).order_by(_M.ended_at.desc(), _M.id).limit(1)
            last = connection.execute(query).first() if count else None
            return count, None if last is None else _record(last)

    def abandon_materialization(self, stream: str, id: str) -> None:
        """Forget one that was begun and is not wanted any more: that is no failure. One that has ended stays."""
        with self._writing(f"a materialization of stream {stream}") as connection:
            mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
            connection.execute(delete(t.materialization).where(mine))

    def chain_materializations(self, stream: str, id: int) -> list[MaterializationRecord]:
        """Those whose bases a restore of checkpoint `id` begins with, one an operator at most."""
        with self._reading() as connection:
            return [_record(row) for row in chain_materializations(connection, stream, id)]

    def firsts(self, stream: str, id: int) -> dict[str, int]:
        """Operator -> the checkpoint that its chain at checkpoint `id` begins with, as it is by now."""
        with self._reading() as connection:
            return firsts(connection, stream, id)


def firsts(connection: Connection, stream: str, checkpoint: int) -> dict[str, int]:
    """Operator -> the checkpoint that its chain at `checkpoint` begins with."""
    d = t.dependency.c
    found = connection.execute(select(d.operator, d.first).where(d.stream == stream, d.checkpoint == checkpoint))
    return {operator: first for operator, first in found}


def chain_materializations(connection: Connection, stream: str, checkpoint: int) -> list[Row[Any]]:
    """The rows of those whose bases a restore of `checkpoint` begins with, one an operator at most."""
    d = t.dependency.c
    joined = t.materialization.join(
        t.dependency, (d.stream == _M.stream) & (d.operator == _M.operator) & (d.first == _M.checkpoint)
    )
    done = (_M.stream == stream) & (d.checkpoint == checkpoint) & _M.manifest.is_not(None)
    query = select(t.materialization).select_from(joined).where(done).order_by(_M.operator, _M.ended_at)
    return list({row.operator: row for row in connection.execute(query)}.values())


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
