"""What every part of the catalog is made of: one transaction per method, one clock."""

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
    """The database's time: of this moment, not of the transaction's beginning. SQLite's host is this one."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    return as_utc(connection.execute(select(func.clock_timestamp())).scalar_one())


class Transactions:
    """The transactions of one open database, which all parts of a catalog share. Safe for many threads.

    Args:
        engine: the database.
        now: the time to go by in tests, UTC; None: the database's own.
        outage_s: how long a call waits for a database that is away, in seconds (`outages`).
    """

    def __init__(self, engine: Engine, now: Callable[[], datetime] | None, outage_s: float) -> None:
        self.engine = engine
        """the database, for looking at what it holds and counting what is asked of it"""
        self.writer = engine.execution_options(**{WRITE: True})
        """the same database; its transactions are those that write"""
        self.url = redacted_url(engine.url)
        """where the catalog is, without its password"""
        self.outages = Outages(self.url, outage_s)
        self._now = now
        self._receipts = None if engine.dialect.name == "sqlite" else Receipts(self.writer)

    def close(self) -> None:
        """Close all connections; idempotent."""
        self.engine.dispose()

    def now(self) -> datetime:
        """The time to go by, UTC: the database's own, so that all hosts that use it go by the same.

        Raises:
            Unreachable
        """

        def ask() -> datetime:
            with self.reading() as connection:
                return self.time(connection)

        return self.outages.call(ask)

    def time(self, connection: Connection) -> datetime:
        """The same as `now`, within a transaction."""
        if self._now is not None:
            return as_utc(self._now())
        return database_time(connection)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read in one transaction.

        Raises:
            Unreachable
        """
        with translate_errors(self.engine.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, what: str) -> Iterator[Connection]:
        """Write `what` in one transaction. Raises a transient `Unreachable` only where it was not committed."""
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
        """Return if the transaction that got no answer to its COMMIT was committed.

        Raises:
            Unreachable: transient where it was not, so that it is run again; else the catalog does not say.
        """

        def look() -> bool:
            with translate_errors(self.engine.url):
                return receipts.committed(receipt)

        try:
            committed = self.outages.persist(look)
        except Unreachable as error:
            raise Unreachable(f"whether {what} was written is not known: {error}") from error
        if not committed:
            raise Unreachable(f"the catalog {self.url} lost {what} when it was to be committed", transient=True)


class CatalogPart:
    """What the catalog knows of one noun. Safe for many threads.

    Each public method of a subclass is called again, as a whole, while the database is away (`outages`).
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
        # What can be gone through once only is kept for the next attempt.
        kept = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        kept_named = {name: list(arg) if isinstance(arg, Iterator) else arg for name, arg in named.items()}
        return self._transactions.outages.call(lambda: method(self, *kept, **kept_named))

    return call
