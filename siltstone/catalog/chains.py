"""Chains: what a restore of a checkpoint reads."""

from sqlalchemy import Connection, select

from siltstone.catalog import tables as t
from siltstone.catalog.checkpoints import find_newest, has_id, unknown_checkpoint
from siltstone.catalog.limits import ID_END
from siltstone.catalog.objects import ObjectKind, ObjectRecord, needed_by, read_needed
from siltstone.catalog.transactions import CatalogPart
from siltstone.model import StoredObject
from siltstone.store.paths import is_materialization_manifest


class Chains(CatalogPart):
    """The chains of checkpoints."""

    def list_objects(self, stream: str, id: int) -> list[ObjectRecord]:
        """List every object that a restore of checkpoint `id` needs, by checkpoint and name.

        Checkpoints that wrote them may be marked as deleted and kept for it; `id` itself may not.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.reading() as connection:
            needed = read_needed(connection, stream, id) if 0 < id < ID_END else []
            _check_visible(connection, stream, id)
            return needed

    def list_manifests(self, stream: str, id: int) -> list[StoredObject]:
        """List the manifests that a restore of `id` reads, at one moment: those of checkpoints, oldest first, and then
        those of the materializations that its chains begin with.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.reading() as connection:
            manifests = read_manifests(connection, stream, id) if 0 < id < ID_END else []
            _check_visible(connection, stream, id)
            return manifests

    def list_manifests_before(self, stream: str, id: int, operator: str) -> list[StoredObject]:
        """List the manifests that a restore of `id` read before an operator was materialized there.

        What the checkpoint before it needed may have been deleted since, so some may be missing.
        """
        m = t.materialization.c
        with self._transactions.reading() as connection:
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


def _check_visible(connection: Connection, stream: str, id: int) -> None:
    """Check last that the checkpoint is not marked: then everything read before is complete."""
    if find_newest(connection, stream, has_id(id)) is None:
        raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")


def read_manifests(
    connection: Connection, stream: str, checkpoint: int, since: int | None = None
) -> list[StoredObject]:
    """Return the manifests that a restore of a checkpoint reads (`Chains.list_manifests`), or of those from `since` on.

    The digest of a checkpoint's manifest is the catalog's, to compare with what it holds.
    """
    c = t.checkpoint.c
    c, o = t.checkpoint.c, t.object_.c
    manifest = (o.kind == ObjectKind.MANIFEST) | (o.kind == ObjectKind.MATERIALIZATION)
    query = select(o.name, o.bytes, o.checksum, o.kind, c.digest).where(o.stream == stream, manifest)
    query = query.where(needed_by(checkpoint, since)).join(
        t.checkpoint, (c.stream == o.stream) & (c.id == o.checkpoint)
    )
    written, materialized = [], []
    for name, size, checksum, kind, digest in connection.execute(query.order_by(o.checkpoint, o.name)):
        if kind == ObjectKind.MANIFEST:
            written.append(StoredObject(name, size, checksum, digest=digest))
        elif is_materialization_manifest(name):
            materialized.append(StoredObject(name, size, checksum))
    return written + materialized
