"""What all clients share: a warehouse that is open for one call, and progress that nobody asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.catalog.warehouse import OpenWarehouse


def ignore(_: Any) -> None:
    """What progress is told to where nobody asked for it."""


@contextmanager
def opened(settings: Settings) -> "Iterator[OpenWarehouse]":
    """The warehouse and catalog that the settings name, open until the block ends."""
    from siltstone.catalog.warehouse import OpenWarehouse

    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        yield place
