"""Open a SQLAlchemy engine for a catalog database, and translate its errors.

SQLite: write-ahead log, synchronous FULL (a commit is durable when it returns), writers queue at BEGIN
IMMEDIATE for at most the busy timeout. PostgreSQL: driver psycopg 3; each wait for a connection, a lock or a
silent peer is bounded.
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
from siltstone.extras import require_extra
from siltstone.store.private import make_private_file
from siltstone.store.url import redact_url

WRITE = "siltstone_write"
"""execution option of a connection whose transactions write"""
_SQLITE = "sqlite:///"
_LOGGED = "PRAGMA journal_mode = WAL"
"""the mode is stored in the file"""
_PASSING_CLASSES = ("08",)
"""SQLSTATE classes: connection exceptions"""
_PASSING_CODES = frozenset(
    {
        "25006",  # read-only transaction: a standby that is about to be the primary
        "25P03",  # idle in a transaction for too long: this process was frozen
        "40001",  # serialization failure
        "40003",  # statement completion unknown
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
"""reasons for which a server refuses a client permanently"""
_FORMS = "use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"


def parse_url(url: str) -> URL:
    """Parse the URL of a catalog database and set its driver; nothing is opened.

    Raises:
        UsageError: it is not a URL, or not one of SQLite (in a file) or PostgreSQL. The message never shows the URL,
            which may contain a password.
    """
    if url.startswith(_SQLITE):
        # Not parsed by SQLAlchemy: whether it unescapes % depends on its version.
        path = url.removeprefix(_SQLITE)
        if not path or path == ":memory:" or path.startswith("file:") or "?" in path or "\0" in path:
            raise UsageError(f"a SQLite catalog is a plain path without options: {_FORMS}")
        return URL.create("sqlite", database=os.path.abspath(path))
    try:
        parsed = make_url(url)
    except (sa.ArgumentError, ValueError):
        raise UsageError(f"the catalog URL cannot be read: {_FORMS}") from None
    if "@" in (parsed.host or ""):  # the rest of a password, which would be shown and looked up as a host
        raise UsageError("the catalog URL cannot be read: write @ in a user's name or password as %40")
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UsageError(f"a catalog cannot be kept in {parsed.drivername}: {_FORMS}")


def redacted_url(url: URL) -> str:
    """Return the URL for people: without any password."""
    if url.drivername == "sqlite":
        return f"{_SQLITE}{url.database}"
    return redact_url(url.render_as_string(hide_password=True))


@contextmanager
def translate_errors(url: URL, what: str = "") -> Iterator[None]:
    """Translate the driver's errors into ours; `what` names what is being written, if anything.

    Raises:
        UsageError: the database refuses the values (a key is taken, a row is missing).
        Unreachable: anything else; transient if the same may succeed a little later.
    """
    try:
        yield
    except (sa.IntegrityError, sa.DataError) as error:
        raise UsageError(f"the catalog refuses {what or 'this'}: {_reason(error)}") from error
    except (sa.DBAPIError, sa.TimeoutError) as error:
        message = f"cannot use the catalog {redacted_url(url)}: {_reason(error)}"
        raise Unreachable(message, advice=_advice(url), transient=is_passing(error)) from error
    except sa.StatementError as error:
        raise UsageError(f"the catalog cannot hold {what or 'this'}: {_reason(error)}") from error


def is_passing(error: sa.SQLAlchemyError) -> bool:
    """Whether the same call may succeed a little later, since neither the request nor the client is at fault.

    These are connections that fail or break, as while a PostgreSQL server restarts or fails over, a server that is not
    the primary yet and refuses to write, held locks, deadlocks, and SQLite's busy errors. If no connection could be
    made, PostgreSQL's driver has no code, only text.
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
    """Check, by one connection, a PostgreSQL database that other processes will use.

    Raises:
        UsageError: the URL is not one of PostgreSQL, or its driver is not installed.
        Unreachable: it cannot be connected to.
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
        raise Unreachable(
            f"cannot use {what} {redacted_url(parsed)}: {_reason(error)}", advice=_advice(parsed)
        ) from error
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
    """Make an engine with the right kind of transactions; it does not connect yet.

    With `create`, a missing SQLite file is made at the first connection, otherwise never.

    Raises:
        UsageError: the driver of PostgreSQL is not installed.
    """
    if url.drivername == "sqlite":
        path = Path(str(url.database))
        waiting: dict[str, Any] = {"pool_timeout": timeout_s}
        if not os.access(path.parent, os.W_OK):
            # Without write permission we do not see other processes' changes to the log, so each use reconnects.
            waiting = {"poolclass": NullPool}
        engine = create_engine(url, creator=_sqlite(path, create, timeout_s), **waiting)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    with require_extra("postgres", "psycopg", "a PostgreSQL catalog"):
        engine = create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_timeout=timeout_s,
            connect_args=_postgres_options(url, timeout_s),
        )

    def limit_waiting(connection: Any, _record: Any) -> None:
        connection.execute(f"SET lock_timeout = {int(timeout_s * 1000)}")
        # A process that is frozen or cut off within a transaction loses its locks after this time.
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
            # Without a log beside it, the file is complete; with one, readers share the log.
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
    # Done before others see the file: the change needs exclusive access, and fails at once without it.
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(_LOGGED)


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads and then writes fails at once if another writer came in between.
    write = connection.get_execution_options().get(WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _postgres_options(url: URL, timeout_s: float) -> dict[str, int]:
    """Return libpq options that bound every wait; options in the URL take precedence."""
    seconds = max(1, int(timeout_s))
    options = {
        "connect_timeout": seconds,
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": seconds,
        "keepalives_interval": max(1, seconds // 3),
        "keepalives_count": 3,
    }
    return {name: value for name, value in options.items() if name not in url.query}
