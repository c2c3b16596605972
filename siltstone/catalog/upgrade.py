"""Brings a catalog's tables to the revision this code is written for, with Alembic, inside the program."""

from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, Engine, func, inspect, select, table
from sqlalchemy import column as named

from siltstone.catalog.engine import WRITE
from siltstone.catalog.tables import REVISION, REVISION_TABLE
from siltstone.errors import UsageError

MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 0x5117_5707E
"""PostgreSQL advisory lock: one process upgrades, the others wait"""
_ALEMBIC = Lock()
"""Alembic keeps its environment in a global: one thread of a process at a time"""


def revision(connection: Connection) -> str | None:
    """The catalog's revision; None where there is no catalog in the database."""
    if not inspect(connection).has_table(REVISION_TABLE):
        return None
    return connection.scalar(select(named("version_num")).select_from(table(REVISION_TABLE)))


def migrate(engine: Engine) -> None:
    """Create the tables, or upgrade older ones: in one transaction, safe for many processes at once.

    Raises:
        UsageError: a newer Siltstone wrote the catalog; nothing is changed.
    """
    with engine.connect() as connection:
        if revision(connection) == REVISION:
            return
    with engine.execution_options(**{WRITE: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        _upgrade(connection, revision(connection))


def _upgrade(connection: Connection, found: str | None) -> None:
    if found == REVISION:
        return
    # Imported here: Alembic is needed once in the life of a catalog, not at every command.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise UsageError(f"the catalog was written by a newer Siltstone (revision {found}): upgrade siltstone")
    with _ALEMBIC:
        command.upgrade(config, "head")
