"""Writer epochs: at most one run may write to a stream, the newest (promise 5).

A run begins an epoch by raising the stream's number. Every guarded write locks the stream's row and compares,
in the same transaction as the write itself: an epoch begun meanwhile waits for it, or is seen by it.
"""

from datetime import datetime

from sqlalchemy import Connection, case, delete, func, insert, select, update

from siltstone.catalog.passes import RUNS, Pass, note_pass
from siltstone.catalog.tables import checkpoint, run, stream
from siltstone.errors import Fenced, UnknownStream, WrongWarehouse
from siltstone.log import get_logger
from siltstone.model import MAX_EPOCH

_LOG = get_logger(__name__)

RUNS_KEPT = 1000
"""how many runs of a stream are remembered, at least"""


def unknown(connection: Connection, name: str) -> UnknownStream:
    """The error for a stream that is not recorded; lists those that are."""
    names = connection.scalars(select(stream.c.name).order_by(stream.c.name)).all()
    there = f"it has {', '.join(names)}" if names else "it has none yet, run a stream first"
    return UnknownStream(f"no stream {name!r} in this catalog: {there}")


def lock(connection: Connection, name: str) -> int:
    """Lock the stream for the rest of the transaction, whoever writes to it; its newest writer epoch.

    Raises:
        UnknownStream: there is no such stream.
    """
    newest = connection.scalar(select(stream.c.epoch).where(stream.c.name == name).with_for_update())
    if newest is None:
        raise unknown(connection, name)
    return newest


def hold(connection: Connection, name: str, epoch: int) -> None:
    """Lock the stream for the rest of the transaction, as its newest writer.

    Raises:
        Fenced: `epoch` is not the newest.
        UnknownStream: there is no such stream.
    """
    newest = lock(connection, name)
    if epoch < newest:
        raise Fenced(
            f"writer epoch {epoch} of stream {name} was fenced by epoch {newest}: "
            "another run has taken over; stop this one"
        )
    if epoch > newest or epoch < 1:
        raise Fenced(f"writer epoch {epoch} of stream {name} was never begun (the newest is {newest}): run it anew")


def take_over(connection: Connection, name: str, who: str, now: datetime, above: int = 0) -> int:
    """Begin the next epoch of a stream, which is higher than `above`; older runs that have not ended are ended by it.

    Raises:
        UnknownStream: there is no such stream.
        WrongWarehouse: the store already has the highest writer epoch there can be.
    """
    next_ = case((stream.c.epoch < above, above + 1), else_=stream.c.epoch + 1)
    raised = update(stream).where(stream.c.name == name).values(epoch=next_)
    epoch = connection.scalar(raised.returning(stream.c.epoch))
    if epoch is None:
        raise unknown(connection, name)
    if epoch > MAX_EPOCH:
        raise WrongWarehouse(
            f"the writer epochs of stream {name} are used up, {MAX_EPOCH} is the highest: restore the catalog from a "
            "backup of an earlier time, or run the stream under another name"
        )
    end(connection, name, None, superseded_by(epoch), now)
    newest = connection.scalar(select(func.max(checkpoint.c.id)).where(checkpoint.c.stream == name)) or 0
    values = {"stream": name, "epoch": epoch, "first_checkpoint": newest + 1, "who": who, "started_at": now}
    connection.execute(insert(run).values(values))
    _forget_old(connection, name, epoch, who, now)
    return epoch


def superseded_by(epoch: int) -> str:
    """The outcome of a run that had not ended when `epoch` began."""
    return f"superseded by epoch {epoch}"


def _forget_old(connection: Connection, name: str, newest: int, who: str, now: datetime) -> None:
    """Forget runs before the newest `RUNS_KEPT`, whose epochs nothing can be written under any more.

    Those of which there is a checkpoint stay, and the one after each of these: it says which checkpoint such a run had
    begun and not completed, whose objects a sweep looks for (`retention.orphan_rules`).
    """
    if newest <= RUNS_KEPT:
        return
    completed = select(checkpoint.c.epoch).where(checkpoint.c.stream == name)
    old = (run.c.stream == name) & (run.c.epoch <= newest - RUNS_KEPT)
    needed = run.c.epoch.in_(completed) | (run.c.epoch - 1).in_(completed)
    forgotten = connection.execute(delete(run).where(old & ~needed)).rowcount
    note_pass(connection, name, Pass.begin(RUNS, who), now, rows=forgotten)
    if forgotten:
        _LOG.info("records of old runs are forgotten", stream=name, epoch=newest, runs=forgotten)


def end(connection: Connection, name: str, epoch: int | None, outcome: str, now: datetime) -> None:
    """Note how a run ended (every run still open, for None); one that has ended stays as it is."""
    open_ = (run.c.stream == name) & run.c.ended_at.is_(None)
    chosen = open_ if epoch is None else open_ & (run.c.epoch == epoch)
    connection.execute(update(run).where(chosen).values(ended_at=now, outcome=outcome))
