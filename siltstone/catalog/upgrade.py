"""Which revision a catalog's tables are of, and Alembic, inside the program, that brings them to a newer one.

A catalog without tables gets those of today. One that has tables of another revision is never changed by being opened:
processes of an older Siltstone may be at work on it. `catalog.upgrading` upgrades it when people say so.
"""

from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, Engine, exists, false, func, inspect, literal, or_, select, table
from sqlalchemy import column as named
from sqlalchemy import exc as sa

from siltstone.catalog.engine import WRITE, redacted_url
from siltstone.catalog.tables import METADATA, REVISION, REVISION_TABLE
from siltstone.errors import UsageError

MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADE = "stop what runs on it, then `siltstone upgrade`"
_LOCK = 0x5117_5707E
"""PostgreSQL advisory lock: one process upgrades, the others wait"""
_ALEMBIC = Lock()
"""Alembic keeps its environment in a global: one thread of a process at a time"""
_UNDEFINED = ("42703", "42P01")
"""SQLSTATE: undefined column, undefined table"""


def revision(connection: Connection) -> str | None:
    """The catalog's revision; None where there is no catalog in the database."""
    if not inspect(connection).has_table(REVISION_TABLE):
        return None
    return connection.scalar(select(named("version_num")).select_from(table(REVISION_TABLE)))


def create_tables(engine: Engine) -> None:
    """Make the tables where there are none, in one transaction, safe for many processes at once.

    Raises:
        UsageError: there are some, of another revision; nothing is changed.
    """
    with engine.connect() as connection:
        if is_current(connection):
            return
    with engine.execution_options(**{WRITE: True}).begin() as connection:
        lock_upgrades(connection)
        if not is_current(connection):
            make_tables(connection)


def make_tables(connection: Connection) -> None:
    """Make today's tables where there are none, in the connection's transaction."""
    run_migrations(connection, REVISION)


def is_current(connection: Connection) -> bool:
    """Whether the tables are today's; False where there are none.

    Raises:
        UsageError: they are of another revision, older or newer, or of none that was released; says what to do.
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
            f"the catalog {url} says that it is of revision {found}, and lacks some of that revision's columns, as one "
            f"does that a version before the first release has made: {UPGRADE}"
        )
    return True


def check_not_newer(found: str, url: str) -> None:
    """Make sure that the revision is one that this Siltstone knows; `url` is the catalog as people may see it.

    Raises:
        UsageError: it is not.
    """
    if found not in revisions():
        raise UsageError(
            f"the catalog {url} was written by a newer Siltstone (revision {found}): upgrade siltstone, or name "
            "another catalog with --catalog"
        )


def revisions() -> list[str]:
    """Every revision there is, oldest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()][::-1]


def lock_upgrades(connection: Connection) -> None:
    """Let other processes that make or change tables wait until the transaction ends; one that writes SQLite does."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def run_migrations(connection: Connection, to: str) -> None:
    """Bring the tables to the revision `to`, from the one they are of or from none, in the connection's transaction."""
    # Imported here: Alembic is needed once in the life of a catalog, not at every command.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, to)


def _has_columns(connection: Connection) -> bool:
    """Whether every table has every column: one statement that names them all, and reads nothing."""
    tables = [exists(select(*each.c).where(false())) for each in METADATA.sorted_tables]
    try:
        connection.execute(select(literal(1)).where(or_(*tables)))
    except sa.DBAPIError as error:
        undefined = str(error.orig).startswith("no such ") or getattr(error.orig, "sqlstate", None) in _UNDEFINED
        if not undefined:
            raise
        return False
    return True
