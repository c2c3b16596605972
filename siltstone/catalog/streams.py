"""Streams: their names, what they are defined as and what they keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy import exc as sa

from siltstone.catalog import fencing
from siltstone.catalog import tables as t
from siltstone.catalog.transactions import CatalogPart
from siltstone.errors import SchemaConflict, UsageError
from siltstone.model import MAX_MAX_PARALLELISM, check_name


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream the catalog knows. `epoch` is its newest writer epoch, 0 before the first run.

    `parallelism` is that of runs that name none, where it was set. A fork began as a copy of checkpoint `forked_at` of
    the stream `forked_from`. `retention` is what it keeps (`retention.retention_rules`): None, everything. Sinks know a
    new checkpoint by its id plus `sink_offset` (`catalog.outbox`).
    """

    name: str
    max_parallelism: int
    definition: dict[str, Any]
    epoch: int
    created_at: datetime
    parallelism: int | None = None
    forked_from: str | None = None
    forked_at: int | None = None
    retention: dict[str, Any] | None = None
    sink_offset: int = 0


class Streams(CatalogPart):
    """The streams of the catalog."""

    def register(
        self,
        stream: str,
        max_parallelism: int,
        definition: Mapping[str, Any],
        retention: Mapping[str, Any] | None = None,
    ) -> StreamRecord:
        """The stream of that name, created with this definition and retention (JSON) where it is new.

        Raises:
            SchemaConflict: it is recorded with another `max_parallelism`.
            UsageError: not a stream's name, or a `max_parallelism` out of range.
        """
        check_name("stream", stream)
        if not 1 <= max_parallelism <= MAX_MAX_PARALLELISM:
            raise UsageError(f"max_parallelism {max_parallelism} is out of range: use 1 to {MAX_MAX_PARALLELISM}")
        values = {
            "name": stream,
            "max_parallelism": max_parallelism,
            "definition": dict(definition),
            "epoch": 0,
            "retention": None if retention is None else dict(retention),
        }
        with self._transactions.writing(f"stream {stream}") as connection:
            found = find_stream(connection, stream)
            if found is None:
                try:
                    with connection.begin_nested():
                        connection.execute(
                            insert(t.stream), values | {"created_at": self._transactions.time(connection)}
                        )
                except sa.IntegrityError:  # another process was first
                    pass
                found = get_stream(connection, stream)
        if found.max_parallelism != max_parallelism:
            raise SchemaConflict(
                f"stream {stream} has max_parallelism {found.max_parallelism}, now {max_parallelism}: "
                f"it is fixed at creation; keep {found.max_parallelism} or give the stream a new name"
            )
        return found

    def set_retention(self, stream: str, retention: Mapping[str, Any] | None) -> StreamRecord:
        """Replace what a stream keeps, as recorded with it; everything, for None. A run takes it up by itself.

        Raises:
            UnknownStream
        """
        with self._transactions.writing(f"the retention of stream {stream}") as connection:
            fencing.lock(connection, stream)
            kept = None if retention is None else dict(retention)
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(retention=kept))
            return get_stream(connection, stream)

    def get(self, name: str) -> StreamRecord:
        """One stream.

        Raises:
            UnknownStream: lists the streams there are.
        """
        check_name("stream", name)
        with self._transactions.reading() as connection:
            return get_stream(connection, name)

    def list(self) -> list[StreamRecord]:
        """All streams, by name."""
        with self._transactions.reading() as connection:
            found = connection.execute(select(t.stream).order_by(t.stream.c.name))
            return [StreamRecord(**row) for row in found.mappings()]


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
        raise fencing.unknown_stream(connection, name)
    return found
