"""Helpers of all clients: open the warehouse for one call, and ignore progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.catalog.warehouse import OpenWarehouse


def ignore(_: Any) -> None:
    """Do nothing: the default of progress callbacks."""


@contextmanager
def open_warehouse(settings: Settings) -> "Iterator[OpenWarehouse]":
    """Open the warehouse and the catalog that the settings name, until the block ends."""
    from siltstone.catalog.warehouse import OpenWarehouse

    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as warehouse:
        yield warehouse
