"""Compare a database's tables with those that its revision makes, and carry rows from one into the other.

Revisions 0001 and 0008 were edited before the first release, so a catalog may claim one of them and lack some of its
columns. Both are compared. The tables are then made again as the revision makes them, and the rows carried over; what
cannot be carried without loss is refused.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    LargeBinary,
    MetaData,
    Select,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    insert,
    inspect,
    literal_column,
    select,
    text,
)
from sqlalchemy.types import TypeEngine

from siltstone.catalog.column_types import UtcTime
from siltstone.catalog.engine import redacted_url
from siltstone.catalog.packing import pack
from siltstone.catalog.tables import REVISION_TABLE
from siltstone.catalog.upgrade import run_migrations
from siltstone.errors import UsageError

_KINDS: Mapping[type, type[TypeEngine[Any]]] = {
    str: Text,
    bytes: LargeBinary,
    int: BigInteger,
    float: Float,
    bool: Boolean,
    datetime: UtcTime,
}
"""Python type of a column -> a column type that works in every database"""
_ROWS = 500
"""rows carried at a time"""
_OLD = "superseded_"
_ALWAYS = frozenset({"stream", "run", "checkpoint", "object", "dependency", "step", "snapshot"})
"""tables that every catalog has had, as long as revisions made them"""
_PACKED = frozenset({("checkpoint", "statistics"), ("step", "offsets"), ("step", "sources")})
"""columns that were plain text once"""
_LEFT = frozenset({("materialization", "expires_at")})
"""columns that were removed: leases hold it now"""
_COMPUTED: Mapping[tuple[str, str], str] = {
    ("run", "first_checkpoint"): (
        "SELECT 1 + coalesce(max(c.id), 0) FROM {old}checkpoint c "
        "WHERE c.stream = {old}run.stream AND c.epoch < {old}run.epoch"
    ),
    ("output", "sink_id"): "{old}output.checkpoint",
}
"""columns that can be computed from others if they are missing"""


@cache  # an upgrade asks for each several times, and Alembic makes them all
def tables_made_by(revision: str) -> MetaData:
    """Return the tables that a revision makes, reflected from a database, including that of revisions. Do not change
    the result."""
    engine = create_engine("sqlite://")
    made = MetaData()
    try:
        with engine.begin() as connection:
            run_migrations(connection, revision)
            made.reflect(connection)
    finally:
        engine.dispose()
    return made


def tables_found(connection: Connection, names: Mapping[str, Any]) -> MetaData:
    """Return the existing tables among `names`: only their columns, with types that every database has."""
    inspector = inspect(connection)
    found = MetaData()
    for name in sorted(set(inspector.get_table_names()) & set(names)):
        keys = inspector.get_pk_constraint(name)["constrained_columns"]
        columns = [
            Column(c["name"], _KINDS[c["type"].python_type], primary_key=c["name"] in keys, nullable=c["nullable"])
            for c in inspector.get_columns(name)
        ]
        Table(name, found, *columns)
    return found


def differences(found: MetaData, made: MetaData) -> list[str]:
    """Describe what is missing, unexpected or of another type in the tables found; empty if they are as made."""
    told = []
    for table in made.tables.values():
        there = found.tables.get(table.name)
        if there is None:
            told.append(f"table {table.name} is missing")
            continue
        told += [f"{table.name} lacks {c.name}" for c in table.c if c.name not in there.c]
        told += [f"{table.name} has {c.name}" for c in there.c if c.name not in table.c]
        told += [
            f"{table.name} has {c.name} as {_kind(there.c[c.name]).__name__}"
            for c in table.c
            if c.name in there.c and _kind(there.c[c.name]) is not _kind(c)
        ]
    return told


def rebuild(connection: Connection, revision: str, found: MetaData, made: MetaData) -> None:
    """Replace the tables found with newly made ones of `revision`, and carry their rows over, in one transaction.

    On SQLite, foreign keys must be off. Call `check_carried` first, which refuses what cannot be carried over.
    """
    inspector = inspect(connection)
    connection.execute(text(f"DROP TABLE {REVISION_TABLE}"))
    carried = [name for name in found.tables if name != REVISION_TABLE]
    for name in carried:
        for index in inspector.get_indexes(name):
            if "duplicates_constraint" not in index:
                connection.execute(text(f"DROP INDEX {_quoted(connection, str(index['name']))}"))
        connection.execute(text(f"ALTER TABLE {_quoted(connection, name)} RENAME TO {_OLD}{name}"))
    run_migrations(connection, revision)
    for table in _in_order(found, made):
        if table.name in carried:
            target = tables_found(connection, {table.name: None}).tables[table.name]
            _carry(connection, connection, table.to_metadata(MetaData(), name=_OLD + table.name), target)
    old = [_OLD + name for name in carried]
    for each in [", ".join(old)] if connection.dialect.name == "postgresql" else old:
        connection.execute(text(f"DROP TABLE {each}"))


def copy_rows(source: Connection, target: Connection, tables: MetaData, made: MetaData) -> dict[str, int]:
    """Copy all rows of these tables into another database that has the same tables, empty; return table -> rows.

    Args:
        tables: the result of `tables_found` for the source.
        made: the same tables with foreign keys, which determine the order.
    """
    return {table.name: _carry(source, target, table, table) for table in _in_order(tables, made)}


def row_counts(connection: Connection, tables: MetaData) -> dict[str, int]:
    """Return table -> its number of rows."""
    quoted = {name: _quoted(connection, name) for name in tables.tables}
    return {n: connection.scalar(text(f"SELECT count(*) FROM {q}")) or 0 for n, q in quoted.items()}


def _in_order(tables: MetaData, made: MetaData) -> list[Table]:
    """Return the tables that are made, each after those it refers to."""
    return [tables.tables[table.name] for table in made.sorted_tables if table.name in tables.tables]


def _carry(source: Connection, target: Connection, table: Table, into: Table) -> int:
    """Carry a table's rows and return their number; pack columns that were plain text, and compute missing ones."""
    name = into.name
    packed = [c.name for c in into.c if c.name in table.c and _kind(c) is not _kind(table.c[c.name])]
    columns = [table.c[c.name] for c in into.c if c.name in table.c]
    columns += [
        literal_column(f"({_COMPUTED[name, c.name].format(old=_OLD)})").label(c.name)
        for c in into.c
        if c.name not in table.c and (name, c.name) in _COMPUTED
    ]
    carried = 0
    for part in _parts(source, table, select(*columns)):
        for row in part:
            row.update({column: pack(row[column]) for column in packed if row[column] is not None})
        target.execute(insert(into), part)
        carried += len(part)
    return carried


