"""Begins writer epochs, in the catalog and in the store, so that a catalog that went back in time is noticed.

An epoch is begun in the catalog first and then marked in the store, by an object of its own, before it is used for
anything. So the store never knows a higher epoch than the catalog, unless the catalog was restored from a backup: then
what runs since the backup have written is unknown to it, and looks like orphans. Stopped between the two, an epoch has
no mark, and has done nothing. A mark is written once: of two catalogs that begin the same epoch, as the catalog of a
copy does that was given no identity of its own, one is refused.

A backup may also be of the newest epoch, taken while its run was at work. It is noticed by the manifest of a checkpoint
that is two above the catalog's newest, which is written only when the one between has been committed.

Only the highest mark matters. Each epoch deletes those that it found of older ones, so a process that wakes up late
deletes only lower marks, too.
"""

import logging
import uuid
from contextlib import suppress

from siltstone.catalog.place import Place
from siltstone.errors import ObjectExists, Unreachable, WrongWarehouse
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath, epoch_mark, epoch_marks, stream_prefix

_LOG = logging.getLogger(__name__)


def begin_epoch(place: Place, stream: str, who: str) -> int:
    """Take a stream over: begin its next writer epoch, in the catalog and in the store.

    Args:
        who: tells people which process this is.

    Raises:
        UnknownStream: there is no such stream.
        WrongWarehouse: the catalog is older than the store, or another catalog writes to the same store.
        Unreachable: the store or the catalog failed; an epoch that was begun has done nothing.
    """
    marked = _marked(place.warehouse.store, stream)
    _refuse_older(place, stream, marked)
    epoch = place.catalog.new_epoch(stream, who)
    _mark(place, stream, epoch, who, marked)
    return epoch


def go_on_from_backup(place: Place, stream: str, who: str, outcome: str) -> bool:
    """Where the catalog is older than the store, take the stream over under an epoch above the store's, and end it.

    What newer runs have written, and the catalog does not know of, is given up: it is kept for a while, as after any
    recovery, and the working state of those runs is not used.

    Args:
        outcome: how that epoch ends.

    Returns:
        Whether the catalog was older; if not, nothing is changed.
    """
    store, catalog = place.warehouse.store, place.catalog
    marked = _marked(store, stream)
    if not _is_older(place, stream, marked):
        return False
    newest = max([*marked, catalog.stream(stream).epoch])
    paths = (CheckpointPath.of(name) for name, _ in store.list(stream_prefix(stream)))
    stored = max((path.checkpoint for path in paths if path is not None), default=0)
    epoch = catalog.skip_epochs(stream, who, above=newest, newest=stored)
    _mark(place, stream, epoch, who, marked)
    catalog.end_epoch(stream, epoch, outcome)
    return True


def check_catalog(place: Place, stream: str) -> None:
    """Make sure that the catalog knows every writer epoch of a stream that the store knows.

    For whatever deletes: what it takes for orphans may be newer than the catalog.

    Raises:
        UnknownStream: there is no such stream.
        WrongWarehouse: it does not; nothing was changed.
    """
    # The store first: an epoch is begun in the catalog before it is marked.
    _refuse_older(place, stream, _marked(place.warehouse.store, stream))


def _marked(store: Store, stream: str) -> list[int]:
    """The epochs that are marked in the store."""
    prefix = epoch_marks(stream)
    numbers = (name.removeprefix(prefix) for name, _ in store.list(prefix))
    return [int(number) for number in numbers if number.isdecimal()]


def _mark(place: Place, stream: str, epoch: int, who: str, marked: list[int]) -> None:
    """Mark an epoch in the store, in place of those `marked` before it."""
    store, catalog = place.warehouse.store, place.catalog
    try:
        store.put(epoch_mark(stream, epoch), f"{who} {uuid.uuid4().hex}\n".encode())
    except BaseException as error:
        with suppress(Unreachable):
            catalog.end_epoch(stream, epoch, "failed")
        if isinstance(error, ObjectExists):
            raise WrongWarehouse(
                f"writer epoch {epoch} of stream {stream} was begun in {place.warehouse.label} by another catalog than "
                f"{catalog.url}: use one catalog for a store, and `siltstone reidentify` for a copied warehouse"
            ) from error
        raise
    try:
        store.delete([epoch_mark(stream, each) for each in marked if each < epoch])
    except Unreachable as error:  # the next epoch does it
        _LOG.warning("stream %s: old epoch marks stay: %s", stream, error)


def _is_older(place: Place, stream: str, marked: list[int]) -> bool:
    """Whether the catalog is older than the store, whose marks were read before."""
    catalog, store = place.catalog, place.warehouse.store
    while True:
        epoch, newest = catalog.stream(stream).epoch, catalog.last_id(stream)
        if max(marked, default=0) > epoch:
            return True
        manifest = CheckpointPath(stream, epoch, newest + 2).manifest()
        if not any(name == manifest for name, _ in store.list(manifest)):
            return False
        if (catalog.stream(stream).epoch, catalog.last_id(stream)) == (epoch, newest):
            return True  # else a run at work has gone on meanwhile


def _refuse_older(place: Place, stream: str, marked: list[int]) -> None:
    if _is_older(place, stream, marked):
        known, newest = place.catalog.stream(stream).epoch, place.catalog.last_id(stream)
        raise WrongWarehouse(
            f"the catalog {place.catalog.url} is older than the store at {place.warehouse.label}: of stream {stream} "
            f"it knows writer epochs up to {known} and checkpoints up to {newest}, the store has newer ones; was it "
            "restored from a backup? Name the newer one with --catalog, or give up what it does not know of with "
            f"`siltstone recover {stream} --accept-loss`"
        )
