"""Chains: what a restore of a checkpoint reads."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END, in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.checkpoints import unknown_checkpoint_error
from siltstone.catalog.records.objects import ObjectKind, ObjectRecord, needed_by, read_needed
from siltstone.model import StoredObject
from siltstone.store.paths import is_materialization_manifest


@dataclass(frozen=True, slots=True)
class Chain:
    """What the catalog lists for a restore of one checkpoint: the manifests that it reads (`Chains.list_manifests`),
    and the names of all objects that it needs (`Chains.list_objects`)."""

    manifests: list[StoredObject]
    names: frozenset[str]


class Chains(CatalogPart):
    """The chains of checkpoints."""

    def list_many(self, stream: str, ids: Collection[int]) -> dict[int, Chain]:
        """List the chains of several checkpoints, all at one moment.

        Raises:
            UnknownCheckpoint: one of them does not exist or is marked as deleted.
        """
        ordered = sorted(id for id in ids if 0 < id < ID_END)
        listed: dict[int, list[Row[Any]]] = {id: [] for id in ordered}
        with self._transactions.begin_read() as connection:
            if ordered:
                wanted = needed_by(ordered[-1], ordered[0]), t.object_.c.kind != ObjectKind.REFERENCE_COPY
                for row in _read(connection, stream, *wanted):
                    for id in ordered[bisect_left(ordered, row.checkpoint) : bisect_right(ordered, row.until)]:
                        listed[id].append(row)
            _check_visible(connection, stream, ids)
        return {id: Chain(_manifests(rows), frozenset(row.name for row in rows)) for id, rows in listed.items()}

    def list_objects(self, stream: str, id: int) -> list[ObjectRecord]:
        """List every object that a restore of checkpoint `id` needs, by checkpoint and name.

        They may be written by earlier checkpoints that are marked as deleted; `id` itself may not be marked.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.begin_read() as connection:
            needed = read_needed(connection, stream, id) if 0 < id < ID_END else []
            _check_visible(connection, stream, [id])
            return needed

    def list_manifests(self, stream: str, id: int) -> list[StoredObject]:
        """List the manifests that a restore of `id` reads, at one moment: those of checkpoints, oldest first, and then
        those of the materializations that its chains begin with.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.begin_read() as connection:
            manifests = read_manifests(connection, stream, id) if 0 < id < ID_END else []
            _check_visible(connection, stream, [id])
            return manifests

    def list_manifests_before(self, stream: str, id: int, operator: str) -> list[StoredObject]:
        """List the manifests that a restore of `id` read before an operator was materialized there.

        What the checkpoint before it needed may have been deleted since, so some may be missing.
        """
        m = t.materialization.c
        with self._transactions.begin_read() as connection:
            there = (m.stream == stream) & (m.operator == operator) & (m.checkpoint == id)
            later = set(connection.scalars(select(m.manifest).where(there)))
            # An object that the checkpoint needed is its own, or the one before needed it, too.
            return [stored for stored in read_manifests(connection, stream, id, id - 1) if stored.name not in later]

    def list_checkpoints(self, stream: str, id: int) -> list[int]:
        """List every checkpoint that a restore of `id` reads from, itself included; ids ascending.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        return sorted({stored.checkpoint for stored in self.list_objects(stream, id)})


def _check_visible(connection: Connection, stream: str, ids: Collection[int]) -> None:
    """Check last that no checkpoint is marked: then everything read before is complete."""
    c = t.checkpoint.c
    visible = select(c.id).where(c.stream == stream, c.deleted_at.is_(None))
    known = in_batches(id for id in ids if 0 < id < ID_END)
    there = {id for part in known for id in connection.scalars(visible.where(c.id.in_(part)))}
    if missing := set(ids) - there:
        raise unknown_checkpoint_error(connection, stream, f"no checkpoint {min(missing)}")


def read_manifests(
    connection: Connection, stream: str, checkpoint: int, since: int | None = None
) -> list[StoredObject]:
    """Return the manifests that a restore of a checkpoint reads (`Chains.list_manifests`), or of those from `since` on.

    A checkpoint's manifest has the digest in the catalog, to compare with the one it holds.
    """
    kind = t.object_.c.kind
    manifest = (kind == ObjectKind.MANIFEST) | (kind == ObjectKind.MATERIALIZATION)
    return _manifests(_read(connection, stream, needed_by(checkpoint, since), manifest))


def _read(connection: Connection, stream: str, *where: ColumnElement[bool]) -> list[Row[Any]]:
    """Return rows of objects, each with the digest of the checkpoint that wrote it, by checkpoint and name."""
    c, o = t.checkpoint.c, t.object_.c
    columns: list[ColumnElement[Any]] = [o.name, o.bytes, o.checksum, o.kind, o.checkpoint, o.until, c.digest]
    query = select(*columns).where(o.stream == stream, *where)
    query = query.join(t.checkpoint, (c.stream == o.stream) & (c.id == o.checkpoint))
    return list(connection.execute(query.order_by(o.checkpoint, o.name)))


def _manifests(rows: Iterable[Row[Any]]) -> list[StoredObject]:
    """Return the manifests among objects: those of checkpoints, and then those of materializations."""
    written, materialized = [], []
    for row in rows:
        if row.kind == ObjectKind.MANIFEST:
            written.append(StoredObject(row.name, row.bytes, row.checksum, digest=row.digest))
        elif is_materialization_manifest(row.name):
            materialized.append(StoredObject(row.name, row.bytes, row.checksum))
    return written + materialized
