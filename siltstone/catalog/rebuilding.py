"""Rows of a stream in a catalog that is being rebuilt: what the ordinary operations cannot do again.

Everything else of a rebuild goes through them (`change.rebuild`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import func, insert, select, update

from siltstone.catalog import tables as t
from siltstone.catalog.checkpoints import find_newest
from siltstone.catalog.commits import CheckpointCommit, Committed, add_checkpoint
from siltstone.catalog.extracts import TABLES, Extract
from siltstone.catalog.limits import in_batches
from siltstone.catalog.steps import Step, StepRecord, step_values
from siltstone.catalog.transactions import CatalogPart

_AFTER = frozenset({t.checkpoint.name, t.savepoint.name, t.materialization.name})
"""tables whose rows refer to checkpoints, or are made again with them"""


class Rebuilding(CatalogPart):
    """A rebuild of streams, in a catalog that only it uses."""

    def begin(self, extract: Extract) -> None:
        """Make a stream with the rows of an extract, without its checkpoints, what refers to these, and steps."""
        with self._transactions.writing(f"stream {extract.stream}") as connection:
            for name, table in TABLES.items():
                if extract.rows[name] and name not in _AFTER:
                    connection.execute(insert(table), [dict(row) for row in extract.rows[name]])

    def set_epoch(self, stream: str, epoch: int) -> None:
        """Let `epoch` be the stream's writer epoch: that of what is recorded next."""
        with self._transactions.writing(f"stream {stream}") as connection:
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(epoch=epoch))

    def add_checkpoint(self, stream: str, epoch: int, commit: CheckpointCommit) -> Committed:
        """Add a checkpoint that an extract retains; those before it may be missing."""
        with self._transactions.writing(f"checkpoint {commit.id} of stream {stream}") as connection:
            before = find_newest(connection, stream, marked=True)
            return add_checkpoint(connection, stream, epoch, commit, before, self._transactions.time(connection))

    def add_bare_checkpoint(self, row: Mapping[str, Any]) -> None:
        """Add the row of a checkpoint whose manifest is gone; it is to be marked as deleted again."""
        with self._transactions.writing(f"checkpoint {row['id']}") as connection:
            connection.execute(insert(t.checkpoint), {**row, "deleted_at": None})

    def keep_open(self, stream: str, names: Iterable[str]) -> None:
        """Let the newest checkpoint need these objects, and those that build on it."""
        o = t.object_.c
        with self._transactions.writing(f"the objects of stream {stream}") as connection:
            for part in in_batches(names):
                connection.execute(update(t.object_).where(o.stream == stream, o.name.in_(part)).values(until=t.OPEN))

    def add_steps(self, stream: str, beginning: Step | None, steps: Iterable[StepRecord]) -> None:
        """Add the beginning of the input log, and the steps that no checkpoint has brought yet."""
        with self._transactions.writing(f"the input log of stream {stream}") as connection:
            s, place = t.step.c, {"stream": stream}
            there = set(connection.scalars(select(s.step).where(s.stream == stream)))
            new = {step.step: step for step in steps if step.step not in there}
            values = [place | {"checkpoint": step.checkpoint} | step_values(step) for step in new.values()]
            if beginning is not None:
                values.append(place | {"checkpoint": 0} | step_values(beginning))
            if values:
                connection.execute(insert(t.step), values)

    def add_savepoints(self, extract: Extract) -> None:
        """Add the savepoints of an extract."""
        rows = [dict(row) for row in extract.rows[t.savepoint.name]]
        with self._transactions.writing(f"the savepoints of stream {extract.stream}") as connection:
            if rows:
                connection.execute(insert(t.savepoint), rows)

    def count(self) -> dict[str, int]:
        """Return table -> its number of rows, of tables with what people know by name."""
        tables = (t.stream, t.checkpoint, t.object_, t.step, t.savepoint, t.materialization, t.rollback, t.output)
        with self._transactions.reading() as connection:
            return {table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables}
