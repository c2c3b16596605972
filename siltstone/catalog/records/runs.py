"""Runs: who wrote to a stream under which writer epoch, and how that ended."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, case, delete, func, insert, select, update

from siltstone.catalog.database.tables import checkpoint, run, stream
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest
from siltstone.catalog.records.passes import RUNS, Pass, note_pass
from siltstone.catalog.records.streams import get_stream
from siltstone.errors import WrongWarehouse
from siltstone.log import get_logger
from siltstone.model import MAX_EPOCH

_LOG = get_logger(__name__)

_SUPERSEDED = "superseded by epoch "
RUNS_KEPT = 1000
"""minimum runs kept per stream"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One writer epoch of a stream; its first checkpoint, if it completed any, is `first_checkpoint`.

    `outcome` says how it ended; None while it runs.
    """

    stream: str
    epoch: int
    first_checkpoint: int
    who: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None


class Runs(CatalogPart):
    """The runs of streams, each with its own writer epoch."""

    def begin(self, stream: str, who: str, *, after: int | None = None, above: int = 0) -> int:
        """Take the stream over: begin its next writer epoch, higher than `above`, which fences older ones.

        Runs and recoveries use `catalog.epochs.begin_epoch`, which also marks the epoch in the store.

        Args:
            after: the epoch that must be the newest until then; None for any.

        Raises:
            Fenced: the newest epoch is another one.
        """
        with self._transactions.begin_write(f"a run of stream {stream}") as connection:
            if after is not None:
                fencing.hold(connection, stream, after)
            return take_over(connection, stream, who, self._transactions.time(connection), above)

    def end(self, stream: str, epoch: int, outcome: str, completed: int = 0) -> bool:
        """Record how a run ended; one that has already ended (for example, superseded) stays as it is.

        Args:
            completed: the newest checkpoint that the run knows to be complete.

        Returns:
            Whether the catalog has that checkpoint; if it has lost it, nothing is recorded.
        """
        with self._transactions.begin_write(f"the end of a run of stream {stream}") as connection:
            fencing.lock(connection, stream)
            newest = find_newest(connection, stream)
            if (newest.id if newest else 0) < completed:
                return False
            end_runs(connection, stream, epoch, outcome, self._transactions.time(connection))
            return True

    def check_epoch(self, stream: str, epoch: int) -> None:
        """Check that `epoch` is the newest writer of the stream.

        Raises:
            Fenced: it is not.
        """
        with self._transactions.begin_read() as connection:
            fencing.hold(connection, stream, epoch)

    def is_open(self, stream: str) -> bool:
        """Whether the newest writer epoch has not ended; a killed run's has not, either."""
        r = run.c
        newest = select(r.ended_at).where(r.stream == stream).order_by(r.epoch.desc()).limit(1)
        with self._transactions.begin_read() as connection:
            found = connection.execute(newest).first()
            return found is not None and found.ended_at is None

    def is_unfinished(self, stream: str, epoch: int) -> bool:
        """Whether the run of an epoch has not ended by itself: it is at work, or was killed or superseded."""
        r = run.c
        query = select(r.outcome).where(r.stream == stream, r.epoch == epoch)
        with self._transactions.begin_read() as connection:
            found = connection.execute(query).first()
            return found is not None and (found.outcome is None or found.outcome.startswith(_SUPERSEDED))

    def list_superseded(self, stream: str, epoch: int) -> list[RunRecord]:
        """List the runs of a stream that had not ended when `epoch` began and fenced them."""
        r = run.c
        fenced = (r.stream == stream) & (r.epoch < epoch) & (r.outcome == superseded_by(epoch))
        with self._transactions.begin_read() as connection:
            found = connection.execute(select(run).where(fenced).order_by(r.epoch))
            return [RunRecord(**row) for row in found.mappings()]

    def get_newest(self, stream: str) -> RunRecord | None:
        """Return the run of a stream's newest writer epoch; None if it never ran."""
        newest = select(run).where(run.c.stream == stream).order_by(run.c.epoch.desc()).limit(1)
        with self._transactions.begin_read() as connection:
            found = connection.execute(newest).mappings().first()
            return None if found is None else RunRecord(**found)

    def get_owners(self, stream: str, epochs: Collection[int]) -> dict[int, str]:
        """Map some writer epochs of a stream to who wrote under them."""
        query = select(run.c.epoch, run.c.who).where(run.c.stream == stream, run.c.epoch.in_(epochs))
        with self._transactions.begin_read() as connection:
            return {epoch: who for epoch, who in connection.execute(query)}

    def list(self, stream: str) -> list[RunRecord]:
        """List all writer epochs of a stream, oldest first."""
        with self._transactions.begin_read() as connection:
            get_stream(connection, stream)
            found = connection.execute(select(run).where(run.c.stream == stream).order_by(run.c.epoch))
            return [RunRecord(**row) for row in found.mappings()]


