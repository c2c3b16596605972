"""Writer epochs: at most one run may write to a stream, the newest (promise 5).

A run begins an epoch by raising the stream's number (`catalog.runs`). Every guarded write locks the stream's row and
compares, in the same transaction as the write itself: an epoch begun meanwhile waits for it, or is seen by it.
"""

from sqlalchemy import Connection, select

from siltstone.catalog.tables import stream
from siltstone.errors import Fenced, UnknownStream


def unknown_stream(connection: Connection, name: str) -> UnknownStream:
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
        raise unknown_stream(connection, name)
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
