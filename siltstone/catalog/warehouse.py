"""Open a warehouse and its catalog together, after checking that they belong together (`catalog.identity`)."""

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
    """An open warehouse and its catalog. Close it, or use it in a `with` block."""

    warehouse: Warehouse
    catalog: Catalog

    @classmethod
    def existing(cls, warehouse_url: str, catalog_url: str | None = None) -> Self:
        """Open an existing warehouse and catalog for reading; create nothing.

        Raises:
            UsageError: the warehouse or the catalog does not exist.
            WrongWarehouse: they do not belong together.
            CorruptObject, NewerFormat: see `check_identity`.
            Unreachable: they cannot be reached or read.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        return cls(warehouse, open_catalog(catalog_url or warehouse.catalog_url, create=False)).checked(create=False)

    @classmethod
    def writable(cls, warehouse_url: str, catalog_url: str | None = None, outage_s: float = OUTAGE_S) -> Self:
        """Open for a run, and create what is missing; see `open_catalog` for `outage_s`.

        Raises:
            UsageError: the warehouse cannot be at that URL.
            WrongWarehouse: store and catalog do not belong together; no catalog was made.
            CorruptObject, NewerFormat: see `check_identity`.
            Unreachable: they cannot be reached or written.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.prepare()
        if warehouse.remote and catalog_url is None:
            _LOG.warning(
                "the catalog is on this machine: to run or restore elsewhere too, name a database with --catalog",
                warehouse=warehouse.label,
                catalog=warehouse.local.catalog,
            )
        url = catalog_url or warehouse.catalog_url
        stored = read_identity(warehouse.store)
        try:
            # A store with an identity already has a catalog, so none is made.
            catalog = open_catalog(url, create=stored is None, outage_s=outage_s)
        except NoCatalog as error:
            raise WrongWarehouse(
                f"the store at {warehouse.label} holds warehouse {stored}, but there is no catalog at "
                f"{redacted_url(parse_url(url))}: name its own with --catalog, or an empty store with --warehouse; if "
                "it is lost, bring a backup back (`siltstone restore-catalog`), or rebuild it from the store ("
                "`siltstone rebuild-catalog`)"
            ) from error
        return cls(warehouse, catalog).checked(create=True)

    @classmethod
    def reidentify(cls, warehouse_url: str, catalog_url: str | None = None) -> Reidentified:
        """Give an existing warehouse a new identity (`catalog.identity.reidentify`)."""
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        with open_catalog(catalog_url or warehouse.catalog_url, create=False) as catalog:
            return reidentify(warehouse, catalog)

    def confirm_store(self) -> None:
        """Check that the store shows the identity of the warehouse (`catalog.identity.confirm_store`)."""
        confirm_store(self.warehouse, self.catalog)

    def checked(self, *, create: bool) -> Self:
        """Return this warehouse if it and its catalog belong together; close it if they do not."""
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
