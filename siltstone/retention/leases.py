"""Hold a lease on checkpoints while a block reads them, so that they are not deleted meanwhile (promise 3)."""

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta

from siltstone.catalog.repository import Catalog
from siltstone.errors import CorruptObject, ProofFailed, Unreachable
from siltstone.log import get_logger

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How long a lease lasts without being renewed, and how often it is renewed, in seconds."""

    lasts_s: float = 120.0
    renewed_every_s: float = 30.0


def this_process() -> str:
    """Return this process's name for people: `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def hold_lease(
    catalog: Catalog,
    stream: str,
    checkpoints: Iterable[int] | None,
    *,
    what: str = "reads",
    id: str | None = None,
    options: LeaseOptions | None = None,
) -> Iterator[None]:
    """Lease checkpoints and all that their restores read (the whole stream if None) until the block ends.

    A thread renews the lease. If this process dies, the lease expires and is removed.

    A lease is not needed for correct results: a reader without one may find objects missing, and reports that, but
    never reads wrong data. So if the catalog cannot be written, for example by a user who may only read it, the block
    runs after a warning; likewise if the lease could not be renewed in time.

    Args:
        what: what the block does, for people.
        id: the lease's id, if others must know it; default a new one.

    Raises:
        UnknownStream: the stream does not exist.
        UnknownCheckpoint: one of the checkpoints does not exist, or was deleted meanwhile: objects that the block
            misses then are not damage.
    """
    options = options or LeaseOptions()
    checkpoints = None if checkpoints is None else list(checkpoints)
    lasts, id = timedelta(seconds=options.lasts_s), id or uuid.uuid4().hex
    try:
        catalog.leases.take(stream, checkpoints, id=id, who=f"{this_process()} {what}", lasts=lasts)
    except Unreachable as error:
        _LOG.warning("no lease: a deletion may remove what is read", stream=stream, error=str(error))
        yield
        return
    ended = threading.Event()
    renewing = threading.Thread(
        target=copy_context().run,
        args=(_renew, lambda: catalog.leases.renew(id, lasts), lambda: ended.wait(options.renewed_every_s), stream),
        name=f"siltstone-lease-{stream}",
        daemon=True,
    )
    renewing.start()
    try:
        yield
    except (CorruptObject, ProofFailed):
        for checkpoint in checkpoints or ():
            catalog.checkpoints.resolve(stream, str(checkpoint))
        raise
    finally:
        ended.set()
        renewing.join()
        with suppress(Unreachable):  # then it expires
            catalog.leases.release(id)


def _renew(renew: Callable[[], bool], ended: Callable[[], bool], stream: str) -> None:
    """Renew until the block ends, or the lease is lost."""
    while not ended():
        try:
            if not renew():
                _LOG.warning("lease expired: a deletion may remove what is read", stream=stream)
                return
        except Unreachable as error:
            _LOG.warning("lease not renewed, trying again", stream=stream, error=str(error))
