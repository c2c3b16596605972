"""Definitions: the stream definition under which each checkpoint was made.

A definition is recorded with the first checkpoint made under it, in the same transaction, and applies until the next
one. So a run that completes no checkpoint records none, and giving checkpoints up gives up their definitions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records.streams import get_stream


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """The definition of the checkpoints from `checkpoint` on, until the next record; `dropped` was given up with it."""

    stream: str
    checkpoint: int
    definition: dict[str, Any]
    dropped: tuple[str, ...]
    recorded_at: datetime


class Definitions(CatalogPart):
    """The definitions under which checkpoints were made."""

    def get(self, stream: str, checkpoint: int) -> dict[str, Any]:
        """Return the definition (JSON) under which a checkpoint was made.

        Raises:
            UnknownStream: the stream does not exist.
        """
        with self._transactions.begin_read() as connection:
            return definition_at(connection, stream, checkpoint)

    def list(self, stream: str) -> list[DefinitionRecord]:
        """List all definitions under which checkpoints were made, oldest first.

        Raises:
            UnknownStream: the stream does not exist.
        """
        d = t.definition.c
        query = select(t.definition).where(d.stream == stream).order_by(d.checkpoint)
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return [_record(row) for row in connection.execute(query).mappings()]


def definition_at(connection: Connection, stream: str, checkpoint: int) -> dict[str, Any]:
    """Return the definition under which a checkpoint was made; the stream's newest if none is recorded that early."""
    d = t.definition.c
    query = select(t.definition).where(d.stream == stream, d.checkpoint <= checkpoint)
    found = connection.execute(query.order_by(d.checkpoint.desc()).limit(1)).mappings().first()
    return get_stream(connection, stream).definition if found is None else _record(found).definition


def record_definition(
    connection: Connection,
    stream: str,
    checkpoint: int,
    definition: Mapping[str, Any],
    dropped: Sequence[str],
    now: datetime,
) -> None:
    """Record the definition that a checkpoint is the first to be made under."""
    record = DefinitionRecord(stream, checkpoint, dict(definition), tuple(dropped), now)
    connection.execute(insert(t.definition), asdict(record) | {"dropped": list(record.dropped)})
    _set(connection, stream, record.definition)


def forget_definitions(connection: Connection, stream: str, checkpoint: int) -> None:
    """Forget the definitions of checkpoints after `checkpoint`, which are given up; the stream's is then that one's."""
    d = t.definition.c
    connection.execute(delete(t.definition).where(d.stream == stream, d.checkpoint > checkpoint))
    _set(connection, stream, definition_at(connection, stream, checkpoint))


def _set(connection: Connection, stream: str, definition: Mapping[str, Any]) -> None:
    connection.execute(update(t.stream).where(t.stream.c.name == stream).values(definition=dict(definition)))


def _record(row: Mapping[Any, Any]) -> DefinitionRecord:
    return DefinitionRecord(**{**row, "dropped": tuple(row["dropped"])})
