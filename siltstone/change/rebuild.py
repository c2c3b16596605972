"""Rebuild a lost catalog from the store.

    1  read the identity of the warehouse; nothing may be at the catalog's URL yet
    2  replay each stream into a draft, a SQLite catalog in a temporary directory (`run.rebuild_stream`)
    3  begin a writer epoch of each stream there, and mark it in the store, with an extract of what was rebuilt
    4  bring the draft to the catalog's URL, in one transaction, or under its name once it is complete

If it is killed before the last step, there is no catalog, and the next rebuild begins with the marks and extracts of
this one, and comes to the same. The epochs of the marks fence whatever still writes with the lost catalog, should that
come back: it is then refused, as one that was restored from an old backup is. They also make tombstones unnecessary: an
object is only ever referred to by the epoch in its name, by a lease, or under a new id, and all these are gone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from siltstone.catalog.backup import bring_back
from siltstone.catalog.database.engine import parse_url, redacted_url
from siltstone.catalog.epochs import mark_rebuilt
from siltstone.catalog.extract_writer import read_newest_extract, write_extract
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.records.extracts import Extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError, WrongWarehouse
from siltstone.log import get_logger
from siltstone.result import Result
from siltstone.retention.leases import this_process
from siltstone.run.rebuild_stream import Clock, RebuiltStream, rebuild_stream
from siltstone.store.base import Store
from siltstone.store.identity import read_identity
from siltstone.store.open import Warehouse
from siltstone.store.paths import ALL_EPOCHS, ALL_EXTRACTS, stream_of_extract, stream_of_mark, stream_prefix
from siltstone.store.scratch import SCRATCH, hold_directory

_LOG = get_logger(__name__)
OUTCOME = "rebuilt"
"""outcome that is recorded for the epoch that a rebuild begins"""
UNKNOWN = (
    "which checkpoints were proven, and how long their restores took: prove them again with `siltstone verify`",
    "what was deleted, and when; materializations that failed or ran, or were of checkpoints that are deleted; runs "
    "before the newest ones",
    "whether a sink got the newest output, if the run was killed before it could say so: it may get that again, under "
    "the same id",
)
"""what no store says"""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A stream that the store holds and the catalog does not, and why."""

    stream: str
    why: str


@dataclass(frozen=True, slots=True)
class Rebuild(Result):
    """A catalog that was rebuilt from the store: its streams, those that are left out, and what cannot be known."""

    catalog: str
    identity: str
    streams: tuple[RebuiltStream, ...]
    left_out: tuple[LeftOut, ...]
    seconds: float
    unknown: tuple[str, ...] = UNKNOWN


def rebuild_catalog(warehouse: Warehouse, url: str, tell: Callable[[str], None] = lambda _: None) -> Rebuild:
    """Rebuild the catalog of a warehouse at `url`, where there is none.

    Nothing may use the warehouse meanwhile.

    Args:
        tell: called with what is being done, for people.

    Raises:
        UsageError: there is a catalog already, or the warehouse does not exist.
        WrongWarehouse: the store has no identity, or holds no stream that can be rebuilt.
        CorruptObject: an object that the catalog is made of is missing or damaged; the message names it.
        NewerFormat: a newer Siltstone wrote it.
        Unreachable: the store or the database failed; run it again.
    """
    start = time.perf_counter()
    _check_absent(url)
    warehouse.check_readable()
    identity = read_identity(warehouse.store)
    if identity is None:
        raise WrongWarehouse(
            f"the store at {warehouse.label} has no identity, so it holds no warehouse whose catalog could be rebuilt: "
            "check --warehouse"
        )
    with hold_directory(warehouse.local.scratch(), SCRATCH) as directory:
        draft, clock = directory / "catalog.db", Clock()
        with open_catalog(f"sqlite:///{draft}", now=clock) as catalog:
            rebuilt, left_out = rebuild_streams(OpenWarehouse(warehouse, catalog), identity, clock, tell)
        tell("writing the catalog")
        bring_back(draft, url)
    for each in left_out:
        _LOG.warning("a stream is not in the rebuilt catalog", stream=each.stream, why=each.why)
    return Rebuild(
        redacted_url(parse_url(url)), identity, tuple(rebuilt), left_out, round(time.perf_counter() - start, 3)
    )


def rebuild_streams(
    place: OpenWarehouse, identity: str, clock: Clock, tell: Callable[[str], None] = lambda _: None
) -> tuple[list[RebuiltStream], tuple[LeftOut, ...]]:
    """Rebuild every stream of a store into the catalog of `place`, which is new and has no other user.

    Args:
        identity: the warehouse's, for the catalog.
        clock: the catalog's clock.

    Raises:
        WrongWarehouse, CorruptObject, NewerFormat, Unreachable: as `rebuild_catalog`.
    """
    extracts, left_out = _find_streams(place.warehouse.store)
    if not extracts:
        why = "; ".join(f"{each.stream}: {each.why}" for each in left_out) or "it holds no stream"
        raise WrongWarehouse(
            f"no catalog can be rebuilt from the store at {place.warehouse.label}: {why}; check --warehouse"
        )
    place.warehouse.prepare()  # the directory on this machine may be lost, too
    place.catalog.identity.propose(identity, replacing=None)
    place.catalog.identity.settle(identity)
    return [_rebuild(place, extract, clock, tell) for extract in extracts], left_out


def _rebuild(place: OpenWarehouse, extract: Extract, clock: Clock, tell: Callable[[str], None]) -> RebuiltStream:
    tell(f"reading the manifests of stream {extract.stream}")
    done = rebuild_stream(place, extract, clock, tell)
    clock.at = clock.now()
    epoch = mark_rebuilt(place, extract.stream, f"{this_process()} rebuilt the catalog", OUTCOME)
    write_extract(place, extract.stream)
    _LOG.debug("stream rebuilt", stream=extract.stream, epoch=epoch, newest=done.newest)
    return done


def _check_absent(url: str) -> None:
    try:
        with open_catalog(url, create=False) as catalog:
            raise UsageError(
                f"there is a catalog at {catalog.url} already, and it was not changed: name an empty database with "
                "--catalog, or move this one away once nothing runs on it"
            )
    except NoCatalog:
        pass


def _find_streams(store: Store) -> tuple[list[Extract], tuple[LeftOut, ...]]:
    """Return the newest extract of each stream, parents before their forks, and the streams that cannot be rebuilt."""
    names = {stream_of_extract(name) for name, _ in store.list(ALL_EXTRACTS)} - {None}
    found = {name: read_newest_extract(store, name) for name in sorted(filter(None, names))}
    extracts = {name: extract for name, extract in found.items() if extract is not None}
    marks: dict[str, list[str]] = {}
    for name, _ in store.list(ALL_EPOCHS):
        if (stream := stream_of_mark(name)) is not None and stream not in extracts:
            marks.setdefault(stream, []).append(name)
    left_out = []
    for stream, named in sorted(marks.items()):
        if next(iter(store.list(stream_prefix(stream))), None) is None:
            store.delete(named)  # its first run was killed before it wrote anything
        else:
            why = "it has objects, but no record of its catalog in the store"
            left_out.append(LeftOut(stream, why))
    ordered: list[Extract] = []
    while extracts:
        ready = [e for e in extracts.values() if e.parent is None or e.parent in {o.stream for o in ordered}]
        if not ready:
            left_out += [LeftOut(e.stream, f"it is a fork of {e.parent}, which is missing") for e in extracts.values()]
            break
        ordered += ready
        extracts = {name: e for name, e in extracts.items() if e not in ready}
    return ordered, tuple(left_out)
