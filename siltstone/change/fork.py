"""Forks: streams that begin at a checkpoint of another and go their own way from there, from the same input on.

Nothing is copied but rows of the catalog (`catalog.forks`). What a fork writes is its own: objects, working state,
sink. What it reads before its chains begin with bases of its own, it shares with the stream it was made from.
"""

from dataclasses import dataclass

from siltstone.catalog.epochs import check_catalog, check_new_name, mark_fork
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
    """A new stream that begins at checkpoint `forked_at` of `forked_from`, and shares `objects` of `bytes` with it."""

    stream: str
    forked_from: str
    forked_at: int
    digest: str
    objects: int
    bytes: int


def fork(place: OpenWarehouse, stream: str, new: str, at: str = LATEST) -> Forked:
    """Begin the stream `new` at the checkpoint of `stream` that `at` means (as `Checkpoints.resolve`).

    A run of `stream` may be at work; it is not waited for and does not wait. The fork is marked in the store
    (`catalog.epochs`), by its first run if not now.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing is there to begin with.
        UsageError: `new` is no stream's name, or there is such a stream; nothing changed.
        WrongWarehouse: the catalog is older than the store, or the store holds a stream `new` that the catalog does not
            know; nothing changed.
        Unreachable: the store or the catalog failed; nothing changed.
    """
    catalog = place.catalog
    catalog.streams.get(stream)
    checkpoint = catalog.checkpoints.resolve(stream, at)
    check_name("stream", new)
    check_catalog(place, stream)
    check_new_name(place, new)
    catalog.forks.create(stream, new, checkpoint)
    try:
        mark_fork(place, new)
    except Unreachable as error:
        _LOG.warning("fork is not marked in the store yet, its first run does that", stream=new, error=str(error))
    shared = catalog.objects.list(new)
    digest = catalog.checkpoints.get(new, checkpoint).digest
    return Forked(new, stream, checkpoint, digest, len(shared), sum(stored.bytes for stored in shared))


def stream_named(settings: Settings, name: str) -> Stream:
    """The definition of a stream. A fork that has none of its own goes by that of the stream it was made from.

    Raises:
        UnknownStream: there is none; the message lists what was found and what did not import.
        UsageError: a fork would write to the sinks of the stream it was made from.
    """
    name, *ancestors = _lineage(settings, name)
    origin = ancestors[-1] if ancestors else None
    try:
        return find_stream(name, settings.streams).forked(name, origin)
    except UnknownStream:
        for ancestor in ancestors:
            try:
                return find_stream(ancestor, settings.streams).forked(name, origin)
            except UnknownStream:
                continue
        raise


def _lineage(settings: Settings, name: str) -> list[str]:
    """As `Forks.get_lineage`; the name alone where no such stream is recorded."""
    try:
        with open_catalog(settings.catalog or Warehouse.at(settings.warehouse).catalog_url, create=False) as catalog:
            return catalog.forks.get_lineage(name)
    except UsageError:  # no catalog, or no such stream in it: `find_stream` and the run itself say what is wrong
        return [name]
