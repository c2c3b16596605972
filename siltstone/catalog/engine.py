"""One SQLAlchemy engine for one catalog database, and its errors as ours.

SQLite: write-ahead log, synchronous FULL (a commit is durable when it returns), writers queue at BEGIN
IMMEDIATE for at most the busy timeout. PostgreSQL: driver psycopg 3; each wait for a connection, a lock or a
silent peer ends.
"""

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy import exc as sa

from siltstone.errors import Unreachable, UsageError
from siltstone.extras import extra_needed
from siltstone.store.private import make_private_file
from siltstone.store.url import redacted

WRITE = "siltstone_write"
"""execution option of a connection whose transactions write"""
_SQLITE = "sqlite:///"
_LOGGED = "PRAGMA journal_mode = WAL"
"""kept in the file from then on"""
_PASSING_CLASSES = ("08",)
"""SQLSTATE classes: connection exceptions"""
_PASSING_CODES = frozenset(
    {
        "25006",  # read-only transaction: a standby that is about to be the primary
        "25P03",  # idle in a transaction for too long: this process was frozen
        "40001",  # serialization failure
        "40003",  # it is not known whether the statement was carried out
        "40P01",  # deadlock
        "53300",  # too many connections
        "55P03",  # a lock is not available
        "57P01",  # the server shuts down,
        "57P02",  # has crashed,
        "57P03",  # takes no connections yet,
        "57P05",  # or has ended an idle session
    }
)
_REFUSED = re.compile(
    r"authentication|password|pg_hba\.conf|(role|user|database) .* does not exist|permission denied|"
    r"certificate|invalid connection option|unsupported frontend protocol",
    re.IGNORECASE,
)
"""why a server lets a client not in, whenever it comes"""
_FORMS = "use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"


def parse_url(url: str) -> URL:
    """The database `url` names, with its driver; nothing is opened.

    Raises:
        UsageError: not a URL, or not of SQLite (in a file) or PostgreSQL. Never shows the URL: it may hold a
            password.
    """
    if url.startswith(_SQLITE):
        # Taken as it stands: whether % is an escape in there depends on SQLAlchemy's version.
        path = url.removeprefix(_SQLITE)
        if not path or path == ":memory:" or path.startswith("file:") or "?" in path or "\0" in path:
            raise UsageError(f"a SQLite catalog is a plain path without options: {_FORMS}")
        return URL.create("sqlite", database=os.path.abspath(path))
    try:
        parsed = make_url(url)
    except (sa.ArgumentError, ValueError):
        raise UsageError(f"the catalog URL cannot be read: {_FORMS}") from None
    if "@" in (parsed.host or ""):  # the rest of a password, which would be shown, and asked for as a host
        raise UsageError("the catalog URL cannot be read: write @ in a user's name or password as %40")
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UsageError(f"a catalog cannot be kept in {parsed.drivername}: {_FORMS}")


def redacted_url(url: URL) -> str:
    """The URL as people may see it: no password, wherever it stands."""
    if url.drivername == "sqlite":
        return f"{_SQLITE}{url.database}"
    return redacted(url.render_as_string(hide_password=True))


@contextmanager
def translate_errors(url: URL, what: str = "") -> Iterator[None]:
    """Turn the driver's errors into ours; `what` names the thing being written, where one is.

    Raises:
        UsageError: the database refuses the values (a key that is taken, a row that is not there).
        Unreachable: anything else; transient where the same may well succeed a little later.
    """
    try:
        yield
    except (sa.IntegrityError, sa.DataError) as error:
        raise UsageError(f"the catalog refuses {what or 'this'}: {_reason(error)}") from error
    except (sa.DBAPIError, sa.TimeoutError) as error:
        message = f"cannot use the catalog {redacted_url(url)}: {_reason(error)}; {_advice(url)}"
        raise Unreachable(message, transient=is_passing(error)) from error
    except sa.StatementError as error:
        raise UsageError(f"the catalog cannot hold {what or 'this'}: {_reason(error)}") from error