def take_over(connection: Connection, name: str, who: str, now: datetime, above: int = 0) -> int:
    """Begin the next epoch of a stream, higher than `above`, and end older runs that have not ended.

    Raises:
        UnknownStream: the stream does not exist.
        WrongWarehouse: the store already has the highest possible writer epoch.
    """
    next_ = case((stream.c.epoch < above, above + 1), else_=stream.c.epoch + 1)
    raised = update(stream).where(stream.c.name == name).values(epoch=next_)
    epoch = connection.scalar(raised.returning(stream.c.epoch))
    if epoch is None:
        raise fencing.unknown_stream_error(connection, name)
    if epoch > MAX_EPOCH:
        raise WrongWarehouse(
            f"the writer epochs of stream {name} are used up, {MAX_EPOCH} is the highest: restore the catalog from a "
            "backup of an earlier time, or run the stream under another name"
        )
    end_runs(connection, name, None, superseded_by(epoch), now)
    newest = connection.scalar(select(func.max(checkpoint.c.id)).where(checkpoint.c.stream == name)) or 0
    values = {"stream": name, "epoch": epoch, "first_checkpoint": newest + 1, "who": who, "started_at": now}
    connection.execute(insert(run).values(values))
    _forget_old(connection, name, epoch, who, now)
    return epoch


def superseded_by(epoch: int) -> str:
    """Return the outcome of a run that had not ended when `epoch` began."""
    return f"{_SUPERSEDED}{epoch}"


def _forget_old(connection: Connection, name: str, newest: int, who: str, now: datetime) -> None:
    """Remove runs before the newest `RUNS_KEPT`, whose epochs can no longer write.

    Runs that have a checkpoint stay, and so does the run after each of these: it records which checkpoint the earlier
    run had begun and not completed, whose objects a sweep looks for (`retention.orphan_rules`).
    """
    if newest <= RUNS_KEPT:
        return
    completed = select(checkpoint.c.epoch).where(checkpoint.c.stream == name)
    old = (run.c.stream == name) & (run.c.epoch <= newest - RUNS_KEPT)
    needed = run.c.epoch.in_(completed) | (run.c.epoch - 1).in_(completed)
    forgotten = connection.execute(delete(run).where(old & ~needed)).rowcount
    note_pass(connection, name, Pass.begin(RUNS, who), now, rows=forgotten)
    if forgotten:
        _LOG.info("records of old runs were removed", stream=name, epoch=newest, runs=forgotten)


def end_runs(connection: Connection, name: str, epoch: int | None, outcome: str, now: datetime) -> None:
    """Record how a run (all open runs if `epoch` is None) ended; one that has ended stays as it is."""
    open_ = (run.c.stream == name) & run.c.ended_at.is_(None)
    chosen = open_ if epoch is None else open_ & (run.c.epoch == epoch)
    connection.execute(update(run).where(chosen).values(ended_at=now, outcome=outcome))
