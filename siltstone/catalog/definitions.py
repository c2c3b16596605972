"""Definitions: what each checkpoint was made under.

A definition is recorded with the first checkpoint made under it, in the same transaction, and holds for those after it
until the next one. So a run that completes no checkpoint leaves none, and what gives checkpoints up gives up theirs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, delete, insert, select, update

from siltstone.catalog import tables as t
from siltstone.catalog.streams import get_stream
from siltstone.catalog.transactions import CatalogPart

if TYPE_CHECKING:
    from siltstone.catalog.commits import CheckpointCommit


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """What the checkpoints from `checkpoint` on were made under, until the next record; fields as in
    `CheckpointCommit`."""

    stream: str
    checkpoint: int
    definition: dict[str, Any]
    dropped: tuple[str, ...]
    recorded_at: datetime


class Definitions(CatalogPart):
    """What the checkpoints of streams were made under."""

    def get(self, stream: str, checkpoint: int) -> dict[str, Any]:
        """The definition (JSON) that a checkpoint was made under.

        Raises:
            UnknownStream
        """
        with self._transactions.reading() as connection:
            return definition_at(connection, stream, checkpoint)

    def list(self, stream: str) -> list[DefinitionRecord]:
        """All definitions that checkpoints were made under, oldest first.

        Raises:
            UnknownStream
        """
        d = t.definition.c
        query = select(t.definition).where(d.stream == stream).order_by(d.checkpoint)
        with self._transactions.reading() as connection:
            get_stream(connection, stream)
            return [_record(row) for row in connection.execute(query).mappings()]


def definition_at(connection: Connection, stream: str, checkpoint: int) -> dict[str, Any]:
    """See `Definitions.get`; the stream's newest where none is recorded that early."""
    d = t.definition.c
    query = select(t.definition).where(d.stream == stream, d.checkpoint <= checkpoint)
    found = connection.execute(query.order_by(d.checkpoint.desc()).limit(1)).mappings().first()
    return get_stream(connection, stream).definition if found is None else _record(found).definition


def record_definition(connection: Connection, stream: str, commit: "CheckpointCommit", now: datetime) -> None:
    """Record what a checkpoint is the first to be made under, if it is the first."""
    if commit.definition is None:
        return
    record = DefinitionRecord(stream, commit.id, dict(commit.definition), tuple(commit.dropped), now)
    connection.execute(insert(t.definition), asdict(record) | {"dropped": list(record.dropped)})
    _set(connection, stream, record.definition)


def forget_definitions(connection: Connection, stream: str, checkpoint: int) -> None:
    """Checkpoints after `checkpoint` are given up: the stream is defined as that one is."""
    d = t.definition.c
    connection.execute(delete(t.definition).where(d.stream == stream, d.checkpoint > checkpoint))
    _set(connection, stream, definition_at(connection, stream, checkpoint))


def _set(connection: Connection, stream: str, definition: Mapping[str, Any]) -> None:
    connection.execute(update(t.stream).where(t.stream.c.name == stream).values(definition=dict(definition)))


def _record(row: Mapping[Any, Any]) -> DefinitionRecord:
    return DefinitionRecord(**{**row, "dropped": tuple(row["dropped"])})
