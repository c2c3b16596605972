"""The input log: where a stream's sources begin, every step of the stream, and what each step has read of them.

    step 0       batch -1, of no checkpoint: where the sources begin, recorded before the first batch is processed;
                 a source that the stream gets later is added before the first batch with it
    step 1 ...   what each step read, recorded with its checkpoint; steps without rows have no batch (`StepKind`)

A source that begins at "latest" gives another answer each time. Step 0 holds its first answer, and every writer epoch
begins there until a checkpoint records how far the stream has read.

Steps are kept as far back as a replay may begin: those after the oldest checkpoint that is not deleted, and the newest
two with a batch up to it, which Spark needs to continue. Older ones are pruned, some hundred at a time; the files that
they read are kept as entries of step 0. A pruning depends only on what is kept, so it may run at any time, also during
a run. It never removes the newest step up to a checkpoint that is not deleted: that step has the clock from which runs,
rollbacks, forks and exports of the checkpoint go on (`InputLog.get_clock`).
"""

from collections.abc import Container, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, delete, func, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.beginnings import add_beginnings, only_of
from siltstone.catalog.records.checkpoints import find_newest
from siltstone.catalog.records.passes import Pass, note_pass
from siltstone.catalog.records.source_entries import NAMED, NO_ENTRIES, count_files, merge, without_files
from siltstone.catalog.records.steps import (
    BEFORE_FIRST,
    InputPosition,
    Step,
    StepKind,
    StepRecord,
    step_values,
    to_step,
)
from siltstone.catalog.records.streams import get_stream
from siltstone.decoding import check_object, parse_json, translate_decode_errors
from siltstone.errors import StateError
from siltstone.times import as_utc

PRUNE_AT_LEAST = 100
"""minimum steps to prune at once"""
_GROWTH = 8
"""if steps read files, at least an eighth as many steps as known files: each pruning rewrites the list of files"""
_PAGE = 1000


