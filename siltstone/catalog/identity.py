"""Check that a store and a catalog belong together, before anything is read, written or deleted.

`catalog.identity_rules` decides. Both are read in the reverse order of writing, and again before a refusal, so that a
warehouse that another process is creating right now is not refused.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from siltstone.catalog.identity_rules import Action, CatalogIdentity, FoundIdentities, decide, identity_mismatch_error
from siltstone.catalog.repository import Catalog
from siltstone.errors import CorruptObject, Unreachable, WrongWarehouse
from siltstone.model import StoredObject
from siltstone.result import Result
from siltstone.store.base import Store
from siltstone.store.identity import list_streams, read_identity, write_identity
from siltstone.store.open import Warehouse
from siltstone.store.paths import IDENTITY

_LOOKS = 4
"""how often to read again what another process may be changing"""


@dataclass(frozen=True, slots=True)
class Reidentified(Result):
    """The warehouse's new identity, and the one `before` (None: it had none)."""

    identity: str
    before: str | None


def check_identity(warehouse: Warehouse, catalog: Catalog, *, create: bool) -> str | None:
    """Check that the store is the catalog's, and give a new warehouse an identity.

    Args:
        create: whether a new warehouse gets one.

    Returns:
        Their identity; None if they have none and get none.

    Raises:
        WrongWarehouse: they do not belong together; nothing was changed.
        CorruptObject: the store's identity object is damaged.
        NewerFormat: a newer Siltstone wrote it.
        Unreachable: the store or the catalog does not answer.
    """
    for _ in range(_LOOKS):
        found, action = _decide(warehouse, catalog)
        if action is Action.OPEN or (action is Action.CREATE and not create):
            return found.recorded.identity
        if action is Action.SETTLE:
            catalog.identity.settle(str(found.stored))
        else:
            _write(warehouse.store, catalog, None)
    raise Unreachable(f"other processes are changing the identity of the warehouse {warehouse.label}: try again")


def inspect_identity(warehouse: Warehouse, catalog: Catalog) -> str | None:
    """Check that a store and a catalog belong together, like `check_identity`, but change nothing.

    Returns:
        Their identity; None if they have none yet: the next run gives them one.

    Raises:
        WrongWarehouse, CorruptObject, NewerFormat, Unreachable: as `check_identity`.
    """
    found, _ = _decide(warehouse, catalog)
    return found.recorded.identity


def confirm_store(warehouse: Warehouse, catalog: Catalog) -> None:
    """Check that the store still shows its identity, before believing that something else is missing.

    Raises:
        Unreachable: it does not; then its answers about other objects may be wrong, too.
        WrongWarehouse: it shows another warehouse's identity.
    """
    recorded = catalog.identity.read()
    try:
        stored = read_identity(warehouse.store)
    except CorruptObject as error:
        raise Unreachable(f"the store's answer that objects are missing is not trusted: {error}") from error
    if stored is None or recorded.identity is None:
        raise Unreachable(
            f"the store at {warehouse.label} does not show the identity of the warehouse, so its answer that objects "
            "are missing is not trusted: check that it is the right one, is mounted and answers; nothing was given up"
        )
    if stored != recorded.identity:
        raise identity_mismatch_error(FoundIdentities(recorded, stored, False, warehouse.label, catalog.url))


def reidentify(warehouse: Warehouse, catalog: Catalog) -> Reidentified:
    """Give a warehouse a new identity, in the store and in the catalog, for a copy or after its identity was lost.

    If it is interrupted, call it again.

    Raises:
        WrongWarehouse: the store does not hold what the catalog has recorded; nothing was changed.
        Unreachable: the store or the catalog does not answer: try again.
    """
    store, recorded = warehouse.store, catalog.identity.read()
    try:
        stored = read_identity(store)
    except CorruptObject:
        stored = None
    if stored is None or stored not in (recorded.identity, recorded.next):
        _prove_any(store, catalog)
    settled = _write(store, catalog, recorded.identity)
    if settled.identity is None or settled.next is not None:
        raise Unreachable("another process is changing the identity of the warehouse: try again")
    return Reidentified(settled.identity, recorded.identity)


def _decide(warehouse: Warehouse, catalog: Catalog) -> tuple[FoundIdentities, Action]:
    """Return what was found and what to do about it; refuse only after several attempts."""
    refusal: WrongWarehouse | None = None
    for _ in range(_LOOKS):
        found = _find_identities(warehouse, catalog)
        try:
            return found, decide(found)
        except WrongWarehouse as error:
            refusal = error
    assert refusal is not None, "there was a look"
    raise refusal


def _find_identities(warehouse: Warehouse, catalog: Catalog) -> FoundIdentities:
    stored = read_identity(warehouse.store)
    recorded = catalog.identity.read()
    unknown = stored is None and recorded.identity is None
    is_empty = unknown and not catalog.streams.list() and next(iter(warehouse.store.list("")), None) is None
    streams = list_streams(warehouse.store) if stored is not None and recorded == CatalogIdentity() else []
    return FoundIdentities(recorded, stored, is_empty, warehouse.label, catalog.url, streams)


def _write(store: Store, catalog: Catalog, replacing: str | None) -> CatalogIdentity:
    """Write a new identity into the catalog, the store, and the catalog again, in this order."""
    recorded = catalog.identity.propose(uuid.uuid4().hex, replacing=replacing)
    if recorded.next is None:
        return recorded  # another process was first
    try:
        stored = read_identity(store)
    except CorruptObject:
        stored = ""
    if (replacing is not None and stored != recorded.next) or stored == "":
        store.delete([IDENTITY])
    stored = write_identity(store, recorded.next)
    if stored != recorded.next:
        raise identity_mismatch_error(FoundIdentities(recorded, stored, False, store.label, catalog.url))
    return catalog.identity.settle(stored)


def _prove_any(store: Store, catalog: Catalog) -> None:
    """Read the newest readable manifest of each stream."""
    for stream in catalog.streams.list():
        manifests = [checkpoint.manifest for checkpoint in catalog.checkpoints.list(stream.name)][::-1]
        if manifests:
            _read_manifests(store, catalog, manifests)


def _read_manifests(store: Store, catalog: Catalog, manifests: Iterable[StoredObject]) -> None:
    """Read the first readable one of the manifests.

    Raises:
        WrongWarehouse: none can be read.
    """
    first: CorruptObject | None = None
    for manifest in manifests:
        try:
            store.read(manifest)
            return
        except CorruptObject as error:
            first = first or error
    raise WrongWarehouse(
        f"the store at {store.label} does not hold the warehouse of the catalog {catalog.url}: {first}; check "
        "--warehouse and --catalog (if it is the right one but damaged, `siltstone reidentify` accepts it if each "
        "stream has a checkpoint whose manifest can be read)"
    )
