"""Rows of a stream in a catalog that is being rebuilt: what the ordinary operations cannot do again.

Everything else of a rebuild goes through them (`run.rebuild_stream`). A stream of a catalog in use, which has lost what
the store knows, is rebuilt in a draft, whose rows then replace its own in one transaction.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import in_batches
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest
from siltstone.catalog.records.commits import CheckpointCommit, Committed, add_checkpoint
from siltstone.catalog.records.extracts import TABLES, Extract
from siltstone.catalog.records.steps import Step, StepRecord, step_values
from siltstone.catalog.records.streams import StreamRecord, get_stream
from siltstone.catalog.repository import Catalog

_AFTER = frozenset({t.checkpoint.name, t.savepoint.name, t.materialization.name})
"""tables whose rows refer to checkpoints, or are made again with them"""


_REPLACED = (
    *(t.run, t.definition, t.edit, t.rollback, t.checkpoint, t.object_, t.savepoint, t.reference_copy),
    *(t.materialization, t.output, t.output_object, t.step),
)
"""the tables of a stream that the store knows, each after those it refers to"""
_PROOF = ("proven_at", "proof", "restore_s", "restore_bytes")
_ROWS = 500
"""rows inserted at a time"""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a catalog has come with a stream: its writer epoch, its newest checkpoint, and how many extracts were
    written."""

    epoch: int
    newest: int
    extracts: int


class Rebuilding(CatalogPart):
    """A rebuild of streams, in a catalog that only it uses."""

    def begin(self, extract: Extract) -> None:
        """Make a stream with the rows of an extract, without its checkpoints, what refers to these, and steps."""
        with self._transactions.begin_write(f"stream {extract.stream}") as connection:
            for name, table in TABLES.items():
                if extract.rows[name] and name not in _AFTER:
                    connection.execute(insert(table), [dict(row) for row in extract.rows[name]])

    def set_epoch(self, stream: str, epoch: int) -> None:
        """Set the stream's writer epoch, under which the next rows are recorded."""
        with self._transactions.begin_write(f"stream {stream}") as connection:
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(epoch=epoch))

    def add_checkpoint(self, stream: str, epoch: int, commit: CheckpointCommit) -> Committed:
        """Add a checkpoint that an extract retains; those before it may be missing."""
        with self._transactions.begin_write(f"checkpoint {commit.id} of stream {stream}") as connection:
            before = find_newest(connection, stream, marked=True)
            return add_checkpoint(connection, stream, epoch, commit, before, self._transactions.time(connection))

    def add_bare_checkpoint(self, row: Mapping[str, Any]) -> None:
        """Add the row of a checkpoint whose manifest is gone; the caller marks it as deleted again."""
        with self._transactions.begin_write(f"checkpoint {row['id']}") as connection:
            connection.execute(insert(t.checkpoint), {**row, "deleted_at": None})

    def keep_open(self, stream: str, names: Iterable[str]) -> None:
        """Record that the newest checkpoint and later ones need these objects."""
        o = t.object_.c
        with self._transactions.begin_write(f"the objects of stream {stream}") as connection:
            for part in in_batches(names):
                connection.execute(update(t.object_).where(o.stream == stream, o.name.in_(part)).values(until=t.OPEN))

    def add_steps(self, stream: str, beginning: Step | None, steps: Iterable[StepRecord]) -> None:
        """Add the beginning of the input log, and the steps that no checkpoint has brought yet."""
        with self._transactions.begin_write(f"the input log of stream {stream}") as connection:
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
        with self._transactions.begin_write(f"the savepoints of stream {extract.stream}") as connection:
            if rows:
                connection.execute(insert(t.savepoint), rows)

    def add_streams(self, records: Sequence[StreamRecord]) -> None:
        """Add streams without anything of theirs, parents first: those that a stream was forked from."""
        with self._transactions.begin_write("the streams that were forked") as connection:
            for record in records:
                connection.execute(insert(t.stream), asdict(record))

    def get_position(self, stream: str) -> Position:
        """Return how far a catalog in use has come with a stream."""
        with self._transactions.begin_read() as connection:
            return _get_position(connection, stream)

    def replace(self, stream: str, before: Position, draft: Catalog) -> bool:
        """Let a stream of a catalog in use have the rows that it has in a draft, if it has come no further than
        `before`; return whether that is so.

        Leases, tombstones and other records of the past stay, and so do proofs and measured restores of checkpoints
        that are the same in the draft.
        """
        with draft.transactions.begin_read() as source:
            drafted = {table: _read_rows(source, stream, table) for table in (t.stream, *_REPLACED)}
        with self._transactions.begin_write(f"the rows of stream {stream}") as connection:
            fencing.lock(connection, stream)
            if _get_position(connection, stream) != before:
                return False
            _keep_proofs(_read_rows(connection, stream, t.checkpoint), drafted[t.checkpoint])
            for table in reversed(_REPLACED):
                connection.execute(delete(table).where(_is_replaced(table, stream, drafted[table])))
            [record] = drafted[t.stream]
            record["epoch"] = max(record["epoch"], before.epoch)  # an upgrade may have begun one, which fences
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(record))
            for table in _REPLACED:
                for part in _in_parts(drafted[table]):
                    connection.execute(insert(table), part)
            return True

    def count(self) -> dict[str, int]:
        """Return table -> its number of rows, of tables with what people know by name."""
        tables = (t.stream, t.checkpoint, t.object_, t.step, t.savepoint, t.materialization, t.rollback, t.output)
        with self._transactions.begin_read() as connection:
            return {table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


def _get_position(connection: Connection, stream: str) -> Position:
    record, newest = get_stream(connection, stream), find_newest(connection, stream)
    return Position(record.epoch, newest.id if newest else 0, record.extracts)


def _read_rows(connection: Connection, stream: str, table: Table) -> list[dict[str, Any]]:
    own = (table.c.name if table is t.stream else table.c.stream) == stream
    query = select(*(column.label(column.key) for column in table.c)).where(own)
    return [dict(row) for row in connection.execute(query).mappings()]


def _is_replaced(table: Table, stream: str, drafted: Sequence[Mapping[str, Any]]) -> ColumnElement[bool]:
    """Whether a row of a stream goes: all do, but for runs and materializations that no extract has."""
    own = table.c.stream == stream
    if table is t.run:
        return own & t.run.c.epoch.in_([row["epoch"] for row in drafted])
    if table is t.materialization:
        m = t.materialization.c
        return own & (m.manifest.is_not(None) | m.id.in_([row["id"] for row in drafted]))
    return own


def _keep_proofs(known: Iterable[Mapping[str, Any]], drafted: Iterable[dict[str, Any]]) -> None:
    """Give the rows of checkpoints the proofs that the catalog has of the same ones."""
    proofs = {row["manifest"]: {name: row[name] for name in _PROOF} for row in known}
    for row in drafted:
        row.update(proofs.get(row["manifest"], {}))


def _in_parts(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    return (rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS))
