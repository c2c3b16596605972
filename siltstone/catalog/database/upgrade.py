"""Check and change the revision of a catalog's tables, with Alembic.

A database without tables gets the current ones. Opening a catalog never changes tables of another revision, since
processes of an older Siltstone may be using them; `catalog.upgrading` upgrades it on request.
"""

from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, Engine, exists, false, func, inspect, literal, or_, select, table
from sqlalchemy import column as named
from sqlalchemy import exc as sa

from siltstone.catalog.database.engine import WRITE, redacted_url
from siltstone.catalog.database.tables import METADATA, REVISION, REVISION_TABLE
from siltstone.errors import UsageError

MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADE = "stop what runs on it, then `siltstone upgrade`"
_LOCK = 0x5117_5707E
"""PostgreSQL advisory lock: one process upgrades, the others wait"""
_UNDEFINED = ("42703", "42P01")
"""SQLSTATE: undefined column, undefined table"""
_ALEMBIC = Lock()
"""Alembic keeps its environment in a global, so only one thread of a process may use it at a time"""


def revision(connection: Connection) -> str | None:
    """Return the catalog's revision; None if the database has no catalog."""
    if not inspect(connection).has_table(REVISION_TABLE):
        return None
    return connection.scalar(select(named("version_num")).select_from(table(REVISION_TABLE)))


def create_tables(engine: Engine) -> None:
    """Make the tables if there are none, in one transaction, safe for many processes at once.

    Raises:
        UsageError: there are tables of another revision; nothing is changed.
    """
    with engine.connect() as connection:
        if is_current(connection):
            return
    with engine.execution_options(**{WRITE: True}).begin() as connection:
        lock_upgrades(connection)
        if not is_current(connection):
            make_tables(connection)


def make_tables(connection: Connection) -> None:
    """Make the current tables in an empty database, in the connection's transaction."""
    run_migrations(connection, REVISION)


def is_current(connection: Connection) -> bool:
    """Whether the tables are the current ones; False if there are none.

    Raises:
        UsageError: they have an older or newer revision, or lack columns of their own.
    """
    found, url = revision(connection), redacted_url(connection.engine.url)
    if found is None:
        return False
    if found != REVISION:
        check_not_newer(found, url)
        raise UsageError(
            f"the catalog {url} was made by an older Siltstone (catalog revision {found}, this one needs {REVISION}): "
            f"{UPGRADE}"
        )
    if not _has_columns(connection):
        raise UsageError(
            f"the catalog {url} has revision {found} but lacks some of its columns, as one that a commit before 0.1.0 "
            "made: name another catalog with --catalog, and another warehouse, and run its streams again"
        )
    return True


def check_not_newer(found: str, url: str) -> None:
    """Check that this Siltstone knows the revision; `url` is the catalog's URL without its password.

    Raises:
        UsageError: it does not.
    """
    if found not in revisions():
        raise UsageError(
            f"the catalog {url} was written by a newer Siltstone (revision {found}): upgrade siltstone, or name "
            "another catalog with --catalog; what commits before 0.1.0 wrote is not read"
        )


def revisions() -> list[str]:
    """Return all revisions, oldest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()][::-1]


def lock_upgrades(connection: Connection) -> None:
    """Make other processes that make or change tables wait until the transaction ends; SQLite always does that."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def run_migrations(connection: Connection, to: str) -> None:
    """Migrate the tables, or make them, to the revision `to`, in the connection's transaction."""
    # Imported here: Alembic is needed only when tables change, not for every command.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, to)


def _has_columns(connection: Connection) -> bool:
    """Whether every table has every column, by one statement that names them all and reads nothing."""
    tables = [exists(select(*each.c).where(false())) for each in METADATA.sorted_tables]
    try:
        connection.execute(select(literal(1)).where(or_(*tables)))
    except sa.DBAPIError as error:
        undefined = str(error.orig).startswith("no such ") or getattr(error.orig, "sqlstate", None) in _UNDEFINED
        if not undefined:
            raise
        return False
    return True
