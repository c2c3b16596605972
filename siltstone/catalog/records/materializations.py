"""Materializations: bases, made in the background, that chains begin with.

A materialization at a checkpoint makes every chain through that checkpoint begin there. Completing it shortens the
intervals of what it replaces (`catalog.objects`): the checkpoints from its own on read its bases instead.

It runs under a lease of the same id (`catalog.leases`), which protects what it reads and writes. At most one runs per
operator: the next may begin when it has ended, or its lease has.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.column_types import UtcTime
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, unknown_checkpoint_error
from siltstone.catalog.records.leases import read_leases
from siltstone.catalog.records.objects import ObjectKind, close_objects, insert_objects, read_needed, read_objects
from siltstone.catalog.records.streams import get_stream
from siltstone.catalog.records.tombstones import RECORDS_KEPT
from siltstone.errors import Fenced, UsageError
from siltstone.model import StoredObject
from siltstone.store.paths import check_object_name, is_materialization_manifest, materialization_of

_M = t.materialization.c


@dataclass(frozen=True, slots=True)
class MaterializationRecord:
    """A materialization of one operator at one checkpoint: running, done (`manifest` is set) or failed (`error` is).

    `id` is also the id of its lease, and part of its objects' names. `rows` and `bytes` are those of its bases;
    `seconds` is its duration.
    """

    stream: str
    id: str
    operator: str
    checkpoint: int
    who: str
    began_at: datetime
    ended_at: datetime | None = None
    error: str | None = None
    manifest: StoredObject | None = None
    rows: int | None = None
    bytes: int | None = None
    seconds: float | None = None

    @property
    def outcome(self) -> str:
        """`running`, `done` or `failed`."""
        return "running" if self.ended_at is None else "done" if self.manifest else "failed"


class Materializations(CatalogPart):
    """Materializations of operators."""

    def begin(self, stream: str, operator: str, checkpoint: int, *, id: str, who: str) -> None:
        """Begin to materialize one operator at a checkpoint, under the lease `id`.

        Raises:
            UsageError: another process is at it, or the checkpoint has no such operator.
            UnknownCheckpoint: the checkpoint does not exist.
        """
        with self._transactions.begin_write(f"a materialization of stream {stream}") as connection:
            fencing.lock(connection, stream)
            self._refuse_second(connection, stream, operator)
            at = find_newest(connection, stream, t.checkpoint.c.id == checkpoint)
            if at is None:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {checkpoint}")
            if operator not in at.forms:
                known = ", ".join(sorted(at.forms)) or "none"
                raise UsageError(
                    f"checkpoint {checkpoint} of stream {stream} has no operator {operator!r}: it has {known}"
                )
            self._forget_old(connection, stream, operator)
            values = {"stream": stream, "id": id, "operator": operator, "checkpoint": checkpoint, "who": who}
            connection.execute(insert(t.materialization), values | {"began_at": self._transactions.time(connection)})

    def _forget_old(self, connection: Connection, stream: str, operator: str) -> None:
        """Remove old materializations at checkpoints that are gone; the newest completed one always stays."""
        mine = (_M.stream == stream) & (_M.operator == operator)
        newest = select(func.max(_M.ended_at)).where(mine, _M.manifest.is_not(None)).scalar_subquery()
        there = select(t.checkpoint.c.id).where(t.checkpoint.c.stream == stream)
        old = mine & (_M.ended_at < self._transactions.time(connection) - RECORDS_KEPT) & _M.checkpoint.not_in(there)
        connection.execute(delete(t.materialization).where(old, _M.manifest.is_(None) | (_M.ended_at < newest)))

    def _refuse_second(self, connection: Connection, stream: str, operator: str) -> None:
        running = (_M.stream == stream) & (_M.operator == operator) & _M.ended_at.is_(None)
        live = {lease.id for lease in read_leases(connection, stream, self._transactions.time(connection))}
        for row in connection.execute(select(t.materialization).where(running)).all():
            if row.id in live:
                raise UsageError(
                    f"operator {operator} of stream {stream} is being materialized at checkpoint {row.checkpoint} by "
                    f"{row.who}, since {row.began_at.isoformat(timespec='seconds')}: wait for that"
                )
            died = {"ended_at": self._transactions.time(connection), "error": "its process died or hung too long"}
            connection.execute(update(t.materialization).where(running, _M.id == row.id).values(died))

    def complete(
        self,
        stream: str,
        id: str,
        manifest: StoredObject,
        objects: Sequence[StoredObject],
        replaced: Collection[str],
        unneeded: Collection[str],
        *,
        rows_: int,
        bytes_: int,
        seconds: float,
    ) -> None:
        """Make every chain through its checkpoint begin with the new bases, in one transaction guarded by the lease.

        Args:
            replaced: names of the objects that held what the bases replace. The bases are needed as long as these were.
            unneeded: names of the objects that no checkpoint from its own on reads any more (`restore.live_rules`).

        Raises:
            Fenced: the lease was lost; nothing changed.
            UnknownCheckpoint: its checkpoint is gone.
        """
        for stored in (manifest, *objects):
            check_object_name(stored.name)
        with self._transactions.begin_write(f"a materialization of stream {stream}") as connection:
            fencing.lock(connection, stream)
            place = (_M.stream == stream) & (_M.id == id)
            begun = connection.execute(select(t.materialization).where(place, _M.ended_at.is_(None))).first()
            if begun is None or id not in {
                lease.id for lease in read_leases(connection, stream, self._transactions.time(connection))
            }:
                raise Fenced(
                    f"materialization {id} of stream {stream} has lost its lease: another may have begun; run it again"
                )
            at = find_newest(connection, stream, t.checkpoint.c.id == begun.checkpoint, marked=True)
            if at is None:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {begun.checkpoint} any more")
            said = {
                "manifest": manifest.name,
                "manifest_bytes": manifest.bytes,
                "manifest_checksum": manifest.checksum,
                "ended_at": self._transactions.time(connection),
                "rows": rows_,
                "bytes": bytes_,
                "seconds": seconds,
            }
            connection.execute(update(t.materialization).where(place).values(said))
            before = self._take_replaced(connection, begun)
            until = max(before, _last_needing(connection, stream, replaced, begun.checkpoint))
            kinds = [(ObjectKind.MATERIALIZATION, stored) for stored in (manifest, *objects)]
            insert_objects(connection, stream, at.epoch, begun.checkpoint, kinds, until)
            newest = find_newest(connection, stream)
            for last in (begun.checkpoint - 1, begun.checkpoint):  # what its own checkpoint wrote stays with that
                close_objects(connection, stream, last, names=unneeded, replaced_at=newest.id if newest else 0)

    def _take_replaced(self, connection: Connection, begun: Row[Any]) -> int:
        """Remove the objects of earlier materializations of the operator at the same checkpoint; sweeps delete them.

        Returns the last checkpoint that needed any of them, 0 if there is none.
        """
        stream, mine = begun.stream, (_M.operator == begun.operator) & (_M.checkpoint == begun.checkpoint)
        older = select(_M.id).where(_M.stream == stream, mine, _M.id != begun.id)
        ids = set(connection.scalars(older))
        written = read_objects(connection, stream, [begun.checkpoint]) if ids else []
        theirs = [stored for stored in written if materialization_of(stored.name) in ids]
        for part in in_batches(stored.name for stored in theirs):
            o = t.object_.c
            connection.execute(delete(t.object_).where(o.stream == stream, o.name.in_(part)))
        return max((stored.until for stored in theirs), default=0)

    def fail(self, stream: str, id: str, error: str) -> None:
        """Record why a materialization failed; one that has already ended stays as it is."""
        with self._transactions.begin_write(f"a materialization of stream {stream}") as connection:
            mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
            failed = {"ended_at": self._transactions.time(connection), "error": error}
            connection.execute(update(t.materialization).where(mine).values(failed))

    def get_last_completed(self, stream: str) -> dict[str, datetime]:
        """Return operator -> when its newest materialization was completed."""
        done = (_M.stream == stream) & _M.manifest.is_not(None)
        query = select(_M.operator, func.max(_M.ended_at, type_=UtcTime())).where(done).group_by(_M.operator)
        with self._transactions.begin_read() as connection:
            return {operator: ended for operator, ended in connection.execute(query)}

    def count_failed(self, stream: str, operator: str, since: datetime) -> tuple[int, MaterializationRecord | None]:
        """Count one operator's failed materializations that began at `since` or later; return also the last of them."""
        failed = (_M.stream == stream) & (_M.operator == operator) & _M.error.is_not(None) & (_M.began_at >= since)
        with self._transactions.begin_read() as connection:
            count = connection.scalar(select(func.count()).where(failed)) or 0
            query = select(t.materialization).where(failed).order_by(_M.ended_at.desc(), _M.id).limit(1)
            last = connection.execute(query).first() if count else None
            return count, None if last is None else _record(last)

    def abandon(self, stream: str, id: str) -> None:
        """Forget a materialization that is no longer wanted, which is not a failure. One that has ended stays."""
        with self._transactions.begin_write(f"a materialization of stream {stream}") as connection:
            mine = (_M.stream == stream) & (_M.id == id) & _M.ended_at.is_(None)
            connection.execute(delete(t.materialization).where(mine))

    def list_in_chain(self, stream: str, id: int) -> list[MaterializationRecord]:
        """List those whose bases a restore of checkpoint `id` begins with: of one operator, the oldest first.

        An operator has several if a later one left out tables that had not changed since.
        """
        with self._transactions.begin_read() as connection:
            return [_record(row) for row in _read_needed(connection, stream, id)]

    def list(self, stream: str) -> list[MaterializationRecord]:
        """List all materializations of a stream, oldest first."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            query = select(t.materialization).where(_M.stream == stream).order_by(_M.began_at, _M.id)
            return [_record(row) for row in connection.execute(query)]


def _read_needed(connection: Connection, stream: str, checkpoint: int) -> list[Row[Any]]:
    """Return the materializations that a restore of the checkpoint begins with."""
    needed = read_needed(connection, stream, checkpoint)
    names = [stored.name for stored in needed if is_materialization_manifest(stored.name)]
    query = select(t.materialization).where(_M.stream == stream)
    found = [row for part in in_batches(names) for row in connection.execute(query.where(_M.manifest.in_(part)))]
    return sorted(found, key=lambda row: (row.operator, row.checkpoint))


def _last_needing(connection: Connection, stream: str, names: Collection[str], least: int) -> int:
    """Return the last checkpoint that needs any of these objects, at least `least`."""
    o = t.object_.c
    last = select(func.max(o.until)).where(o.stream == stream)
    return max([least, *(connection.scalar(last.where(o.name.in_(part))) or 0 for part in in_batches(names))])


def _record(row: Row[Any]) -> MaterializationRecord:
    values = dict(row._mapping)
    name, size, checksum = (values.pop(key) for key in ("manifest", "manifest_bytes", "manifest_checksum"))
    return MaterializationRecord(**values, manifest=StoredObject(name, size, checksum) if name else None)
