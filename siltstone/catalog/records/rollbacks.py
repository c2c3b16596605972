"""Rollbacks: give up checkpoints that can no longer be restored, and make them again from their input.

A rollback to checkpoint c removes every checkpoint above c, so that c is the newest. Their ids are used again. The
output of what is given up stays decided (`catalog.outbox`): its sinks have it, or get the staged rows. For each input
row to reach them exactly once, the same id must come again with the same steps, and then brings no output. So the rows
of `step` above c stay. They are no longer a record of what happened, but a log of what comes next
(`input_log.InputLog.list_logged`):

    a run that follows it      commits checkpoint c + 1 with the steps logged for it, which its own replace
    a run that does not        commits other steps: the rest of the log no longer applies, and is removed in the same
                               transaction (`settle_log`)
    a person gives it up       since its input has changed: it is removed, and sinks know what comes instead under new
                               ids (`Rollbacks.forget_logged`)

So a logged step never becomes a recorded one without being run, and a step that was run is never logged as one to come.
If the input log was pruned, the steps of the first checkpoints are gone. A rollback to 0 then leaves no log: the stream
begins at its initial offsets, with new batch boundaries.

The next run writes under its own epoch, newer than any that wrote what was given up. Within one epoch, a checkpoint is
committed once, and no object name is used twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest, has_id, unknown_checkpoint_error
from siltstone.catalog.records.definitions import forget_definitions
from siltstone.catalog.records.input_log import forget_input
from siltstone.catalog.records.objects import reopen_objects
from siltstone.catalog.records.outbox import forget_outputs, skip_sink_ids
from siltstone.catalog.records.runs import take_over
from siltstone.catalog.records.steps import Step, to_step
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import StateError, UsageError
from siltstone.time.clock_rules import decode_clock, is_repeated


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """One rollback by writer epoch `epoch`, from checkpoint `newest` to `checkpoint`; 0 is before the first."""

    stream: str
    epoch: int
    checkpoint: int
    newest: int
    reason: str
    who: str
    rolled_back_at: datetime

    def gave_up(self, epoch: int, checkpoint: int) -> bool:
        """Whether this rollback gave up the checkpoint `checkpoint` of writer epoch `epoch`."""
        return epoch < self.epoch and self.checkpoint < checkpoint <= self.newest


@dataclass(frozen=True, slots=True)
class RollbackLoss:
    """What a rollback gives up: checkpoints, ascending; their savepoints, by name; and which of the checkpoints have an
    edit by hand, which no input brings back."""

    given_up: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    edits: tuple[int, ...] = ()


class Rollbacks(CatalogPart):
    """Rollbacks to earlier checkpoints."""

    def roll_back(
        self,
        stream: str,
        epoch: int,
        checkpoint: int,
        reason: str,
        who: str,
        accept: Callable[[RollbackLoss], None] = lambda _: None,
    ) -> RollbackLoss:
        """Give up every checkpoint after `checkpoint`, or all for 0, in one transaction guarded by the writer epoch.

        Their savepoints, reference copies, materializations and definitions are removed, too. Their steps stay, as the
        log of what comes next, and so does the record of their edits. Nothing is deleted from the store. A rollback to
        the newest checkpoint does nothing.

        Args:
            reason: why, in one line.
            accept: called with what is about to be given up; it raises to refuse, and then nothing changes.

        Raises:
            UnknownCheckpoint: the checkpoint does not exist, or is marked as deleted.
            UsageError: this epoch has already rolled back, or would give up its own checkpoint: begin a new epoch.
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the rollback of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            if checkpoint != 0 and find_newest(connection, stream, has_id(checkpoint)) is None:
                raise unknown_checkpoint_error(connection, stream, f"no checkpoint {checkpoint}")
            lost = _foresee(connection, stream, checkpoint)
            if not lost.given_up:
                return lost
            _refuse_second(connection, stream, epoch, checkpoint)
            accept(lost)
            for table in (t.object_, t.reference_copy, t.savepoint, t.materialization):
                gone = (table.c.stream == stream) & (table.c.checkpoint > checkpoint)
                connection.execute(delete(table).where(gone))
            reopen_objects(connection, stream, checkpoint)
            c = t.checkpoint.c
            connection.execute(delete(t.checkpoint).where(c.stream == stream, c.id > checkpoint))
            forget_definitions(connection, stream, checkpoint)
            logged = connection.scalar(select(func.max(t.step.c.checkpoint)).where(t.step.c.stream == stream))
            if checkpoint == 0 and forget_input(connection, stream):
                forget_outputs(connection, stream)
                skip_sink_ids(connection, stream, max(lost.given_up[-1], logged or 0))
            record = RollbackRecord(
                stream, epoch, checkpoint, lost.given_up[-1], reason, who, self._transactions.time(connection)
            )
            connection.execute(insert(t.rollback), asdict(record))
            return lost

    def forget_logged(self, stream: str, epoch: int, reason: str, who: str) -> tuple[int, ...]:
        """Give up the steps that are logged to come next, in one transaction guarded by the writer epoch.

        Their input comes again with other boundaries, and so do rows that sinks have, under new ids.

        Returns:
            The checkpoints that they would have made again.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the input log of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            newest, s = find_newest(connection, stream), t.step.c
            last = newest.id if newest else 0
            logged = (s.stream == stream) & (s.checkpoint > last)
            query = select(s.checkpoint).distinct().where(logged).order_by(s.checkpoint)
            given_up = tuple(connection.scalars(query))
            if given_up:
                connection.execute(delete(t.step).where(logged))
                forget_outputs(connection, stream, after=last)
                skip_sink_ids(connection, stream, given_up[-1] - last)
                now = self._transactions.time(connection)
                record = RollbackRecord(stream, epoch, last, given_up[-1], reason, who, now)
                connection.execute(insert(t.rollback), asdict(record))
            return given_up

    def skip_epochs(self, stream: str, who: str, *, above: int, newest: int, extracts: int = 0) -> int:
        """Take the stream over with a writer epoch higher than `above`, for a catalog restored from a backup.

        In the same transaction, what runs since the backup have written is given up, up to checkpoint `newest`, the
        highest in the store.

        Args:
            extracts: the number of the store's newest extract; this catalog's extracts get higher ones.
        """
        with self._transactions.begin_write(f"a run of stream {stream}") as connection:
            now = self._transactions.time(connection)
            epoch = take_over(connection, stream, who, now, above)
            last = find_newest(connection, stream)
            id = last.id if last else 0
            reason = f"the catalog knew no writer epochs above those of its backup, the store had {above}"
            skip_sink_ids(connection, stream, max(0, newest - id))
            fewer = (t.stream.c.name == stream) & (t.stream.c.extracts < extracts)
            connection.execute(update(t.stream).where(fewer).values(extracts=extracts))
            record = RollbackRecord(stream, epoch, id, max(id, newest), reason, who, now)
            connection.execute(insert(t.rollback), asdict(record))
            return epoch

    def foresee(self, stream: str, checkpoint: int, newest: int | None = None) -> RollbackLoss:
        """Return what `roll_back` would give up, up to checkpoint `newest` if given."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return _foresee(connection, stream, checkpoint, newest)

    def list(self, stream: str) -> list[RollbackRecord]:
        """List all rollbacks of a stream, oldest first."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            return list(read_rollbacks(connection, stream))


def read_rollbacks(connection: Connection, stream: str) -> tuple[RollbackRecord, ...]:
    """Return all rollbacks of a stream, oldest first."""
    r = t.rollback.c
    query = select(*(column.label(column.key) for column in r)).where(r.stream == stream).order_by(r.epoch)
    return tuple(RollbackRecord(**row) for row in connection.execute(query).mappings())


def _foresee(connection: Connection, stream: str, checkpoint: int, newest: int | None = None) -> RollbackLoss:
    """Return what is above a checkpoint, up to `newest`; only edits that were not given up before."""
    c, s, e = t.checkpoint.c, t.savepoint.c, t.edit.c
    end = ID_END - 1 if newest is None else newest

    def is_lost(table: Table, id: ColumnElement[int]) -> ColumnElement[bool]:
        return (table.c.stream == stream) & (id > checkpoint) & (id <= end)

    written_by = dict(connection.execute(select(c.id, c.epoch).where(is_lost(t.checkpoint, c.id)).order_by(c.id)).all())
    names = select(s.name).where(is_lost(t.savepoint, s.checkpoint)).order_by(s.name)
    edited = select(e.checkpoint, e.epoch).where(is_lost(t.edit, e.checkpoint)).order_by(e.checkpoint)
    edits = [id for id, epoch in connection.execute(edited) if written_by.get(id) == epoch]
    return RollbackLoss(tuple(written_by), tuple(connection.scalars(names)), tuple(edits))


def _refuse_second(connection: Connection, stream: str, epoch: int, checkpoint: int) -> None:
    c, r = t.checkpoint.c, t.rollback.c
    own = select(c.id).where(c.stream == stream, c.id > checkpoint, c.epoch >= epoch).limit(1)
    before = select(r.checkpoint).where(r.stream == stream, r.epoch == epoch)
    if connection.scalar(own) is not None or connection.scalar(before) is not None:
        raise UsageError(
            f"writer epoch {epoch} of stream {stream} has committed or rolled back already: begin a new epoch to roll "
            f"back to checkpoint {checkpoint}"
        )


def settle_log(connection: Connection, stream: str, checkpoint: int, steps: Sequence[Step], *, repeats: bool) -> None:
    """Remove logged steps from the input log before a checkpoint's own `steps` are recorded.

    If `steps` equal the steps logged for the checkpoint, they replace them. If they differ, the run does not follow the
    log, and all logged steps are removed. What was decided of clocks is compared, too, not what they have heard, which
    another definition hears in another way; a step that was logged without one equals a step with any clock.

    Args:
        repeats: whether they must be equal.

    Raises:
        StateError: the checkpoint must repeat the logged steps, and does not: sinks have other rows under its id.
    """
    s = t.step.c
    logged = (s.stream == stream) & (s.checkpoint >= checkpoint)
    query = select(t.step).where(logged).order_by(s.checkpoint, s.step).limit(len(steps) + 1)
    next_ = connection.execute(query).all()
    follows = _is_same_input(steps, [to_step(row) for row in next_ if row.checkpoint == checkpoint])
    if repeats and not follows:
        raise StateError(
            f"checkpoint {checkpoint} of stream {stream} was given up and must have the steps logged for it, since "
            "sinks have their rows under its id",
            advice="run the stream again, which follows the log first",
        )
    if not next_:
        return
    if follows:
        logged &= s.checkpoint == checkpoint
    connection.execute(delete(t.step).where(logged))


def _is_same_input(steps: Sequence[Step], logged: Sequence[Step]) -> bool:
    """Whether steps have read what was logged, by the same clocks; Spark's note of when it was read may differ."""
    if [_input(step) for step in steps] != [_input(step) for step in logged]:
        return False
    return all(_is_same_clock(before.clock, step.clock) for step, before in zip(steps, logged, strict=True))


def _is_same_clock(logged: str, clock: str) -> bool:
    if logged == clock:
        return True
    recorded = decode_clock(logged)
    return recorded is None or ((repeated := decode_clock(clock)) is not None and is_repeated(recorded, repeated))


def _input(step: Step) -> tuple[object, ...]:
    # Spark's text: a version, a line about the batch with its time, then the offset of each source.
    return step.step, step.kind, step.batch_id, step.offsets.splitlines()[2:], step.sources
