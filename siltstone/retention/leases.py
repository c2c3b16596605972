"""Holds a lease on checkpoints while a block reads them, so that nobody deletes what it reads (promise 3)."""

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
    """How long a lease lives that is not renewed, and how often it is renewed, in seconds."""

    lasts_s: float = 120.0
    renewed_every_s: float = 30.0


def this_process() -> str:
    """What tells people which process it is: `host:pid`."""
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
    """Lease checkpoints and all that their restores read (the whole stream, for None) until the block ends.

    A thread renews the lease. If this process dies, it expires and is forgotten.

    A lease is a courtesy, not a lock: a reader without one finds objects missing, and says so, but reads nothing wrong.
    So where the catalog cannot be written, such as by somebody who may only read it, the block runs all the same, after
    a warning; and so it does when a lease could not be renewed in time.

    Args:
        what: what the block does, for people.
        id: the lease's own, where others are to know it.

    Raises:
        UnknownStream: there is no such stream.
        UnknownCheckpoint: one of the checkpoints is not there, or was deleted meanwhile: what the block misses then is
            no damage.
    """
    options = options or LeaseOptions()
    checkpoints = None if checkpoints is None else list(checkpoints)
    lasts, id = timedelta(seconds=options.lasts_s), id or uuid.uuid4().hex
    try:
        catalog.leases.take(stream, checkpoints, id=id, who=f"{this_process()} {what}", lasts=lasts)
    except Unreachable as error:
        _LOG.warning("no lease: a deletion may take away what is read", stream=stream, error=str(error))
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
                _LOG.warning("lease expired: a deletion may take away what is read", stream=stream)
                return
        except Unreachable as error:
            _LOG.warning("lease not renewed, trying again", stream=stream, error=str(error))
