"""Extracts: what the catalog knows of one stream and no manifest says, as an object in the store.

The catalog can be lost. Manifests say what each checkpoint wrote and recorded (`commit_details`). An extract says the
rest: which checkpoints are retained, under which epochs, and the rows of the small tables: rollbacks, savepoints,
retention rules, forks, definitions, edits, reference copies, materializations and outputs. So the newest extract and
the manifests are the whole catalog, except for what describes the past: proofs, tombstones, ended runs.

An extract is complete, so only the newest counts. Its number comes from the transaction that read it: of two that are
written at once, the one that saw more counts. One is written after each transaction that changes what it holds, before
the operation returns, and before anything follows that cannot be taken back (`extract_writer`). If a process dies in
between, its operation was not acknowledged, and may have happened or not.

Steps of the input log are in the manifests of their checkpoints. Those of checkpoints that are deleted are in parts:
objects that extracts name, because they rarely change. So is the beginning (step 0). `extract_coding` encodes all of
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, func, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.records.steps import Step, StepRecord, to_step
from siltstone.errors import WrongWarehouse
from siltstone.model import StoredObject
from siltstone.store.paths import CheckpointPath

_MAX = (1 << 63) - 1
RUNS = 20
"""the newest runs that an extract holds: later sweeps look for what they left"""
TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        t.stream,
        t.checkpoint,
        t.run,
        t.definition,
        t.edit,
        t.rollback,
        t.savepoint,
        t.materialization,
        t.output,
        t.output_object,
    )
}
"""the tables whose rows an extract holds, each after those it refers to. Of `checkpoint` it holds only the rows marked
as deleted: such a row may outlive its manifest, because a materialization at that checkpoint needs it."""


@dataclass(frozen=True, slots=True)
class Retained:
    """Consecutive checkpoints that the catalog has, of one writer epoch, all marked as deleted or none.

    `owner` is the stream that wrote them: for the first ones of a fork, the stream that it was forked from.
    `committed_at` is the last one's.
    """

    first: int
    last: int
    owner: str
    epoch: int
    marked: bool
    committed_at: datetime

    def path(self, checkpoint: int) -> CheckpointPath:
        """Return the path of one of the checkpoints."""
        return CheckpointPath(self.owner, self.epoch, checkpoint)


@dataclass(frozen=True, slots=True)
class StepPart:
    """An object with the steps of the checkpoints in `ranges` (first, last); it holds `steps` steps."""

    stored: StoredObject
    steps: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReferenceCopy:
    """A reference copy of a checkpoint: its rows, when it was taken, its objects, and the epoch that wrote them."""

    checkpoint: int
    rows: int
    taken_at: datetime
    epoch: int
    objects: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class Extract:
    """What the catalog knows of one stream and no manifest says.

    Attributes:
        epoch, number: the stream's writer epoch, and the number of the extract; newer ones have higher ones.
        rows: table -> its rows (`TABLES`), by column.
        retained: the checkpoints that the catalog has, ascending.
        copies: the reference copies.
        oldest_step: the number of the oldest step of the input log that is kept; older ones were pruned.
        logged: the steps of checkpoints that were given up and not made again, each with its checkpoint.
        beginning: the object with step 0, None if there is none.
        parts: the objects with steps that no manifest has.
    """

    stream: str
    epoch: int
    number: int
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    retained: Sequence[Retained]
    copies: Sequence[ReferenceCopy]
    oldest_step: int
    logged: Sequence[StepRecord]
    beginning: StoredObject | None = None
    parts: Sequence[StepPart] = ()

    @property
    def newest(self) -> int:
        """The newest checkpoint, 0 if there is none."""
        return self.retained[-1].last if self.retained else 0

    @property
    def rollbacks(self) -> list[int]:
        """The epochs of the stream's rollbacks."""
        return [row["epoch"] for row in self.rows[t.rollback.name]]

    @property
    def ended(self) -> bool:
        """Whether the run of `epoch` had ended: then it commits no checkpoint after `newest`."""
        return any(row["epoch"] == self.epoch and row["ended_at"] is not None for row in self.rows[t.run.name])

    @property
    def parent(self) -> str | None:
        """The stream that this one was forked from, if it was."""
        return self.rows[t.stream.name][0]["forked_from"]


def is_ahead(extract: tuple[int, int], epoch: int, extracts: int) -> bool:
    """Whether an extract (epoch, number) is newer than a catalog, whose epoch and number of extracts are given.

    A catalog counts its extracts over all epochs. After it lost some of them, its epoch may still be higher than
    theirs: an upgrade, or a run that was killed, begins an epoch and writes no extract.
    """
    return extract[0] > epoch or extract[1] > extracts


@dataclass(frozen=True, slots=True)
class TakenExtract:
    """An extract without its parts, and what its writer needs to add them.

    Attributes:
        beginning: step 0.
        catalog_only: checkpoints whose steps may be in no manifest.
    """

    extract: Extract
    beginning: Step | None
    catalog_only: tuple[int, ...]


