"""Which warehouse a catalog is of: proposed, written into the store, settled; by many at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from siltstone.catalog.identity_rules import CatalogIdentity
from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog

A, B, C = "a" * 32, "b" * 32, "c" * 32


def test_it_is_proposed_once_and_settled_once(catalog: Catalog) -> None:
    assert catalog.identity.read() == CatalogIdentity(None, None)
    assert catalog.identity.propose(A) == CatalogIdentity(None, A)
    assert catalog.identity.propose(B) == CatalogIdentity(None, A)
    assert catalog.identity.settle(B) == CatalogIdentity(None, A)
    assert catalog.identity.settle(A) == CatalogIdentity(A, None) == catalog.identity.settle(A)
    assert catalog.identity.propose(B) == CatalogIdentity(A, None) == catalog.identity.read()


def test_it_is_replaced_only_by_who_knows_it(catalog: Catalog) -> None:
    catalog.identity.propose(A)
    catalog.identity.settle(A)
    assert catalog.identity.propose(B, replacing=C) == CatalogIdentity(A, None)
    assert catalog.identity.propose(B, replacing=A) == CatalogIdentity(A, B)
    assert catalog.identity.propose(C, replacing=A) == CatalogIdentity(A, B)
    assert catalog.identity.settle(B) == CatalogIdentity(B, None)


def test_of_many_proposals_one_is_written(catalog_url: str) -> None:
    open_catalog(catalog_url).close()
    start = Barrier(4, timeout=60)

    def propose(n: int) -> CatalogIdentity:
        with open_catalog(catalog_url) as catalog:
            start.wait()
            return catalog.identity.propose(f"{n:032x}")

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(propose, range(4)))
    assert len(found) == 1 and found.pop().next in {f"{n:032x}" for n in range(4)}
