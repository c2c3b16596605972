"""Back a catalog up into one file, and restore it from there into any kind of database.

A backup is a SQLite database with the tables of the catalog's revision and all their rows at one moment; runs may
continue meanwhile. It is a catalog itself: `--catalog sqlite:///BACKUP` reads from it. A SQLite catalog is copied by
SQLite's online backup, page by page; PostgreSQL is read in one snapshot.

The file gets its name once it is complete, synced and checked. A process that is killed before that leaves `NAME.part`,
which the next backup to the same name removes (`drafts`); for default names, the next backup in that directory.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Connection,
    Engine,
    Float,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.types import TypeEngine

from siltstone.catalog.database.column_types import UtcTime
from siltstone.catalog.database.engine import WRITE, open_engine, parse_url, redacted_url, translate_errors
from siltstone.catalog.database.tables import REVISION_TABLE
from siltstone.catalog.database.upgrade import check_not_newer, lock_upgrades, revision, run_migrations
from siltstone.catalog.drafts import SQLITE_FILES, remove_leftovers, whole_file
from siltstone.catalog.open import check_file, no_catalog
from siltstone.errors import Unreachable, UsageError
from siltstone.result import Result
from siltstone.store.paths import CATALOG_BACKUPS, catalog_backup
from siltstone.store.private import make_private_directory

_SQLITE = "sqlite:///"
_TIMEOUT_S = 10.0
_LOCKED_S = 60.0
"""seconds to wait for a SQLite database that another process has locked against readers"""
_ROWS = 500
"""rows copied at a time"""
_KINDS: Mapping[type, type[TypeEngine[Any]]] = {
    str: Text,
    bytes: LargeBinary,
    int: BigInteger,
    float: Float,
    bool: Boolean,
    datetime: UtcTime,
}
"""Python type of a column -> a column type that works in every database"""


@dataclass(frozen=True, slots=True)
class Backup(Result):
    """A catalog in a file: its revision, and the number of its rows."""

    file: str
    revision: str
    rows: int
    bytes: int


@contextmanager
def open_database(url: str) -> Iterator[Engine]:
    """Open the database of the catalog at `url`, whatever its revision, and translate its errors.

    Raises:
        NoCatalog: the file does not exist.
        Unreachable: the database cannot be read or written.
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
    """Return the revision of a catalog that must exist, and not be newer than this Siltstone.

    Raises:
        NoCatalog: the database has no catalog.
        UsageError: a newer Siltstone wrote it.
    """
    found = revision(connection)
    if found is None:
        raise no_catalog(connection.engine.url)
    check_not_newer(found, redacted_url(connection.engine.url))
    return found


def back_up(url: str, file: Path | None, directory: Path) -> Backup:
    """Back up the catalog at `url` into `file`, which must not exist; the catalog may be written meanwhile.

    Args:
        file: default a name with the current time, beside a SQLite catalog, else in `directory`.

    Raises:
        NoCatalog: the catalog does not exist.
        UsageError: a newer Siltstone wrote it, or the file exists or cannot be made.
        Unreachable: the catalog cannot be read, or the file cannot be written; there is no backup.
    """
    with open_database(url) as engine, engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        found = existing_revision(connection)
        return write_backup(connection, found, file or default_file(engine.url, directory, found))


def default_file(url: URL, directory: Path, revision: str) -> Path:
    """Return the default path of a backup taken now, after removing what killed backups left there."""
    if url.drivername == "sqlite":
        directory = Path(str(url.database)).parent
    else:
        make_private_directory(directory)
    remove_leftovers(directory, CATALOG_BACKUPS)
    return catalog_backup(directory, datetime.now(UTC), revision)


def write_backup(connection: Connection, found: str, file: Path) -> Backup:
    """Write what the connection sees into `file`; for PostgreSQL, what its transaction sees.

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
                _copy_tables(connection, target, found)
        _settle(draft, "DELETE")
    return _describe_backup(file)


def bring_back(file: Path, url: str) -> Backup:
    """Restore a backup to a new catalog at `url`, with the backup's revision.

    Raises:
        UsageError: the file is not a backup, is damaged, or is of a newer Siltstone; or a catalog exists at `url`.
        Unreachable: the catalog cannot be written; none was made.
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
                _settle(draft, "WAL")  # like every catalog that was created
        else:
            _bring_rows_back(source, found, target)
    return _describe_backup(file)


