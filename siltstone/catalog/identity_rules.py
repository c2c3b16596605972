"""Decide whether a store and a catalog belong together: a pure decision over both their identities.

    catalog       store      meaning
    K             K          one warehouse: open it
    K             none       another store, or one that answers wrongly: refuse
    K             L          two warehouses: refuse
    none          L          the store of another catalog, which is lost, or --catalog was forgotten: refuse
    no catalog    L          the same
    none          none       no objects: a new warehouse; write its identity
    none          none       objects: the store of another catalog: refuse
    next K        none, K    writing an identity was interrupted: continue
    K, next L     any        a `reidentify` was interrupted: refuse until it is run again

The catalog's row is written before the store's object, and settled after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from siltstone.errors import WrongWarehouse


@dataclass(frozen=True, slots=True)
class CatalogIdentity:
    """A catalog's record of its warehouse's identity, and of the next one, if it is being written."""

    identity: str | None = None
    next: str | None = None


class Action(Enum):
    """What to do before a warehouse is used."""

    OPEN = auto()
    """nothing: store and catalog belong together"""
    SETTLE = auto()
    """record the store's identity in the catalog: another process was interrupted before it did"""
    CREATE = auto()
    """write an identity into both"""


@dataclass(frozen=True, slots=True)
class FoundIdentities:
    """What was found in the catalog and in the store.

    Attributes:
        recorded: the catalog's record.
        stored: the identity in the store, or None.
        is_empty: whether the catalog has no stream and the store no object; only used if neither has an identity.
        store: the store's name for people.
        catalog: the catalog's name for people.
        streams: the streams that have run in the store; only used if the catalog has no identity.
    """

    recorded: CatalogIdentity
    stored: str | None
    is_empty: bool
    store: str
    catalog: str
    streams: Sequence[str] = ()


def decide(found: FoundIdentities) -> Action:
    """Decide what to do before the warehouse is used.

    Raises:
        WrongWarehouse: store and catalog do not belong together; the message names both identities.
    """
    recorded, stored = found.recorded, found.stored
    if recorded.identity is not None:
        if recorded.next is not None:
            raise WrongWarehouse(
                f"the warehouse at {found.store} is being given a new identity ({recorded.next}, was "
                f"{recorded.identity}), which was interrupted: run `siltstone reidentify` again"
            )
        if stored == recorded.identity:
            return Action.OPEN
        raise identity_mismatch_error(found)
    if stored is not None:
        if stored == recorded.next:
            return Action.SETTLE
        raise identity_mismatch_error(found)
    if found.is_empty:
        return Action.CREATE
    raise WrongWarehouse(
        f"neither the store at {found.store} nor the catalog {found.catalog} has an identity, and they are not new: "
        "name the catalog of this warehouse with --catalog, or an empty store with --warehouse"
    )


def identity_mismatch_error(found: FoundIdentities) -> WrongWarehouse:
    """Make the error for a store and a catalog of two warehouses, or a store without an identity."""
    catalog = f"the catalog {found.catalog}"
    recorded = found.recorded.identity or found.recorded.next
    if found.stored is None:
        return WrongWarehouse(
            f"the store at {found.store} does not hold this catalog's warehouse: it has no identity, {catalog} has "
            f"{recorded}; check --warehouse, that the volume is mounted and that the store answers (if the store is "
            "the right one, `siltstone reidentify` writes an identity into both)"
        )
    if recorded is None:
        return lost_catalog_error(found.store, found.stored, found.streams, f"{catalog} is not its own")
    return WrongWarehouse(
        f"the store at {found.store} does not hold this catalog's warehouse: it has identity {found.stored}, {catalog} "
        f"has identity {recorded}; check --warehouse and --catalog (a copied warehouse gets its own identity by "
        "`siltstone reidentify`)"
    )


def lost_catalog_error(store: str, identity: str, streams: Sequence[str], found: str) -> WrongWarehouse:
    """Make the error for a store that holds a warehouse whose catalog was not found.

    Args:
        streams: those that have run in the store.
        found: what is there instead of its catalog.
    """
    holds = f" with {'stream' if len(streams) == 1 else 'streams'} {', '.join(streams)}" if streams else ""
    return WrongWarehouse(
        f"the store at {store} holds warehouse {identity}{holds}, but {found}: name its own with --catalog, or an "
        "empty store with --warehouse; if it is lost, bring a backup back (`siltstone restore-catalog`), or rebuild it "
        "from the store (`siltstone rebuild-catalog`)"
    )
