"""Transactions of the catalog, shared by all its parts: one transaction per method, one clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from types import FunctionType
from typing import Any

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy import exc as sa

from siltstone.catalog.engine import WRITE, is_passing, redacted_url, translate_errors
from siltstone.catalog.outages import Outages
from siltstone.catalog.receipts import Receipts
from siltstone.errors import Unreachable
from siltstone.times import as_utc


def database_time(connection: Connection) -> datetime:
    """Return the database's current time, not that of the transaction's beginning; for SQLite, this host's."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    return as_utc(connection.execute(select(func.clock_timestamp())).scalar_one())


class Transactions:
    """The transactions of one open database, which all parts of a catalog share. Safe for many threads.

    Args:
        engine: the database.
        now: returns the current time, UTC, in tests; None uses the database's.
        outage_s: seconds that a call waits for an unreachable database (`outages`).
    """

    def __init__(self, engine: Engine, now: Callable[[], datetime] | None, outage_s: float) -> None:
        self.engine = engine
        """the database, for inspecting it and counting queries"""
        self.writer = engine.execution_options(**{WRITE: True})
        """the same database, for transactions that write"""
        self.url = redacted_url(engine.url)
        """where the catalog is, without its password"""
        self.outages = Outages(self.url, outage_s)
        self._now = now
        self._receipts = None if engine.dialect.name == "sqlite" else Receipts(self.writer)

    def close(self) -> None:
        """Close all connections; idempotent."""
        self.engine.dispose()

    def now(self) -> datetime:
        """Return the current time, UTC: the database's own, so that all its clients use the same.

        Raises:
            Unreachable: the database does not answer.
        """

        def ask() -> datetime:
            with self.reading() as connection:
                return self.time(connection)

        return self.outages.call(ask)

    def time(self, connection: Connection) -> datetime:
        """Return the current time like `now`, within a transaction."""
        if self._now is not None:
            return as_utc(self._now())
        return database_time(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read in one transaction.

        Raises:
            Unreachable: the database does not answer.
        """
        with translate_errors(self.engine.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, what: str) -> Iterator[Connection]:
        """Write `what` in one transaction. Raises a transient `Unreachable` only if it was not committed."""
        receipts, receipt, lost = self._receipts, "", False
        with (
            translate_errors(self.engine.url, what),
            self.writer.connect() as connection,
            connection.begin() as transaction,
        ):
            if receipts is not None:
                receipt = receipts.begin(connection)
            yield connection
            try:
                transaction.commit()
            except sa.DBAPIError as error:
                lost = receipts is not None and is_passing(error)
                if not lost:
                    raise
        if receipts is not None:
            if lost:
                self._look_up(what, receipts, receipt)
            receipts.end(receipt)

    def _look_up(self, what: str, receipts: Receipts, receipt: str) -> None:
        """Return if a transaction whose COMMIT got no answer was committed.

        Raises:
            Unreachable: transient if it was not, so that it is retried; otherwise the outcome is unknown.
        """

        def look() -> bool:
            with translate_errors(self.engine.url):
                return receipts.committed(receipt)

        try:
            committed = self.outages.persist(look)
        except Unreachable as error:
            raise Unreachable(f"it is not known whether {what} was written: {error}") from error
        if not committed:
            raise Unreachable(
                f"the catalog {self.url} lost {what} at its commit", advice="run the same command again", transient=True
            )


class CatalogPart:
    """The catalog's part for one noun. Safe for many threads.

    Each public method of a subclass is retried, as a whole, while the database is unreachable (`outages`).
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, _persistent(method))


def _persistent(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: CatalogPart, *args: Any, **named: Any) -> Any:
        # Iterators can be consumed only once, so their items are kept for the next attempt.
        kept = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        kept_named = {name: list(arg) if isinstance(arg, Iterator) else arg for name, arg in named.items()}
        return self._transactions.outages.call(lambda: method(self, *kept, **kept_named))

    return call
