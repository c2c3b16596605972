"""Chains: the checkpoints and materializations that a restore of a checkpoint reads."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, func, select

from siltstone.catalog import tables as t
from siltstone.catalog.checkpoints import find_newest, has_id, select_checkpoints, to_checkpoint, unknown_checkpoint
from siltstone.catalog.limits import ID_END
from siltstone.catalog.transactions import CatalogPart
from siltstone.model import Form, StoredObject

_M = t.materialization.c


class Chains(CatalogPart):
    """The chains of checkpoints."""

    def list_checkpoints(self, stream: str, id: int) -> list[int]:
        """List every checkpoint whose objects a restore of `id` may read, itself included; ids ascending.

        Earlier ones may be marked as deleted and kept for it; `id` itself may not.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.reading() as connection:
            return self._visible_chain(connection, stream, id)

    def list_manifests(self, stream: str, id: int) -> list[StoredObject]:
        """List the manifests that a restore of `id` reads, at one moment: those of every checkpoint of its chain,
        oldest first, and of the materializations that its chains begin with.

        Raises:
            UnknownCheckpoint: it does not exist or is marked as deleted.
        """
        with self._transactions.reading() as connection:
            chain = self._visible_chain(connection, stream, id)
            query = select_checkpoints(stream, marked=True).where(t.checkpoint.c.id.between(chain[0], id))
            manifests = [to_checkpoint(row).manifest for row in connection.execute(query)][::-1]
            begun = read_materializations(connection, stream, id)
            self._check_visible(connection, stream, id)
            return manifests + [StoredObject(m.manifest, m.manifest_bytes, m.manifest_checksum) for m in begun]

    def get_firsts(self, stream: str, id: int) -> dict[str, int]:
        """Return operator -> the checkpoint that its chain at checkpoint `id` now begins with."""
        with self._transactions.reading() as connection:
            return read_firsts(connection, stream, id)

    def _visible_chain(self, connection: Connection, stream: str, id: int) -> list[int]:
        chain = read_chain(connection, stream, id) if 0 < id < ID_END else []
        self._check_visible(connection, stream, id)
        return chain

    def _check_visible(self, connection: Connection, stream: str, id: int) -> None:
        """Check last that the checkpoint is not marked: then everything read before is complete."""
        if find_newest(connection, stream, has_id(id)) is None:
            raise unknown_checkpoint(connection, stream, f"no checkpoint {id}")


def read_chain(connection: Connection, stream: str, id: int) -> list[int]:
    """Return every checkpoint that a restore of `id` reads, itself included; ascending.

    All operators take part in every checkpoint, so a chain has no gaps.
    """
    d = t.dependency.c
    first = connection.scalar(select(func.min(d.first)).where(d.stream == stream, d.checkpoint == id))
    return list(range(id if first is None else first, id + 1))


def read_firsts(connection: Connection, stream: str, checkpoint: int) -> dict[str, int]:
    """Return operator -> the checkpoint that its chain at `checkpoint` begins with."""
    d = t.dependency.c
    found = connection.execute(select(d.operator, d.first).where(d.stream == stream, d.checkpoint == checkpoint))
    return {operator: first for operator, first in found}


def read_materializations(connection: Connection, stream: str, checkpoint: int) -> list[Row[Any]]:
    """Return the rows of the materializations that a restore of `checkpoint` begins with, at most one per operator."""
    d = t.dependency.c
    joined = t.materialization.join(
        t.dependency, (d.stream == _M.stream) & (d.operator == _M.operator) & (d.first == _M.checkpoint)
    )
    done = (_M.stream == stream) & (d.checkpoint == checkpoint) & _M.manifest.is_not(None)
    query = select(t.materialization).select_from(joined).where(done).order_by(_M.operator, _M.ended_at)
    return list({row.operator: row for row in connection.execute(query)}.values())


def follow_chains(
    connection: Connection, stream: str, before: Row[Any] | None, forms: Mapping[str, Form], first: Mapping[str, int]
) -> dict[str, int]:
    """Return where the chains of a new checkpoint begin: for a delta, where the chain of `before` now begins."""
    if before is None:
        return dict(first)
    begins = read_firsts(connection, stream, before.id)
    return {
        operator: max(said, begins.get(operator, said)) if Form(forms.get(operator, Form.BASE)) is Form.DELTA else said
        for operator, said in first.items()
    }
