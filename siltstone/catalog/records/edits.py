"""Edits: changes that people made to the state by hand."""

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import select

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.streams import get_stream


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one variable's rows by hand: how many rows were put, and how many existing ones were deleted.

    `source` says where the rows came from; for a file, `source_checksum` is its checksum (`store.checksums`).
    """

    operator: str
    variable: str
    upserts: int
    deletes: int
    source: str
    source_checksum: str | None
    who: str


@dataclass(frozen=True, slots=True)
class EditRecord(Edit):
    """A recorded edit: the difference between a checkpoint, which `epoch` wrote, and the previous one."""

    stream: str = field(kw_only=True)
    checkpoint: int = field(kw_only=True)
    epoch: int = field(kw_only=True)
    edited_at: datetime = field(kw_only=True)


class Edits(CatalogPart):
    """The edits that are part of checkpoints."""

    def list(self, stream: str) -> list[EditRecord]:
        """List the edits by hand, oldest checkpoint first. Includes those of deleted checkpoints."""
        e = t.edit.c
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            found = connection.execute(select(t.edit).where(e.stream == stream).order_by(e.checkpoint, e.epoch))
            return [EditRecord(**row) for row in found.mappings()]