def _check_absent(path: Path) -> None:
    """Check that no file of another database exists: SQLite would apply its log to the restored one."""
    there = [str(path) + suffix for suffix in SQLITE_FILES if os.path.lexists(str(path) + suffix)]
    if there:
        raise UsageError(
            f"a catalog exists already, and was not changed: move {' and '.join(there)} away first, once nothing "
            "runs on it"
        )


def _copy_pages(engine: Engine, draft: Path) -> None:
    """Copy a SQLite database page by page, in one call that sees one state of it."""
    until = time.monotonic() + _LOCKED_S

    def give_up(_status: int, remaining: int, _total: int) -> None:
        if remaining and time.monotonic() > until:
            raise Unreachable(
                f"cannot read the catalog {redacted_url(engine.url)}: another process has it locked; try again"
            )

    source = engine.raw_connection()  # SQLite cannot copy from a connection in a write transaction
    try:
        with closing(sqlite3.connect(draft)) as target:
            assert isinstance(source.driver_connection, sqlite3.Connection)
            source.driver_connection.backup(target, progress=give_up)
    finally:
        source.close()


def _copy_tables(source: Connection, target: Connection, found: str) -> None:
    """Copy all rows of a catalog of revision `found` into a database of another kind that has none of its tables."""
    made = tables_made_by(found)
    run_migrations(target, found)
    target.execute(delete(made.tables[REVISION_TABLE]))
    for table in made.sorted_tables:  # each after those it refers to
        for part in _parts(source, table):
            target.execute(insert(table), part)


def _parts(source: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    """Yield a table's rows, some at a time; in table stream, parents come before their forks."""
    query = select(table)
    if "forked_from" not in table.c:
        with source.execute(query.execution_options(stream_results=True)) as rows:
            yield from ([dict(row) for row in part] for part in rows.mappings().partitions(_ROWS))
        return
    left = [dict(row) for row in source.execute(query).mappings()]
    carried: set[str | None] = {None}
    while left:
        ready = [row for row in left if row["forked_from"] in carried]
        if not ready:
            raise UsageError(f"a stream of {redacted_url(source.engine.url)} is a fork of one that is missing")
        carried |= {row["name"] for row in ready}
        left = [row for row in left if row["name"] not in carried]
        yield ready


@cache  # asked for several times, and Alembic makes them all
def tables_made_by(revision: str) -> MetaData:
    """Return the tables that a revision makes, including that of revisions, with column types that every database has.

    They are reflected from a database. Do not change the result.
    """
    engine = create_engine("sqlite://")
    made = MetaData()
    try:
        with engine.begin() as connection:
            run_migrations(connection, revision)
            made.reflect(connection)
    finally:
        engine.dispose()
    for table in made.tables.values():
        for column in table.c:
            column.type = _KINDS[column.type.python_type]()
    return made


def row_counts(connection: Connection, tables: MetaData) -> dict[str, int]:
    """Return table -> its number of rows."""
    counts = {name: select(func.count()).select_from(table) for name, table in tables.tables.items()}
    return {name: connection.scalar(count) or 0 for name, count in counts.items()}


def _bring_rows_back(source: Connection, found: str, url: URL) -> None:
    made = tables_made_by(found)
    engine = open_engine(url, create=False, timeout_s=_TIMEOUT_S)
    try:
        with translate_errors(url), engine.begin() as target:
            lock_upgrades(target)
            taken = made.tables.keys() & inspect(target).get_table_names()
            if taken:
                raise UsageError(
                    f"the database {redacted_url(url)} has tables {', '.join(sorted(taken))} already, and was not "
                    "changed: name an empty database or schema"
                )
            _copy_tables(source, target, found)
    finally:
        engine.dispose()


def _settle(draft: Path, journal_mode: str) -> None:
    """Set the draft's journal mode, so that it is one file, and check that SQLite finds it intact."""
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal_mode}")
        [(verdict,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise Unreachable(f"the copy {draft} is not whole ({verdict}): check the catalog's disk and the copy's")


def _describe_backup(file: Path) -> Backup:
    with open_database(f"{_SQLITE}{file}") as engine, engine.connect() as connection:
        found = existing_revision(connection)
        counts = row_counts(connection, tables_made_by(found))
    return Backup(str(file), found, sum(counts.values()) - counts[REVISION_TABLE], file.stat().st_size)