class InputLog(CatalogPart):
    """Where sources begin, and the steps that were recorded."""

    def record_beginning(self, stream: str, epoch: int, beginning: Step) -> None:
        """Record where a stream's sources begin, guarded by the writer epoch, before the first batch is processed.

        A second call adds named sources that are not there yet, and changes nothing else.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the initial offsets of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            known = _read_beginning(connection, stream)
            if known is None:
                _insert_beginning(connection, stream, beginning)
            elif beginning.offsets.startswith(f"{NAMED}\n"):
                _update_beginning(connection, stream, add_beginnings(known, beginning))

    def get_position(self, stream: str, upto: int) -> InputPosition:
        """Return what a query needs to continue after checkpoint `upto`; 0 is before the first."""
        s = t.step.c
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            newest = _newest_two(connection, stream, upto)
            with_entries = select(t.step).where(
                s.stream == stream, s.step > 0, s.sources.is_not(None), s.checkpoint.between(1, upto)
            )
            entries = [to_step(row) for row in connection.execute(with_entries.order_by(s.step))]
            # Step 0 is read last: a step pruned meanwhile was read above, or its files are in step 0, or both.
            return InputPosition(_read_beginning(connection, stream), entries, newest)

    def get_clock(self, stream: str, upto: int) -> str:
        """Return the clock of the newest step of the checkpoints up to `upto`.

        The empty string means that there is no such step, or that it was recorded without a clock. A fork has copies of
        its parent's steps, and an imported stream has those of its savepoint; both go on with the clock recorded there.
        """
        s = t.step.c
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            steps = select(s.clock).where(s.stream == stream, s.step > 0, s.checkpoint.between(1, upto))
            # Step numbers grow with checkpoints: ordered by both, one entry of the index `step_in_order` is read.
            return connection.scalar(steps.order_by(s.checkpoint.desc(), s.step.desc()).limit(1)) or ""

    def replayable_from(self, stream: str) -> int:
        """Return the first checkpoint from which the input log continues, even if it is gone; 0 is the start."""
        s = t.step.c
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            read = (s.stream == stream) & (s.step > 0) & s.batch_id.is_not(None)
            oldest = connection.execute(select(s.batch_id, s.checkpoint).where(read).order_by(s.step).limit(2)).all()
            return oldest[-1].checkpoint if oldest and oldest[0].batch_id > 0 else 0

    def prune(
        self,
        stream: str,
        epoch: int,
        *,
        keep: timedelta = timedelta(0),
        at_least: int = PRUNE_AT_LEAST,
        by: Pass | None = None,
    ) -> int:
        """Remove the steps that no replay from a checkpoint needs, in one transaction guarded by the writer epoch.

        Args:
            keep: steps that Spark planned at most this long ago stay.
            at_least: minimum steps; remove nothing if there are fewer.
            by: the pass to record this under.

        Returns:
            The number of steps removed.

        Raises:
            Fenced: `epoch` is not the stream's newest.
        """
        with self._transactions.begin_write(f"the input log of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            needed = _first_needed(connection, stream)
            if needed is None or needed.batch - _first_batch(connection, stream) < at_least:
                return 0
            # A length of time that reaches back before year 1 keeps all.
            now = self._transactions.time(connection)
            since = now - min(keep, now - datetime.min.replace(tzinfo=UTC)) if keep else None
            pruned = list(_planned_before(connection, stream, needed.step, since))
            beginning = _read_beginning(connection, stream)
            known = NO_ENTRIES if beginning is None else beginning.sources
            if len(pruned) < at_least:
                return 0
            read = [sources for _, sources in pruned if sources is not None]
            if read and len(pruned) * _GROWTH < count_files(known):
                return 0
            _note_entries(connection, stream, beginning, merge([known, *read]) if read else known)
            s = t.step.c
            gone = (s.stream == stream) & s.step.between(1, pruned[-1][0])
            connection.execute(delete(t.step).where(gone))
            if by is not None:
                note_pass(connection, stream, by, now, rows=len(pruned))
            return len(pruned)

    def list_logged(self, stream: str) -> list[StepRecord]:
        """List the steps to run next, oldest first, each with its checkpoint: those of checkpoints that were given up
        and not yet made again.

        Changes that nothing follows are left out: they read nothing, and brought no sink anything.
        """
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            newest = find_newest(connection, stream)
            s = t.step.c
            query = select(t.step).where(s.stream == stream, s.checkpoint > (newest.id if newest else 0))
            steps = [to_step(row) for row in connection.execute(query.order_by(s.step))]
        while steps and steps[-1].kind is StepKind.CHANGE:
            steps.pop()
        return steps

    def list(self, stream: str, upto: int, after: int = 0) -> list[StepRecord]:
        """List the steps of every checkpoint after `after`, up to and including `upto`, in order.

        Includes those of deleted checkpoints.
        """
        within = t.step.c.checkpoint.between(min(after, ID_END - 2) + 1, min(upto, ID_END - 1))
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            query = select(t.step).where(t.step.c.stream == stream, within).order_by(t.step.c.step)
            return [to_step(row) for row in connection.execute(query)]


def forget_input(connection: Connection, stream: str) -> bool:
    """If older steps were pruned, forget all others and every file, so that the stream begins again; return whether
    they were."""
    s = t.step.c
    pruned = _first_batch(connection, stream) > 0
    if pruned:
        connection.execute(delete(t.step).where(s.stream == stream, s.step > 0))
        beginning = _read_beginning(connection, stream)
        if beginning is not None:
            _note_entries(connection, stream, beginning, without_files(beginning.sources))
    return pruned


def keep_beginnings(connection: Connection, stream: str, sources: Container[str]) -> None:
    """Forget where named sources begin that are not among `sources`."""
    beginning = _read_beginning(connection, stream)
    if beginning is not None and (kept := only_of(beginning, sources)) is not beginning:
        _update_beginning(connection, stream, kept)


def _read_beginning(connection: Connection, stream: str) -> Step | None:
    s = t.step.c
    row = connection.execute(select(t.step).where(s.stream == stream, s.step == 0)).first()
    return None if row is None else to_step(row)


def _insert_beginning(connection: Connection, stream: str, beginning: Step) -> None:
    place = {"stream": stream, "checkpoint": 0}
    connection.execute(insert(t.step), place | step_values(beginning))


def _update_beginning(connection: Connection, stream: str, beginning: Step) -> None:
    at = (t.step.c.stream == stream) & (t.step.c.step == 0)
    values = {"offsets": beginning.offsets, "sources": step_values(beginning)["sources"]}
    connection.execute(update(t.step).where(at).values(values))


def _note_entries(connection: Connection, stream: str, beginning: Step | None, sources: str) -> None:
    """Set the entries of sources' logs in step 0."""
    if beginning is None:
        if sources != NO_ENTRIES:
            _insert_beginning(connection, stream, Step(0, BEFORE_FIRST, "", sources))
        return
    at = (t.step.c.stream == stream) & (t.step.c.step == 0)
    connection.execute(update(t.step).where(at).values(sources=None if sources == NO_ENTRIES else sources))


