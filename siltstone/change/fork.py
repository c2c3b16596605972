"""Forks: streams that begin at a checkpoint of another stream and continue by themselves from the same input position.

Only rows of the catalog are copied (`catalog.forks`). A fork writes objects, working state and sinks of its own. Until
its chains begin with bases of its own, it reads objects of the stream it was forked from.
"""

from dataclasses import dataclass

from siltstone.catalog.epochs import check_catalog, check_new_name, mark_fork
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UnknownStream, Unreachable, UsageError
from siltstone.log import get_logger
from siltstone.model import LATEST, check_name
from siltstone.result import Result
from siltstone.settings import Settings
from siltstone.store.open import Warehouse
from siltstone.stream import Stream, find_stream

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Forked(Result):
    """A new stream that begins at checkpoint `forked_at` of `forked_from`, and the objects and bytes they share."""

    stream: str
    forked_from: str
    forked_at: int
    digest: str
    objects: int
    bytes: int


def fork(warehouse: OpenWarehouse, stream: str, new: str, at: str = LATEST) -> Forked:
    """Begin the stream `new` at a checkpoint of `stream`.

    `stream` may run meanwhile; neither waits for the other. The fork is marked in the store (`catalog.epochs`) now or,
    if the store fails, by its first run.

    Args:
        at: the checkpoint (see `Checkpoints.resolve`).

    Raises:
        UnknownStream, UnknownCheckpoint: the stream or the checkpoint does not exist.
        UsageError: `new` is not a valid name, or a stream of that name exists; nothing changed.
        WrongWarehouse: the catalog is older than the store, or the store holds a stream `new` that the catalog does not
            know; nothing changed.
        Unreachable: the store or the catalog failed; nothing changed.
    """
    catalog = warehouse.catalog
    catalog.streams.get(stream)
    checkpoint = catalog.checkpoints.resolve(stream, at)
    check_name("stream", new)
    check_catalog(warehouse, stream)
    check_new_name(warehouse, new)
    catalog.forks.create(stream, new, checkpoint)
    try:
        write_extract(warehouse, new)  # first, or a catalog rebuilt from the store would miss a fork that is marked
        mark_fork(warehouse, new)
    except Unreachable as error:
        _LOG.warning("fork is not marked in the store yet: its first run marks it", stream=new, error=str(error))
    shared = catalog.objects.list(new)
    digest = catalog.checkpoints.get(new, checkpoint).digest
    return Forked(new, stream, checkpoint, digest, len(shared), sum(stored.bytes for stored in shared))


def find_definition(settings: Settings, name: str) -> Stream:
    """Find the definition of a stream. A fork without one of its own uses that of the stream it was forked from.

    Raises:
        UnknownStream: no module defines it; the message lists the streams found and the modules that failed.
        UsageError: the fork would write to the sinks of the stream it was forked from.
    """
    name, *ancestors = _lineage(settings, name)
    origin = ancestors[-1] if ancestors else None
    try:
        return find_stream(name, settings.streams).as_fork(name, origin)
    except UnknownStream:
        for ancestor in ancestors:
            try:
                return find_stream(ancestor, settings.streams).as_fork(name, origin)
            except UnknownStream:
                continue
        raise


def _lineage(settings: Settings, name: str) -> list[str]:
    """List a stream and those it was forked from (`Forks.get_lineage`); only its name if it is not recorded."""
    try:
        with open_catalog(settings.catalog or Warehouse.at(settings.warehouse).catalog_url, create=False) as catalog:
            return catalog.forks.get_lineage(name)
    except UsageError:  # no catalog, or the stream is not in it: `find_stream` and the run report that
        return [name]
