"""Writer epochs: only the newest run may write to a stream (a fenced writer commits and deletes nothing: promise 5).

A run begins an epoch by raising the stream's number (`catalog.runs`). Every guarded write locks the stream's row and
compares the epoch, in the same transaction as the write: a new epoch either waits for the write, or the write sees it.
"""

from sqlalchemy import Connection, select

from siltstone.catalog.database.tables import stream
from siltstone.errors import Fenced, UnknownStream, Unreachable


def unknown_stream_error(connection: Connection, name: str) -> UnknownStream:
    """Make the error for a stream that is not recorded; the message lists those that are."""
    names = connection.scalars(select(stream.c.name).order_by(stream.c.name)).all()
    there = f"it has {', '.join(names)}" if names else "it has none yet, run a stream first"
    return UnknownStream(f"no stream {name!r} in this catalog: {there}")


def lock(connection: Connection, name: str) -> int:
    """Lock the stream for the rest of the transaction, and return its newest writer epoch.

    Raises:
        UnknownStream: the stream does not exist.
    """
    newest = connection.scalar(select(stream.c.epoch).where(stream.c.name == name).with_for_update())
    if newest is None:
        raise unknown_stream_error(connection, name)
    return newest


def hold(connection: Connection, name: str, epoch: int) -> None:
    """Lock the stream for the rest of the transaction, as its newest writer.

    Raises:
        Fenced: a newer one has begun.
        Unreachable: the catalog does not know `epoch`: its database lost it in a failover.
        UnknownStream: the stream does not exist.
    """
    newest = lock(connection, name)
    if epoch < 1:
        raise Fenced(f"stream {name} has no writer epoch {epoch}: run it again")
    if epoch < newest:
        raise Fenced(
            f"writer epoch {epoch} of stream {name} was fenced by epoch {newest}: "
            "another run has taken over; stop this one"
        )
    if epoch > newest:
        raise Unreachable(
            f"the catalog has lost writer epoch {epoch} of stream {name}, which it had acknowledged (the newest is "
            f"{newest}): run the stream again, which brings it back from the store"
        )
