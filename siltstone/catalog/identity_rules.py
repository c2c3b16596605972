"""Decides whether a store and a catalog belong together: a pure decision over what both say.

    catalog       store      what it is
    K             K          one warehouse: open it
    K             none       another store, or one that does not answer as it should: refused
    K             L          two warehouses: refused
    none          L          the store of another catalog, such as where --catalog was forgotten: refused
    none          none       no streams, no objects: a new warehouse, whose identity is written now
    none          none       streams: a warehouse of Siltstone 0.1, adopted if the store shows that it is the right one
    none          none       objects, but no streams: a store of another catalog: refused
    next K        none, K    the writing of an identity was cut short: gone on with
    K, next L     any        a `reidentify` was cut short: refused until it is run again

The catalog's row is written before the store's object, and settled after it.
"""

from dataclasses import dataclass
from enum import Enum, auto

from siltstone.errors import WrongWarehouse


@dataclass(frozen=True, slots=True)
class CatalogIdentity:
    """What a catalog says of its warehouse: its identity, and the one that is being written, if any."""

    identity: str | None = None
    next: str | None = None


class Action(Enum):
    """What to do before a warehouse is used."""

    OPEN = auto()
    """nothing: store and catalog belong together"""
    SETTLE = auto()
    """note in the catalog what the store says: another process was stopped before it did"""
    CREATE = auto()
    """write an identity into both"""
    ADOPT = auto()
    """prove that the store holds what the catalog says, then write an identity into both"""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        recorded: what the catalog says.
        stored: the identity in the store, None where it holds none.
        has_streams: whether the catalog knows a stream.
        is_empty: whether the store holds no object; matters only where neither has an identity nor a stream.
        store: how the store is named to people.
        catalog: how the catalog is named to people.
    """

    recorded: CatalogIdentity
    stored: str | None
    has_streams: bool
    is_empty: bool
    store: str
    catalog: str


def decide(found: Found) -> Action:
    """What to do before the warehouse is used.

    Raises:
        WrongWarehouse: store and catalog do not belong together; names both identities, and says what to do.
    """
    recorded, stored = found.recorded, found.stored
    if recorded.identity is not None:
        if recorded.next is not None:
            raise WrongWarehouse(
                f"the warehouse at {found.store} is being given a new identity ({recorded.next}, was "
                f"{recorded.identity}) and that was cut short: run `siltstone reidentify` again"
            )
        if stored == recorded.identity:
            return Action.OPEN
        raise mismatch(found)
    if stored is not None:
        if stored == recorded.next:
            return Action.SETTLE
        raise mismatch(found)
    if found.has_streams:
        return Action.ADOPT
    if found.is_empty:
        return Action.CREATE
    raise WrongWarehouse(
        f"the store at {found.store} holds objects, but has no identity, and the catalog {found.catalog} knows no "
        "stream: name the catalog of this warehouse with --catalog, or an empty store with --warehouse"
    )


def mismatch(found: Found) -> WrongWarehouse:
    """The error where store and catalog are of two warehouses, or the store shows no identity."""
    catalog = f"the catalog {found.catalog}"
    recorded = found.recorded.identity or found.recorded.next
    if found.stored is None:
        return WrongWarehouse(
            f"the store at {found.store} does not hold this catalog's warehouse: it has no identity, {catalog} has "
            f"{recorded}; check --warehouse, that the volume is mounted and that the store answers (if the store is "
            "the right one, `siltstone reidentify` writes an identity into both)"
        )
    of_catalog = f"has identity {recorded}" if recorded else "has none"
    return WrongWarehouse(
        f"the store at {found.store} does not hold this catalog's warehouse: it has identity {found.stored}, {catalog} "
        f"{of_catalog}; check --warehouse and --catalog (of a copied warehouse, `siltstone reidentify` makes one of "
        "its own)"
    )
