"""Warehouses that are opened with a time of the test's own."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from siltstone.catalog.identity import check_identity
from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.store.open import Warehouse


def place_at(root: Path, now: Callable[[], datetime] | None = None) -> OpenWarehouse:
    """The warehouse in this directory, made where missing, with a catalog that takes its time from `now`."""
    if now is None:
        return OpenWarehouse.open_writable(str(root))
    warehouse = Warehouse.at(str(root))
    warehouse.prepare()
    catalog = open_catalog(warehouse.catalog_url, now=now)
    check_identity(warehouse, catalog, create=True)
    return OpenWarehouse(warehouse, catalog)
