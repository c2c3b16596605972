"""Upgrades a catalog to today's revision: a backup first, then everything in one transaction that also fences.

The transaction locks all writers out before it looks who is at work, and what it backs up is what it changes. Killed
anywhere, the catalog is the old one or the new one; done again, it finishes, or finds nothing to do. Runs that have not
ended are given epochs that end them: an older process that wakes up after all can commit nothing (promise 5).
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, MetaData, select, text

from siltstone.catalog.backup import Backup, default_file, existing_revision, open_database, write_backup
from siltstone.catalog.engine import WRITE, redacted_url
from siltstone.catalog.processes import is_known_dead, is_known_gone
from siltstone.catalog.runs import end_runs, take_over
from siltstone.catalog.shapes import check_carried, differences, rebuild, row_counts, tables_found, tables_made_by
from siltstone.catalog.tables import REVISION
from siltstone.catalog.transactions import database_time
from siltstone.catalog.upgrade import is_current, lock_upgrades, run_migrations
from siltstone.errors import Unreachable, UsageError
from siltstone.result import Result
from siltstone.times import as_utc

_KEPT = ("stream", "checkpoint", "object", "step", "savepoint", "snapshot", "deletion")
"""tables that an upgrade leaves with as many rows as they had"""


@dataclass(frozen=True, slots=True)
class Upgraded(Result):
    """What an upgrade did.

    Attributes:
        before: the revision that the catalog was of.
        after: the one it is of now.
        rebuilt: what its tables lacked of the revision that they said, and have now.
        fenced: streams whose last run had not ended, and was given up.
        backup: what it held before; None if there was nothing to do.
    """

    before: str
    after: str
    rebuilt: Sequence[str]
    fenced: Sequence[str]
    backup: Backup | None


def upgrade_catalog(
    url: str, directory: Path, *, file: Path | None = None, fence: bool = False, who: str = "siltstone upgrade"
) -> Upgraded:
    """Upgrade the catalog at `url`; one of today's revision is left as it is.

    Args:
        directory: where the backup goes if it is not given a file of its own and the catalog is not in one.
        file: the backup, which must not exist.
        fence: end runs and readers that are, or may be, at work.
        who: tells people which process this is.

    Raises:
        NoCatalog: there is none.
        UsageError: a newer Siltstone wrote it, somebody is at work on it, or it cannot be upgraded without loss;
            nothing was changed.
        Unreachable: the database failed, or the backup could not be written: do it again.
    """
    with open_database(url) as engine:
        with engine.connect() as connection:
            before = existing_revision(connection)
            if before == REVISION and _fits(connection):
                return Upgraded(before, before, (), (), None)
        with engine.connect().execution_options(**{WRITE: True}) as connection:
            _let_tables_be_replaced(connection)
            with connection.begin():
                return _upgrade(connection, directory, file, fence, who)


def _upgrade(connection: Connection, directory: Path, file: Path | None, fence: bool, who: str) -> Upgraded:
    lock_upgrades(connection)
    before = existing_revision(connection)
    made = tables_made_by(before)
    found = tables_found(connection, made.tables)
    lacking = differences(found, made)
    if before == REVISION and not lacking:  # another process was first
        return Upgraded(before, before, (), (), None)
    check_carried(connection, found, made)
    _lock_writers(connection, found)
    open_runs = _check_stopped(connection, found, fence)
    backup = write_backup(connection, before, file or default_file(connection.engine.url, directory, before))
    counts = row_counts(connection, found)
    if lacking:
        rebuild(connection, before, found, made)
    run_migrations(connection, REVISION)
    _verify(connection, counts)
    now = database_time(connection)
    for stream in open_runs:
        epoch = take_over(connection, stream, who, now)
        end_runs(connection, stream, epoch, "upgraded the catalog", now)
    return Upgraded(before, REVISION, lacking, open_runs, backup)


def _fits(connection: Connection) -> bool:
    try:
        return is_current(connection)
    except UsageError:
        return False


def _let_tables_be_replaced(connection: Connection) -> None:
    """SQLite: a table that others refer to cannot be dropped otherwise; `_verify` looks at what that kept."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        driver.execute("PRAGMA foreign_keys = OFF")


def _lock_writers(connection: Connection, found: MetaData) -> None:
    """Let nobody write until the transaction ends; on SQLite nobody can."""
    if connection.dialect.name == "postgresql":
        quote = connection.dialect.identifier_preparer.quote
        connection.execute(text(f"LOCK TABLE {', '.join(quote(name) for name in found.tables)} IN EXCLUSIVE MODE"))


def _check_stopped(connection: Connection, found: MetaData, fence: bool) -> list[str]:
    """The streams whose last run has not ended, once none of these runs, and no reader, is alive as far as one can see.

    Raises:
        UsageError: somebody may be at work, and is not to be fenced.
    """
    url, now = redacted_url(connection.engine.url), database_time(connection)
    runs = found.tables["run"].c
    open_ = connection.execute(select(runs.stream, runs.epoch, runs.who).where(runs.ended_at.is_(None))).all()
    alive = [f"a run of {stream} by {who}" for stream, _, who in open_ if not is_known_gone(who)]
    leases = found.tables.get("lease")
    if leases is not None:
        for lease in connection.execute(select(leases)).mappings():
            if as_utc(lease["expires_at"]) > now and not is_known_dead(lease.get("process")):
                until = f"{as_utc(lease['expires_at']):%H:%M:%S} UTC"
                alive.append(f"{lease['who']} on stream {lease['stream']} (its lease ends at {until} unless renewed)")
    if alive and not fence:
        raise UsageError(
            f"the catalog {url} is in use: {'; '.join(alive)}. Stop that first; of processes that are certain to have "
            "ended, `siltstone upgrade --fence` says so, and fences them"
        )
    return sorted({stream for stream, _, _ in open_})


def _verify(connection: Connection, before: dict[str, int]) -> None:
    """Make sure that today's tables are there, with all the rows that were."""
    made = tables_made_by(REVISION)
    found = tables_found(connection, made.tables)
    wrong = differences(found, made)
    after = row_counts(connection, found)
    wrong += [
        f"{name} has {after[name]} rows of {before[name]}" for name in _KEPT if before.get(name, 0) != after[name]
    ]
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        wrong += [f"{len(broken)} rows refer to rows that are not there"] if broken else []
    if wrong:
        raise Unreachable(
            f"the upgraded catalog would not be as it should ({'; '.join(wrong)}), so it was left as it was: tell the "
            "makers of Siltstone"
        )