def _newest_two(connection: Connection, stream: str, upto: int) -> list[StepRecord]:
    """Return the two newest steps with a batch of checkpoints up to `upto`, oldest first.

    Step numbers grow with checkpoints. Ordering by both reads two entries of the index `step_in_order`; by the step
    alone, it reads every step that is newer than `upto`.
    """
    s = t.step.c
    read = (s.stream == stream) & (s.step > 0) & s.batch_id.is_not(None)
    query = select(t.step).where(read, s.checkpoint.between(1, upto))
    newest_first = query.order_by(s.checkpoint.desc(), s.step.desc()).limit(2)
    return [to_step(row) for row in connection.execute(newest_first)][::-1]


def _first_needed(connection: Connection, stream: str) -> Step | None:
    """Return the oldest step that a replay from the oldest checkpoint needs; None if all are needed."""
    c = t.checkpoint.c
    oldest = connection.scalar(select(func.min(c.id)).where(c.stream == stream, c.deleted_at.is_(None)))
    newest = _newest_two(connection, stream, oldest) if oldest else []
    return newest[0] if len(newest) == 2 else None


def _first_batch(connection: Connection, stream: str) -> int:
    s = t.step.c
    query = select(s.batch_id).where(s.stream == stream, s.step > 0, s.batch_id.is_not(None))
    return connection.scalar(query.order_by(s.step).limit(1)) or 0


def _planned_before(
    connection: Connection, stream: str, end: int, since: datetime | None
) -> Iterator[tuple[int, str | None]]:
    """Yield (number, entries) of the steps before `end`, oldest first, up to the first that Spark planned at or after
    `since`."""
    s, at = t.step.c, 0
    columns = [s.step, s.sources] if since is None else [s.step, s.sources, s.offsets]
    while True:
        query = select(*columns).where(s.stream == stream, s.step > at, s.step < end).order_by(s.step).limit(_PAGE)
        page = connection.execute(query).all()
        for row in page:
            if since is not None and _planned_at(row.offsets) >= since:
                return
            yield row.step, row.sources
        if len(page) < _PAGE:
            return
        at = page[-1].step


def _planned_at(offsets: str) -> datetime:
    """Return when Spark planned a batch, from its offset log; the year 1970 if the log does not say."""
    lines: Sequence[str] = offsets.splitlines()
    with translate_decode_errors("a step of the input log in the catalog", "offsets", StateError):
        header = check_object(parse_json(lines[1]), "the header") if len(lines) > 1 else {}
        return as_utc(datetime.fromtimestamp(header.get("batchTimestampMs", 0) / 1000, UTC))
