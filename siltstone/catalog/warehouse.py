"""A warehouse and the catalog that says what is in it, opened together: the one door to both.

Before anything else, they are made sure to belong together (`catalog.identity`).
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from siltstone.catalog.engine import parse_url, redacted_url
from siltstone.catalog.identity import Reidentified, check_identity, confirm_store, reidentify
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.errors import WrongWarehouse
from siltstone.log import get_logger
from siltstone.model import OUTAGE_S
from siltstone.store.identity import read_identity
from siltstone.store.open import Warehouse

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class OpenWarehouse:
    """Where streams live. Close it, or use it in a `with` block."""

    warehouse: Warehouse
    catalog: Catalog

    @classmethod
    def existing(cls, warehouse_url: str, catalog_url: str | None = None) -> Self:
        """Open what is there to be read; makes nothing.

        Raises:
            UsageError: no warehouse or no catalog is there.
            WrongWarehouse: they do not belong together.
            CorruptObject, NewerFormat: as `check_identity`.
            Unreachable: they cannot be reached or read.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        return cls(warehouse, open_catalog(catalog_url or warehouse.catalog_url, create=False)).checked(create=False)

    @classmethod
    def writable(cls, warehouse_url: str, catalog_url: str | None = None, outage_s: float = OUTAGE_S) -> Self:
        """Open for a run, and make what is missing; `outage_s` as of `open_catalog`.

        Raises:
            UsageError: the warehouse cannot be there.
            WrongWarehouse: store and catalog do not belong together; no catalog was made.
            CorruptObject, NewerFormat: as `check_identity`.
            Unreachable: it cannot be reached or written.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.prepare()
        if warehouse.remote and catalog_url is None:
            _LOG.warning(
                "the catalog lies on this machine: to run or restore elsewhere too, name a database with --catalog",
                warehouse=warehouse.label,
                catalog=warehouse.local.catalog,
            )
        url = catalog_url or warehouse.catalog_url
        stored = read_identity(warehouse.store)
        try:
            # A store that has an identity has a catalog: none is made beside it.
            catalog = open_catalog(url, create=stored is None, outage_s=outage_s)
        except NoCatalog as error:
            raise WrongWarehouse(
                f"the store at {warehouse.label} holds warehouse {stored}, but there is no catalog at "
                f"{redacted_url(parse_url(url))}: name its own with --catalog, or an empty store with --warehouse"
            ) from error
        return cls(warehouse, catalog).checked(create=True)

    @classmethod
    def reidentify(cls, warehouse_url: str, catalog_url: str | None = None) -> Reidentified:
        """Give what is there a new identity, as `catalog.identity.reidentify`."""
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        with open_catalog(catalog_url or warehouse.catalog_url, create=False) as catalog:
            return reidentify(warehouse, catalog)

    def confirm_store(self) -> None:
        """Make sure that the store shows the identity of the warehouse, as `catalog.identity.confirm_store`."""
        confirm_store(self.warehouse, self.catalog)

    def checked(self, *, create: bool) -> Self:
        """This place, once its warehouse and its catalog are known to belong together; closed where they do not."""
        try:
            check_identity(self.warehouse, self.catalog, create=create)
        except BaseException:
            self.catalog.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.catalog.close()
