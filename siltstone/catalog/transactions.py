"""What every part of the catalog is made of: one transaction a method, one clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, Engine

from siltstone.catalog.engine import WRITE, reaching, shown
from siltstone.catalog.records import as_utc


class Transactions:
    """An open database. Close it, or use it in a `with` block."""

    def __init__(self, engine: Engine, now: Callable[[], datetime]) -> None:
        self._engine = engine
        self._writer = engine.execution_options(**{WRITE: True})
        self._now = now
        self.url = shown(engine.url)
        """where the catalog is, without its password"""

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def now(self) -> datetime:
        """The time it goes by, UTC."""
        return as_utc(self._now())

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with reaching(self._engine.url), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self, what: str) -> Iterator[Connection]:
        with reaching(self._engine.url, what), self._writer.begin() as connection:
            yield connection