def _parts(source: Connection, table: Table, query: Select[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield a table's rows, some at a time; in table stream, parents come before their forks."""
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


def check_carried(connection: Connection, found: MetaData, made: MetaData) -> None:
    """Check that `rebuild` loses nothing.

    Raises:
        UsageError: something cannot be carried over; the message says what.
    """
    lost = [f"table {name} is missing" for name in sorted((_ALWAYS & made.tables.keys()) - found.tables.keys())]
    for table in found.tables.values():
        should = made.tables[table.name]
        for column in should.c:
            at, there = (table.name, column.name), table.c.get(column.name)
            if there is None and not (column.nullable or column.server_default or at in _COMPUTED):
                lost.append(f"{table.name} lacks {column.name}")
            if there is not None and _kind(there) is not _kind(column) and at not in _PACKED:
                lost.append(f"{table.name} has {column.name} of another type")
        lost += [
            f"{table.name} has {c.name}, which is not known"
            for c in table.c
            if c.name not in should.c and (table.name, c.name) not in _LEFT
        ]
    if lost:
        raise UsageError(
            f"the catalog {redacted_url(connection.engine.url)} cannot be upgraded without loss: {', '.join(lost)}; "
            "read it with the version of Siltstone that made it, and run its streams again into another warehouse"
        )


def _kind(column: Column[Any]) -> type:
    type_ = column.type
    return (type_.impl_instance if isinstance(type_, TypeDecorator) else type_).python_type


def _quoted(connection: Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote(name)
