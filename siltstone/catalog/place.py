"""A warehouse and the catalog that says what is in it, opened together."""

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from siltstone.catalog.open import OUTAGE_S, open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.store.open import Warehouse

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where streams live. Close it, or use it in a `with` block."""

    warehouse: Warehouse
    catalog: Catalog

    @classmethod
    def existing(cls, warehouse_url: str, catalog_url: str | None = None) -> Self:
        """Open what is there to be read; makes nothing.

        Raises:
            UsageError: no warehouse or no catalog is there.
            Unreachable: they cannot be reached or read.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        return cls(warehouse, open_catalog(catalog_url or warehouse.catalog_url, create=False))

    @classmethod
    def writable(cls, warehouse_url: str, catalog_url: str | None = None, outage_s: float = OUTAGE_S) -> Self:
        """Open for a run, and make what is missing; `outage_s` as of `open_catalog`.

        Raises:
            UsageError: the warehouse cannot be there.
            Unreachable: it cannot be reached or written.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.prepare()
        if warehouse.remote and catalog_url is None:
            _LOG.warning(
                "the catalog of %s lies on this machine (%s): to run or restore elsewhere too, name a database with "
                "--catalog",
                warehouse.label,
                warehouse.local.catalog,
            )
        return cls(warehouse, open_catalog(catalog_url or warehouse.catalog_url, outage_s=outage_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.catalog.close()
