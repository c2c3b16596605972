"""The part of the catalog that knows streams, their definitions, and the runs that wrote to them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import exc as sa
from sqlalchemy import insert, select, update

from siltstone.catalog import fencing, rows
from siltstone.catalog import tables as t
from siltstone.catalog.records import RunRecord, StreamRecord
from siltstone.catalog.transactions import Transactions
from siltstone.errors import SchemaConflict, UsageError
from siltstone.model import MAX_MAX_PARALLELISM, check_name


class Streams(Transactions):
    """Streams and their runs."""

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
        with self._writing(f"stream {stream}") as connection:
            found = rows.find_stream(connection, stream)
            if found is None:
                try:
                    with connection.begin_nested():
                        connection.execute(insert(t.stream), values | {"created_at": self._time(connection)})
                except sa.IntegrityError:  # another process was first
                    pass
                found = rows.get_stream(connection, stream)
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
        with self._writing(f"the retention of stream {stream}") as connection:
            fencing.lock(connection, stream)
            kept = None if retention is None else dict(retention)
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(retention=kept))
            return rows.get_stream(connection, stream)

    def stream(self, name: str) -> StreamRecord:
        """One stream.

        Raises:
            UnknownStream: lists the streams there are.
        """
        check_name("stream", name)
        with self._reading() as connection:
            return rows.get_stream(connection, name)

    def streams(self) -> list[StreamRecord]:
        """All streams, by name."""
        with self._reading() as connection:
            found = connection.execute(select(t.stream).order_by(t.stream.c.name))
            return [StreamRecord(**row) for row in found.mappings()]

    def new_epoch(self, stream: str, who: str) -> int:
        """Take the stream over: begin its next writer epoch, which fences older ones.

        For runs and recoveries, `catalog.epochs.begin_epoch` does this, and marks it in the store.
        """
        with self._writing(f"a run of stream {stream}") as connection:
            return fencing.take_over(connection, stream, who, self._time(connection))

    def superseded(self, stream: str, epoch: int) -> list[RunRecord]:
        """The runs of a stream that had not ended when `epoch` began, and are fenced by it."""
        r = t.run.c
        fenced = (r.stream == stream) & (r.epoch < epoch) & (r.outcome == fencing.superseded_by(epoch))
        with self._reading() as connection:
            found = connection.execute(select(t.run).where(fenced).order_by(r.epoch))
            return [RunRecord(**row) for row in found.mappings()]

    def end_epoch(self, stream: str, epoch: int, outcome: str) -> None:
        """Note how a run ended; one that has ended already (superseded, say) stays as it is."""
        with self._writing(f"the end of a run of stream {stream}") as connection:
            rows.get_stream(connection, stream)
            fencing.end(connection, stream, epoch, outcome, self._time(connection))

    def check_epoch(self, stream: str, epoch: int) -> None:
        """Make sure that `epoch` is the newest writer of the stream.

        Raises:
            Fenced
        """
        with self._reading() as connection:
            fencing.hold(connection, stream, epoch)

    def running(self, stream: str) -> bool:
        """Whether a run is open: its newest writer epoch has not ended. One that was killed has not, either."""
        r = t.run.c
        newest = select(r.ended_at).where(r.stream == stream).order_by(r.epoch.desc()).limit(1)
        with self._reading() as connection:
            found = connection.execute(newest).first()
            return found is not None and found.ended_at is None

    def runs(self, stream: str) -> list[RunRecord]:
        """All writer epochs of a stream, oldest first."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            found = connection.execute(select(t.run).where(t.run.c.stream == stream).order_by(t.run.c.epoch))
            return [RunRecord(**row) for row in found.mappings()]
