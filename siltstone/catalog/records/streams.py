"""Streams: their names, definitions and retention."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy import exc as sa

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.errors import SchemaConflict, UsageError
from siltstone.model import MAX_MAX_PARALLELISM, check_name

TABLE = "table"
"""the default sink of streams that begin now"""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream in the catalog. `epoch` is its newest writer epoch, 0 before the first run.

    `parallelism`, if set, is used by runs that do not name one. A fork began as a copy of checkpoint `forked_at` of the
    stream `forked_from`. `retention` are its rules (`retention.retention_rules`); None keeps everything. Sinks know a
    new checkpoint by its id plus `sink_offset` (`catalog.outbox`). `extracts` counts its extracts (`catalog.extracts`).
    `default_sink` is the kind of sink of operators whose definition names none; None means Parquet files.
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
    extracts: int = 0
    default_sink: str | None = None

    @property
    def incarnation(self) -> str:
        """When it began (UTC), which tells it from another stream that had its name before: `20260131T120000000000`."""
        return self.created_at.strftime("%Y%m%dT%H%M%S%f")


class Streams(CatalogPart):
    """The streams of the catalog."""

    def register(
        self,
        stream: str,
        max_parallelism: int,
        definition: Mapping[str, Any],
        retention: Mapping[str, Any] | None = None,
    ) -> StreamRecord:
        """Return the stream of this name; create it with this definition and retention (JSON) if it is new.

        Raises:
            SchemaConflict: it is recorded with another `max_parallelism`.
            UsageError: the name is not valid, or `max_parallelism` is out of range.
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
            "default_sink": TABLE,
        }
        with self._transactions.begin_write(f"stream {stream}") as connection:
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
                f"it is fixed at creation",
                advice=f"keep {found.max_parallelism} or give the stream a new name",
            )
        return found

    def set_retention(self, stream: str, retention: Mapping[str, Any] | None) -> StreamRecord:
        """Replace a stream's recorded retention; None keeps everything. A current run picks it up.

        Raises:
            UnknownStream: the stream does not exist.
        """
        with self._transactions.begin_write(f"the retention of stream {stream}") as connection:
            fencing.lock(connection, stream)
            kept = None if retention is None else dict(retention)
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(retention=kept))
            return get_stream(connection, stream)

    def get(self, name: str) -> StreamRecord:
        """Return one stream.

        Raises:
            UnknownStream: it does not exist; the message lists those that do.
        """
        check_name("stream", name)
        with self._transactions.begin_read() as connection:
            return get_stream(connection, name)

    def list(self) -> list[StreamRecord]:
        """List all streams, by name."""
        with self._transactions.begin_read() as connection:
            found = connection.execute(select(t.stream).order_by(t.stream.c.name))
            return [StreamRecord(**row) for row in found.mappings()]


def find_stream(connection: Connection, name: str) -> StreamRecord | None:
    """Return one stream, None if it is not recorded."""
    row = connection.execute(select(t.stream).where(t.stream.c.name == name)).mappings().first()
    return StreamRecord(**row) if row else None


def get_stream(connection: Connection, name: str) -> StreamRecord:
    """Return one stream.

    Raises:
        UnknownStream: it does not exist; the message lists those that do.
    """
    found = find_stream(connection, name)
    if found is None:
        raise fencing.unknown_stream_error(connection, name)
    return found
