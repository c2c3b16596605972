"""Open a warehouse and its catalog together, after checking that they belong together (`catalog.identity`)."""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from siltstone.catalog.database.engine import parse_url, redacted_url
from siltstone.catalog.identity import Reidentified, check_identity, confirm_store, reidentify
from siltstone.catalog.identity_rules import lost_catalog_error
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.log import get_logger
from siltstone.model import OUTAGE_S
from siltstone.store.identity import list_streams, read_identity
from siltstone.store.open import Warehouse

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class OpenWarehouse:
    """An open warehouse and its catalog. Close it, or use it in a `with` block."""

    warehouse: Warehouse
    catalog: Catalog

    @classmethod
    def open_existing(cls, warehouse_url: str, catalog_url: str | None = None) -> Self:
        """Open an existing warehouse and catalog for reading; create nothing.

        Raises:
            UsageError: the warehouse or the catalog does not exist.
            WrongWarehouse: they do not belong together, or the store is a warehouse whose catalog is missing.
            CorruptObject, NewerFormat: see `check_identity`.
            Unreachable: they cannot be reached or read.
        """
        warehouse = Warehouse.at(warehouse_url)
        warehouse.check_readable()
        return cls(warehouse, _open_own(warehouse, catalog_url or warehouse.catalog_url)).with_identity(create=False)

    @classmethod
    def open_writable(cls, warehouse_url: str, catalog_url: str | None = None, outage_s: float = OUTAGE_S) -> Self:
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
        # A store with an identity already has a catalog, so none is made.
        catalog = _open_own(warehouse, url, create=read_identity(warehouse.store) is None, outage_s=outage_s)
        return cls(warehouse, catalog).with_identity(create=True)

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

    def with_identity(self, *, create: bool) -> Self:
        """Return this warehouse, with its identity, if it and its catalog belong together; close it if they do not."""
        try:
            identity = check_identity(self.warehouse, self.catalog, create=create)
        except BaseException:
            self.catalog.close()
            raise
        return replace(self, warehouse=replace(self.warehouse, identity=identity or ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.catalog.close()


def _open_own(warehouse: Warehouse, url: str, *, create: bool = False, outage_s: float = OUTAGE_S) -> Catalog:
    """Open the catalog of a warehouse.

    Raises:
        NoCatalog: neither it nor the warehouse exists.
        WrongWarehouse: it does not exist, and the store holds a warehouse.
        UsageError, CorruptObject, NewerFormat, Unreachable: see `open_catalog` and `read_identity`.
    """
    try:
        return open_catalog(url, create=create, outage_s=outage_s)
    except NoCatalog as error:
        identity = read_identity(warehouse.store)
        if identity is None:
            raise
        missing = f"there is no catalog at {redacted_url(parse_url(url))}"
        raise lost_catalog_error(warehouse.label, identity, list_streams(warehouse.store), missing) from error