class Extracts(CatalogPart):
    """Extracts of streams, and steps for their parts."""

    def take(self, stream: str, after: tuple[int, int] = (0, 0)) -> TakenExtract:
        """Read an extract of a stream, in one transaction that locks the stream and gives the extract its number.

        Args:
            after: epoch and number of the store's newest extract, read before.

        Raises:
            UnknownStream: the stream does not exist.
            WrongWarehouse: the extract `after` is not older than this catalog; nothing was changed.
        """
        with self._transactions.begin_write(f"the number of an extract of stream {stream}") as connection:
            epoch = fencing.lock(connection, stream)
            s = t.stream.c
            raised = update(t.stream).where(s.name == stream).values(extracts=s.extracts + 1)
            number = connection.scalar(raised.returning(s.extracts)) or 0
            if is_ahead(after, epoch, number - 1):
                raise WrongWarehouse(
                    f"the catalog has lost transactions: the store has what came later with stream {stream}. Run the "
                    "stream, which brings the catalog up to the store, and repeat what you did"
                )
            retained = _read_retained(connection, stream)
            newest = retained[-1].last if retained else 0
            visible = [(each.first, each.last) for each in retained if not each.marked]
            catalog_only = _find_catalog_only(connection, stream, newest, visible)
            st = t.step.c
            oldest = connection.scalar(select(func.min(st.step)).where(st.stream == stream, st.step > 0))
            extract = Extract(
                stream=stream,
                epoch=epoch,
                number=number,
                rows={name: _read_rows(connection, stream, table) for name, table in TABLES.items()},
                retained=retained,
                copies=_read_copies(connection, stream),
                oldest_step=oldest or 0,
                logged=_read_steps(connection, stream, newest + 1, _MAX),
            )
            beginning = connection.execute(select(t.step).where(st.stream == stream, st.step == 0)).first()
            return TakenExtract(extract, None if beginning is None else to_step(beginning), catalog_only)

    def list_steps(self, stream: str, ranges: Sequence[tuple[int, int]]) -> list[StepRecord]:
        """List the recorded steps of the checkpoints in `ranges` (first, last), in order."""
        with self._transactions.begin_read() as connection:
            return [step for first, last in ranges for step in _read_steps(connection, stream, first, last)]


def _read_retained(connection: Connection, stream: str) -> list[Retained]:
    c = t.checkpoint.c
    columns = (c.id, c.epoch, c.manifest, c.committed_at, c.deleted_at)
    found: list[Retained] = []
    for id, epoch, manifest, committed_at, deleted_at in connection.execute(
        select(*columns).where(c.stream == stream).order_by(c.id)
    ):
        path = CheckpointPath.of(manifest)
        owner, marked = path.stream if path else stream, deleted_at is not None
        last = found[-1] if found else None
        follows = last is not None and (last.last, last.owner, last.epoch, last.marked) == (
            id - 1,
            owner,
            epoch,
            marked,
        )
        first = found.pop().first if follows and last is not None else id
        found.append(Retained(first, id, owner, epoch, marked, committed_at))
    return found


def _find_catalog_only(
    connection: Connection, stream: str, newest: int, visible: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the checkpoints up to `newest` that have steps which no manifest is sure to hold."""
    s = t.step.c
    query = select(s.checkpoint).distinct().where(s.stream == stream, s.checkpoint.between(1, newest))
    held = {id for first, last in visible for id in range(first, last + 1)}
    return tuple(sorted(id for id in connection.scalars(query) if id not in held))


def _read_steps(connection: Connection, stream: str, first: int, last: int) -> list[StepRecord]:
    s = t.step.c
    query = select(t.step).where(s.stream == stream, s.step > 0, s.checkpoint.between(first, last))
    return [to_step(row) for row in connection.execute(query.order_by(s.checkpoint, s.step))]


def _read_rows(connection: Connection, stream: str, table: Table) -> list[dict[str, Any]]:
    columns = (column.label(column.key) for column in table.c)
    query = select(*columns).where((table.c.name if table is t.stream else table.c.stream) == stream)
    if table is t.run:
        query = query.order_by(table.c.epoch.desc()).limit(RUNS)
    elif table is t.materialization:
        c = t.checkpoint.c
        there = select(c.id).where(c.stream == stream)
        query = query.where(table.c.manifest.is_not(None), table.c.checkpoint.in_(there)).order_by(table.c.ended_at)
    elif table is t.checkpoint:
        m = t.materialization.c
        held = select(m.checkpoint).where(m.stream == stream, m.manifest.is_not(None))
        query = query.where(table.c.deleted_at.is_not(None), table.c.id.in_(held)).order_by(table.c.id)
    else:
        query = query.order_by(*table.primary_key.columns)
    return [dict(row) for row in connection.execute(query).mappings()]


def _read_copies(connection: Connection, stream: str) -> list[ReferenceCopy]:
    o, s = t.object_.c, t.reference_copy.c
    copies = connection.execute(select(t.reference_copy).where(s.stream == stream).order_by(s.checkpoint)).all()
    objects: dict[int, list[Any]] = {}
    if copies:
        query = select(o.checkpoint, o.epoch, o.name, o.bytes, o.checksum)
        for row in connection.execute(
            query.where(o.stream == stream, o.kind == ObjectKind.REFERENCE_COPY).order_by(o.name)
        ):
            objects.setdefault(row.checkpoint, []).append(row)
    return [
        ReferenceCopy(
            copy.checkpoint,
            copy.rows,
            copy.taken_at,
            max((o.epoch for o in objects.get(copy.checkpoint, ())), default=0),
            tuple(StoredObject(o.name, o.bytes, o.checksum) for o in objects.get(copy.checkpoint, ())),
        )
        for copy in copies
    ]
