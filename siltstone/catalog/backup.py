"""Backs a catalog up into one file, and brings it back from there, whatever database it is in.

A backup is a SQLite database that holds the tables of the catalog's revision and all of their rows as they were at one
moment, while runs may go on. It is a catalog itself: `--catalog sqlite:///BACKUP` reads from it. Of a SQLite catalog it
is SQLite's own online backup, page by page; of PostgreSQL it is read in one snapshot.

It gets its name once it is whole, synced and checked. A process that is killed before leaves `NAME.part`, which the
next one to the same name removes (`drafts`); of a backup that was given no name, the next one in that directory.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, MetaData, delete

from siltstone.catalog.drafts import SQLITE_FILES, remove_leftovers, whole_file
from siltstone.catalog.engine import WRITE, open_engine, parse_url, redacted_url, translate_errors
from siltstone.catalog.open import check_file, no_catalog
from siltstone.catalog.shapes import copy_rows, differences, row_counts, tables_found, tables_made_by
from siltstone.catalog.tables import REVISION_TABLE
from siltstone.catalog.upgrade import check_not_newer, lock_upgrades, revision, run_migrations
from siltstone.errors import Unreachable, UsageError
from siltstone.result import Result
from siltstone.store.paths import CATALOG_BACKUPS, catalog_backup
from siltstone.store.private import make_private_directory

_SQLITE = "sqlite:///"
_TIMEOUT_S = 10.0
_LOCKED_S = 60.0
"""how long a SQLite database is waited for that another process has locked against readers"""


@dataclass(frozen=True, slots=True)
class Backup(Result):
    """A catalog in a file: its revision, and how many rows it holds."""

    file: str
    revision: str
    rows: int
    bytes: int


@contextmanager
def open_database(url: str) -> Iterator[Engine]:
    """The database of the catalog at `url`, whatever revision its tables are of; its errors are ours.

    Raises:
        NoCatalog: there is no file.
        Unreachable: it cannot be read or written.
    """
    parsed = parse_url(url)
    if parsed.drivername == "sqlite":
        check_file(Path(str(parsed.database)), parsed, create=False)
    engine = open_engine(parsed, create=False, timeout_s=_TIMEOUT_S)
    try:
        with translate_errors(parsed):
            yield engine
    finally:
        engine.dispose()


def existing_revision(connection: Connection) -> str:
    """The revision of a catalog that must be there, and not newer than this Siltstone.

    Raises:
        NoCatalog: there is none.
        UsageError: a newer Siltstone wrote it.
    """
    found = revision(connection)
    if found is None:
        raise no_catalog(connection.engine.url)
    check_not_newer(found, redacted_url(connection.engine.url))
    return found


def back_up(url: str, file: Path | None, directory: Path) -> Backup:
    """Back the catalog at `url` up into `file`, which must not exist, while it may be written.

    Args:
        file: None for a name with the time in it, beside a SQLite catalog, for another in `directory`.

    Raises:
        NoCatalog: there is none.
        UsageError: a newer Siltstone wrote it, or the file is there already or cannot be there.
        Unreachable: the catalog cannot be read, or the file cannot be written; there is no backup.
    """
    with open_database(url) as engine, engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        found = existing_revision(connection)
        return write_backup(connection, found, file or default_file(engine.url, directory, found))


def default_file(url: URL, directory: Path, revision: str) -> Path:
    """Where a backup of this moment goes that was given no name, once what killed ones left there is removed."""
    if url.drivername == "sqlite":
        directory = Path(str(url.database)).parent
    else:
        make_private_directory(directory)
    remove_leftovers(directory, CATALOG_BACKUPS)
    return catalog_backup(directory, datetime.now(UTC), revision)


def write_backup(connection: Connection, found: str, file: Path) -> Backup:
    """Write what the connection sees into `file`: of PostgreSQL, what its transaction does.

    Args:
        found: the catalog's revision.

    Raises:
        UsageError, Unreachable: as `back_up`.
    """
    with whole_file(file) as draft:
        if connection.dialect.name == "sqlite":
            _copy_pages(connection.engine, draft)
        else:
            url = f"{_SQLITE}{draft}"
            with open_database(url) as engine, engine.execution_options(**{WRITE: True}).begin() as target:
                _copy_tables(connection, target, found, tables_made_by(found))
        _settle(draft, "DELETE")
    return _described(file)


def bring_back(file: Path, url: str) -> Backup:
    """Make the catalog at `url`, where there is none, from a backup; it is of the backup's revision then.

    Raises:
        UsageError: the file is no backup, is damaged, or is of a newer Siltstone; or a catalog is there already.
        Unreachable: the catalog cannot be written; there is none then.
    """
    file = file.absolute()
    if not file.is_file():
        raise UsageError(f"there is no backup {file}: name a file that `siltstone backup` wrote")
    target = parse_url(url)
    with open_database(f"{_SQLITE}{file}") as engine, engine.connect() as source:
        found = existing_revision(source)
        if source.exec_driver_sql("PRAGMA quick_check").scalar() != "ok":
            raise UsageError(f"the backup {file} is damaged: take another one")
        if target.drivername == "sqlite":
            path = Path(str(target.database))
            check_file(path, target, create=True)
            with whole_file(path, _check_absent) as draft:
                _copy_pages(engine, draft)
                _settle(draft, "WAL")  # as every catalog that was made in its place
        else:
            _bring_rows_back(source, found, target)
    return _described(file)


def _check_absent(path: Path) -> None:
    """Nothing of another database may be there: SQLite would take its log for that of the one that is brought back."""
    there = [str(path) + suffix for suffix in SQLITE_FILES if os.path.lexists(str(path) + suffix)]
    if there:
        raise UsageError(
            f"a catalog is there already, and is left as it is: move {' and '.join(there)} away first, once nothing "
            "runs on it"
        )


def _copy_pages(engine: Engine, draft: Path) -> None:
    """Copy a SQLite database as it stands, in one step that sees one state of it."""
    until = time.monotonic() + _LOCKED_S

    def give_up(_status: int, remaining: int, _total: int) -> None:
        if remaining and time.monotonic() > until:
            raise Unreachable(
                f"cannot read the catalog {redacted_url(engine.url)}: another process has it locked; try again"
            )

    source = engine.raw_connection()  # one that writes would not be read from
    try:
        with closing(sqlite3.connect(draft)) as target:
            assert isinstance(source.driver_connection, sqlite3.Connection)
            source.driver_connection.backup(target, progress=give_up)
    finally:
        source.close()


def _copy_tables(source: Connection, target: Connection, found: str, made: MetaData) -> None:
    """Copy all rows of a catalog into a database of another kind that has none of its tables.

    Tables that are not those of their revision are copied as they are: an upgrade repairs them, there as here.

    Args:
        found: the catalog's revision.
        made: the tables that this revision makes.
    """
    there = tables_found(source, made.tables)
    if differences(there, made):
        there.create_all(target)
    else:
        run_migrations(target, found)
        target.execute(delete(made.tables[REVISION_TABLE]))
    copy_rows(source, target, there, made)


def _bring_rows_back(source: Connection, found: str, url: URL) -> None:
    made = tables_made_by(found)
    engine = open_engine(url, create=False, timeout_s=_TIMEOUT_S)
    try:
        with translate_errors(url), engine.begin() as target:
            lock_upgrades(target)
            taken = tables_found(target, made.tables).tables
            if taken:
                raise UsageError(
                    f"the database {redacted_url(url)} has tables {', '.join(sorted(taken))} already, and is left as "
                    "it is: name an empty database or schema"
                )
            _copy_tables(source, target, found, made)
    finally:
        engine.dispose()


def _settle(draft: Path, journal_mode: str) -> None:
    """Make the draft one file with this journal from now on, once SQLite finds it whole."""
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
        [(verdict,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise Unreachable(f"the copy {draft} is not whole ({verdict}): check the catalog's disk and the copy's")


def _described(file: Path) -> Backup:
    with open_database(f"{_SQLITE}{file}") as engine, engine.connect() as connection:
        found = existing_revision(connection)
        counts = row_counts(connection, tables_found(connection, tables_made_by(found).tables))
    return Backup(str(file), found, sum(counts.values()) - counts[REVISION_TABLE], file.stat().st_size)
