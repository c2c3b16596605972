"""Open a catalog by its URL."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from sqlalchemy import URL

from siltstone.catalog.database.engine import open_engine, parse_url, redacted_url, translate_errors
from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.database.upgrade import create_tables, revision
from siltstone.catalog.repository import Catalog
from siltstone.errors import Unreachable, UsageError
from siltstone.model import OUTAGE_S


class NoCatalog(UsageError):
    """There is no catalog at the URL."""


def open_catalog(
    url: str,
    *,
    create: bool = True,
    now: Callable[[], datetime] | None = None,
    timeout_s: float = 10.0,
    outage_s: float = OUTAGE_S,
) -> Catalog:
    """Open the catalog at `url` (`sqlite:///PATH` or `postgresql://...`).

    Args:
        create: make missing tables (and the SQLite file, in an existing directory). Tables of another revision are
            never changed (`upgrade`).
        now: the current time, in tests; default the database's.
        timeout_s: maximum seconds of each wait for a connection or a lock.
        outage_s: maximum seconds that each call of the open catalog waits while the database is unreachable.

    Raises:
        NoCatalog: it does not exist, and `create` is false.
        UsageError: a URL of another kind, or a catalog that an older or a newer Siltstone wrote.
        Unreachable: the database cannot be reached, read or written.
    """
    parsed = parse_url(url)
    if parsed.drivername == "sqlite":
        check_file(Path(str(parsed.database)), parsed, create)
    engine = open_engine(parsed, create=create, timeout_s=timeout_s)
    try:
        with translate_errors(parsed):
            if not create:
                with engine.connect() as connection:
                    if revision(connection) is None:
                        raise no_catalog(parsed)
            create_tables(engine)
    except BaseException:
        engine.dispose()
        raise
    return Catalog(Transactions(engine, now, outage_s))


def no_catalog(url: URL) -> NoCatalog:
    """Make the error for a missing catalog."""
    return NoCatalog(f"no catalog at {redacted_url(url)}: run a stream first, or check --warehouse")


def check_file(path: Path, url: URL, create: bool) -> None:
    """Check that a catalog's SQLite file exists or, with `create`, that it can be made.

    Raises:
        NoCatalog, UsageError, Unreachable: as `open_catalog`.
    """
    try:
        there = path.exists()
        misplaced = path.is_dir() or not (there or path.parent.is_dir())
    except OSError as error:
        raise Unreachable(f"cannot reach the catalog {path}: {error.strerror}; check its owner") from error
    if not there and not create:
        raise no_catalog(url)
    if misplaced:
        raise UsageError(f"cannot keep a catalog at {path}: name a file in a directory that exists")
