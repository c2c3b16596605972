"""Transactions of the catalog, shared by all its parts: one transaction per method, one clock.

`Outages`: every public method of the catalog is one call, retried as a whole while the database cannot be reached, for
example during a failover. That is safe for writes, too: a transaction that failed before its COMMIT did nothing, and if
a COMMIT got no answer, its outcome is looked up first.

`Receipts` find out whether such a transaction was committed. Each writing transaction first inserts a row with a unique
id, its receipt, which exists if and only if the rest of the transaction was committed. The check inserts the same row,
which waits for an open transaction that has it, even if its client is gone. So the answer, once there, stays true. If a
database lost the transaction in a failover, the receipt is lost with it; the database's own transaction numbers
(`pg_xact_status`) would be used again there, for another transaction. SQLite needs no receipts: its COMMIT is a call in
this process, which returns or dies with it.
"""

import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, delete, func, insert, select
from sqlalchemy import exc as sa

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.engine import WRITE, is_passing, redacted_url, translate_errors
from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.store.retry import RetryPolicy
from siltstone.times import as_utc

_LOG = get_logger(__name__)
Answer = TypeVar("Answer")


class Outages:
    """The outages of one database, shared by the calls of all threads.

    Once a call has waited `timeout_s` in vain, later calls make one attempt each until one of them succeeds: a process
    that cannot continue ends after one wait, not after one for each call that it still makes.

    Args:
        label: the database's name for people.
        timeout_s: seconds after which no further attempt of a call begins; 0 means one attempt.
        what: what the database is, as logs call it.
    """

    def __init__(self, label: str, timeout_s: float, what: str = "catalog") -> None:
        self._label, self._timeout_s, self._what = label, timeout_s, what
        self._patient = RetryPolicy(attempts=sys.maxsize, wait_s=0.1, wait_max_s=5.0, total_s=timeout_s)
        self._impatient = replace(self._patient, kind="none")
        self._given_up = timeout_s <= 0
        self._local = threading.local()
        self._away_since: float | None = None
        """when the first call of any thread failed since the last success"""
        self._changing = threading.Lock()

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Return the result of `function`, retrying while it raises a transient `Unreachable`. A nested call is not
        retried by itself; the outer one is.

        Raises:
            Unreachable: the error of the last attempt.
        """
        if getattr(self._local, "inside", False):
            return function()
        self._local.inside = True
        try:
            return self.persist(function)
        finally:
            self._local.inside = False

    def persist(self, function: Callable[[], Answer]) -> Answer:
        """Retry like `call`, also within another call."""

        def attempt() -> Answer:
            try:
                return function()
            except Unreachable as error:
                if error.transient and not self._given_up:
                    self._note_outage(error)
                raise

        try:
            answer = (self._impatient if self._given_up else self._patient).call(attempt)
        except Unreachable as error:
            self._given_up = self._given_up or error.transient
            raise
        self._given_up = self._timeout_s <= 0
        if self._away_since is not None:
            self._note_answer()
        return answer

    def _note_outage(self, error: Unreachable) -> None:
        """Log an outage once, by whichever thread sees it first, and not at each attempt."""
        with self._changing:
            if self._away_since is None:
                self._away_since = time.monotonic()
                _LOG.warning(f"{self._what} is unreachable, trying again", error=str(error), up_to_s=self._timeout_s)

    def _note_answer(self) -> None:
        with self._changing:
            if self._away_since is not None:
                seconds, self._away_since = time.monotonic() - self._away_since, None
                _LOG.warning(f"{self._what} answers again", database=self._label, seconds=round(seconds, 1))


_KEPT = timedelta(days=1)
"""how long the receipt of a dead client stays; no client asks for an older one"""


class Receipts:
    """The receipts of one client. Safe for many threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._used: deque[str] = deque()

    def begin(self, connection: Connection) -> str:
        """Insert the receipt of a transaction that has just begun, and delete receipts that are no longer needed."""
        receipt = uuid.uuid4().hex
        used = [self._used.popleft() for _ in range(len(self._used))]
        r = t.receipt.c
        old = delete(t.receipt).where(r.id.in_(used) | (r.written_at < func.now() - _KEPT))
        connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()).add_cte(old.cte("old")))
        return receipt

    def end(self, receipt: str) -> None:
        """Note that the transaction was committed, so that its receipt may be deleted."""
        self._used.append(receipt)

    def is_committed(self, receipt: str) -> bool:
        """Whether the transaction was committed; waits while it is open."""
        with self._engine.connect() as connection:
            connection.begin()
            try:
                connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()))
            except sa.IntegrityError:
                return True
            finally:
                connection.rollback()
            return False


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
        outage_s: seconds that a call waits for an unreachable database (`Outages`).
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
            with self.begin_read() as connection:
                return self.time(connection)

        return self.outages.call(ask)

    def time(self, connection: Connection) -> datetime:
        """Return the current time like `now`, within a transaction."""
        if self._now is not None:
            return as_utc(self._now())
        return database_time(connection)

    @contextmanager
    def begin_read(self) -> Iterator[Connection]:
        """Read in one transaction.

        Raises:
            Unreachable: the database does not answer.
        """
        with translate_errors(self.engine.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def begin_write(self, what: str) -> Iterator[Connection]:
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
                return receipts.is_committed(receipt)

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

    Each public method of a subclass is retried, as a whole, while the database is unreachable (`Outages`).
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, _retry_method(method))


def _retry_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: CatalogPart, *args: Any, **named: Any) -> Any:
        # Iterators can be consumed only once, so their items are kept for the next attempt.
        kept = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        kept_named = {name: list(arg) if isinstance(arg, Iterator) else arg for name, arg in named.items()}
        return self._transactions.outages.call(lambda: method(self, *kept, **kept_named))

    return call