def is_passing(error: sa.SQLAlchemyError) -> bool:
    """Whether the same may well succeed a little later: nothing is wrong with what was asked, or with who asked.

    A connection that failed, broke, or is not to be had: so it is while a PostgreSQL server restarts or fails over,
    also one that is no primary yet and refuses to write. A lock that somebody holds, a deadlock, and SQLite's busy.
    Of a connection that could not be made PostgreSQL's driver has no code, only text.
    """
    if isinstance(error, sa.TimeoutError):
        return True
    if not isinstance(error, sa.DBAPIError):
        return False
    code = getattr(error.orig, "sqlstate", None)
    if code is not None:
        return code[:2] in _PASSING_CLASSES or code in _PASSING_CODES
    sqlite = getattr(error.orig, "sqlite_errorcode", None)
    if sqlite is not None:
        return sqlite & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
    away = error.connection_invalidated or (
        isinstance(error, sa.OperationalError) and not isinstance(error.orig, sqlite3.Error)
    )
    return away and not _REFUSED.search(str(error.orig))


def check_reachable(url: str, what: str) -> None:
    """Connect to a PostgreSQL database that others are to use, once.

    Raises:
        UsageError: not a URL of PostgreSQL, or its driver is not installed.
        Unreachable: no connection.
    """
    try:
        parsed = parse_url(url)
    except UsageError:
        parsed = None
    if parsed is None or parsed.drivername == "sqlite":
        raise UsageError(f"{what} cannot be kept there: use postgresql://USER:PASSWORD@HOST/DATABASE")
    engine = open_engine(parsed, create=False, timeout_s=10.0)
    try:
        engine.connect().close()
    except (sa.DBAPIError, sa.TimeoutError) as error:
        raise Unreachable(f"cannot use {what} {redacted_url(parsed)}: {_reason(error)}; {_advice(parsed)}") from error
    finally:
        engine.dispose()


def _reason(error: sa.SQLAlchemyError) -> str:
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0].rstrip(" .;:") if lines else type(error).__name__


def _advice(url: URL) -> str:
    if url.drivername == "sqlite":
        return "check that it is a Siltstone catalog, is writable, has space left, and nothing holds it"
    return "check that the server runs and takes connections, and the URL's host, user, password and database"


def open_engine(url: URL, *, create: bool, timeout_s: float) -> Engine:
    """An engine whose transactions start as they should; connects to nothing yet.

    With `create` a missing SQLite file is made at the first connection, otherwise no file ever is.

    Raises:
        UsageError: the driver of PostgreSQL is not installed.
    """
    if url.drivername == "sqlite":
        path = Path(str(url.database))
        waiting: dict[str, Any] = {"pool_timeout": timeout_s}
        if not os.access(path.parent, os.W_OK):
            # Where we may not write, we see no other process's changes to the log: connect anew each time.
            waiting = {"poolclass": NullPool}
        engine = create_engine(url, creator=_sqlite(path, create, timeout_s), **waiting)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    with extra_needed("postgres", "psycopg", "a PostgreSQL catalog"):
        engine = create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_timeout=timeout_s,
            connect_args=_postgres_options(url, timeout_s),
        )

    def limit_waiting(connection: Any, _record: Any) -> None:
        connection.execute(f"SET lock_timeout = {int(timeout_s * 1000)}")
        # A process that is frozen within a transaction, or cut off, holds its locks no longer than this.
        connection.execute(f"SET idle_in_transaction_session_timeout = {int(timeout_s * 3000)}")
        connection.commit()

    event.listen(engine, "connect", limit_waiting)
    return engine


def _sqlite(path: Path, create: bool, timeout_s: float) -> Callable[[], sqlite3.Connection]:
    def connect() -> sqlite3.Connection:
        mode = "rw"
        if create:
            make_private_file(path, _keep_log)  # SQLite gives the files beside it the same permissions
        if not os.access(path.parent, os.W_OK):
            # Without a log beside it the file is whole; with one, its readers share it.
            mode = "ro" if Path(f"{path}-wal").exists() else "ro&immutable=1"
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if create:
                connection.execute(_LOGGED)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    return connect


def _keep_log(file: Path) -> None:
    # Before others see the file: the change needs it for itself, and does not wait where it has not got that.
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(_LOGGED)


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads and then writes fails at once when another writer came between.
    write = connection.get_execution_options().get(WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _postgres_options(url: URL, timeout_s: float) -> dict[str, int]:
    """libpq options that bound every wait; what the URL says itself stays."""
    seconds = max(1, int(timeout_s))
    options = {
        "connect_timeout": seconds,
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": seconds,
        "keepalives_interval": max(1, seconds // 3),
        "keepalives_count": 3,
    }
    return {name: value for name, value in options.items() if name not in url.query}
