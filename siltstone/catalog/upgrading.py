"""Upgrade a catalog to the current revision: back up, migrate and fence in one transaction.

The transaction locks out all writers before it checks who is using the catalog, so the backup is exactly what it
changes. If it is killed, the catalog is either the old or the new one; running it again finishes, or finds nothing to
do. Runs that have not ended are fenced by new epochs: an older process that wakes up can commit nothing (promise 5).
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, MetaData, select, text

from siltstone.catalog.backup import (
    Backup,
    default_file,
    existing_revision,
    open_database,
    row_counts,
    tables_made_by,
    write_backup,
)
from siltstone.catalog.database.engine import WRITE, redacted_url
from siltstone.catalog.database.tables import REVISION
from siltstone.catalog.database.transactions import database_time
from siltstone.catalog.database.upgrade import lock_upgrades, run_migrations
from siltstone.catalog.records.processes import is_known_dead, is_known_gone
from siltstone.catalog.records.runs import end_runs, take_over
from siltstone.errors import Unreachable, UsageError
from siltstone.result import Result
from siltstone.times import as_utc

_KEPT = ("stream", "checkpoint", "object", "step", "savepoint", "reference_copy", "deletion")
"""tables whose number of rows an upgrade does not change"""


@dataclass(frozen=True, slots=True)
class Upgraded(Result):
    """The result of an upgrade.

    Attributes:
        before: the old revision.
        after: the new revision.
        fenced: streams whose last run had not ended, and was fenced.
        backup: the catalog before the upgrade; None if there was nothing to do.
    """

    before: str
    after: str
    fenced: Sequence[str]
    backup: Backup | None


def upgrade_catalog(
    url: str, directory: Path, *, file: Path | None = None, fence: bool = False, who: str = "siltstone upgrade"
) -> Upgraded:
    """Upgrade the catalog at `url`; one of the current revision is not changed.

    Args:
        directory: where the backup goes if `file` is not given and the catalog is not a SQLite file.
        file: the backup, which must not exist.
        fence: end runs and readers that are, or may be, using the catalog.
        who: this process's name for people.

    Raises:
        NoCatalog: the catalog does not exist.
        UsageError: a newer Siltstone wrote it, or it is in use; nothing was changed.
        Unreachable: the database failed, or the backup could not be written: try again.
    """
    with open_database(url) as engine:
        with engine.connect() as connection:
            before = existing_revision(connection)
            if before == REVISION:
                return Upgraded(before, before, (), None)
        with engine.connect().execution_options(**{WRITE: True}) as connection:
            _let_tables_be_replaced(connection)
            with connection.begin():
                return _upgrade(connection, directory, file, fence, who)


def _upgrade(connection: Connection, directory: Path, file: Path | None, fence: bool, who: str) -> Upgraded:
    lock_upgrades(connection)
    before = existing_revision(connection)
    if before == REVISION:  # another process was first
        return Upgraded(before, before, (), None)
    found = tables_made_by(before)
    _lock_writers(connection, found)
    open_runs = _check_stopped(connection, found, fence)
    backup = write_backup(connection, before, file or default_file(connection.engine.url, directory, before))
    counts = row_counts(connection, found)
    run_migrations(connection, REVISION)
    _verify(connection, counts)
    now = database_time(connection)
    for stream in open_runs:
        epoch = take_over(connection, stream, who, now)
        end_runs(connection, stream, epoch, "upgraded the catalog", now)
    return Upgraded(before, REVISION, open_runs, backup)


def _let_tables_be_replaced(connection: Connection) -> None:
    """Turn off SQLite's foreign keys: tables that others refer to could not be dropped. `_verify` checks them."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        driver.execute("PRAGMA foreign_keys = OFF")


def _lock_writers(connection: Connection, found: MetaData) -> None:
    """Lock out other writers until the transaction ends; SQLite does so by itself."""
    if connection.dialect.name == "postgresql":
        quote = connection.dialect.identifier_preparer.quote
        connection.execute(text(f"LOCK TABLE {', '.join(quote(name) for name in found.tables)} IN EXCLUSIVE MODE"))


def _check_stopped(connection: Connection, found: MetaData, fence: bool) -> list[str]:
    """Check that no run and no reader seems to be alive, and return the streams whose last run has not ended.

    Raises:
        UsageError: a process may be using the catalog, and `fence` is false.
    """
    url, now = redacted_url(connection.engine.url), database_time(connection)
    runs = found.tables["run"].c
    open_ = connection.execute(select(runs.stream, runs.epoch, runs.who).where(runs.ended_at.is_(None))).all()
    alive = [f"a run of {stream} by {who}" for stream, _, who in open_ if not is_known_gone(who)]
    for lease in connection.execute(select(found.tables["lease"])).mappings():
        if as_utc(lease["expires_at"]) > now and not is_known_dead(lease["process"]):
            until = f"{as_utc(lease['expires_at']):%H:%M:%S} UTC"
            alive.append(f"{lease['who']} on stream {lease['stream']} (its lease ends at {until} unless renewed)")
    if alive and not fence:
        raise UsageError(
            f"the catalog {url} is in use: {'; '.join(alive)}. Stop that first; if these processes have certainly "
            "ended, use `siltstone upgrade --fence`, which fences them"
        )
    return sorted({stream for stream, _, _ in open_})


def _verify(connection: Connection, before: dict[str, int]) -> None:
    """Check that the current tables have all the rows from before."""
    after = row_counts(connection, tables_made_by(REVISION))
    wrong = [f"{name} has {after[name]} rows of {before[name]}" for name in _KEPT if before[name] != after[name]]
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        wrong += [f"{len(broken)} rows refer to missing rows"] if broken else []
    if wrong:
        raise Unreachable(
            f"the upgraded catalog would be wrong ({'; '.join(wrong)}), so it was not changed: report this to the "
            "makers of Siltstone"
        )
