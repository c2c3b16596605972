"""A database that fails over to a standby without its newest transactions, or is restored from a backup."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from siltstone.catalog.warehouse import OpenWarehouse


class Standby:
    """What a standby has of a SQLite catalog; `promote` lets that be the catalog, for those who have it open, too."""

    def __init__(self, place: OpenWarehouse) -> None:
        self._path = place.catalog.url.removeprefix("sqlite:///")
        self._copy = sqlite3.connect(":memory:")
        self.replicate()

    def replicate(self) -> None:
        """Have all that the catalog has now."""
        with closing(sqlite3.connect(self._path)) as live:
            live.backup(self._copy)

    def promote(self) -> None:
        """Let the catalog lose what was not replicated."""
        with closing(sqlite3.connect(self._path)) as live:
            self._copy.backup(live)

    def close(self) -> None:
        """Forget it."""
        self._copy.close()


@contextmanager
def losing_what_follows(place: OpenWarehouse) -> Iterator[None]:
    """Lose all that the catalog records in the block, at its end."""
    with closing(Standby(place)) as standby:
        yield
        standby.promote()
