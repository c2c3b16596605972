"""Tables of a SQL database as sinks: PostgreSQL or SQLite, through SQLAlchemy.

A delivery is one transaction of that database:

    lock      the sink's row in `siltstone_sinks`, which says the newest id whose rows the table has
    compare   if it has this id, nothing is left to do
    write     the staged objects, one after the other, in batches
    record    the id in that row, and commit

So each checkpoint's rows are in the table exactly once (promise 2), whatever dies: a delivery that comes again after
its commit, or whose commit got no answer, finds its id. Of two writers, one waits for the lock. An older writer that
wakes up later finds a newer id and writes nothing; if it is frozen within its transaction, the server ends that after a
while. The row's name is that of `sink_identity`.
"""

import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL, BigInteger, Column, Connection, Engine, MetaData, Table, Text, func, inspect, select, update
from sqlalchemy import exc as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Inspector

from siltstone.catalog.database.engine import WRITE, is_passing, open_engine, parse_url, redacted_url
from siltstone.catalog.database.transactions import Outages
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, Unreachable, UsageError
from siltstone.extras import check_extra
from siltstone.format.output import read_again, read_output, staged_schema
from siltstone.model import OUTAGE_S
from siltstone.secret import Secret, hide
from siltstone.sinks.identity import sink_identity
from siltstone.sinks.jdbc_columns import check_columns, check_length, make_columns, to_csv, to_rows
from siltstone.store.private import make_private_file

if TYPE_CHECKING:
    from siltstone.catalog.records.outbox import OutputRecord

MARKERS = "siltstone_sinks"
"""the table that says which ids sinks have; beside the table of the rows, in the same schema"""
BATCH_ROWS = 5_000
"""rows that are Python's values at once"""
_WAIT_S = 10.0
"""longest wait for a connection or a lock before the delivery begins again"""
_MAKING = 0x53494C5453494E4B
"""the advisory lock of PostgreSQL under which sinks make tables: CREATE TABLE IF NOT EXISTS alone may fail in a race"""
_FORMS = "use postgresql://USER@HOST/DATABASE or sqlite:///PATH"
_REFUSALS = (sa.IntegrityError, sa.DataError, sa.ProgrammingError, sa.NotSupportedError)
"""the database answers, and does not take what it was given"""
_OUTAGES = ("08", "25", "28", "3D", "40", "53", "57", "58", "XX")
"""SQLSTATE classes of what is wrong with the server or the connection; of all others the request is at fault"""


@dataclass(frozen=True, repr=False)
class JdbcSink:
    """A table of a SQL database, with each row of the output exactly once: in PostgreSQL, or in SQLite.

        st.JdbcSink("postgresql://app@db/sales", "orders", password=st.Secret("SALES_PASSWORD"))
        st.JdbcSink(st.Secret("SALES_URL"), "public.totals", key=["customer"])

    The table is made with the columns of the output if it is missing. If it exists, it must have a column for each, of
    a type that takes all values; further columns need a default, or may be null. Each checkpoint is one transaction.
    PostgreSQL needs `pip install 'siltstone[postgres]'`.

    Args:
        url: `postgresql://USER@HOST/DATABASE` or `sqlite:///PATH`, or a `Secret` that holds it.
        table: the table, as NAME or SCHEMA.NAME.
        key: columns that identify a row. With them a row replaces the one with the same key, and of a checkpoint's rows
            the last one of a key stays; the table must have a primary key or a unique constraint of these columns.
            Without them every row is added.
        password: of PostgreSQL's user; by default the one in the URL, or what libpq finds (`PGPASSFILE`).
    """

    url: str | Secret
    table: str
    key: str | Sequence[str] = ()
    password: Secret | None = None
    stages_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))
        if not all(self.table.split(".")) or self.table.count(".") > 1:
            raise UsageError(f"the table of a JdbcSink is {self.table!r}: use NAME or SCHEMA.NAME")
        if self.table.rpartition(".")[2].lower() == MARKERS:
            raise UsageError(f"a JdbcSink keeps its ids in the table {MARKERS}: name another for the rows")
        if isinstance(self.url, str):
            _parse(self.url)

    def __repr__(self) -> str:
        at = _show(_parse(self.url)) if isinstance(self.url, str) else str(self.url)
        return f"JdbcSink({at!r}, {self.table!r}, key={self.key!r})"


def open_url(sink: JdbcSink) -> URL:
    """Return the URL of a sink's database, with its password.

    Raises:
        UsageError: it is not one that a sink can have, or a secret is missing.
    """
    url = _parse(sink.url.read() if isinstance(sink.url, Secret) else sink.url)
    if sink.password is None:
        return url
    if url.drivername == "sqlite":
        raise UsageError("a JdbcSink to SQLite has no password: leave it out")
    return url.set(password=sink.password.read())


def _parse(url: str) -> URL:
    try:
        return parse_url(url)
    except UsageError:
        raise UsageError(f"the URL of a JdbcSink cannot be used: {_FORMS}") from None


def _show(url: URL) -> str:
    """Return the URL for people: without password, options and driver."""
    return redacted_url(url).replace("+psycopg", "", 1)


class JdbcTable:
    """The table of one sink of a stream; not safe for use by two threads. Nothing is opened before it is used."""

    def __init__(self, sink: JdbcSink, warehouse: OpenWarehouse, stream: str, operator: str) -> None:
        self.sink, self.stream, self.operator = sink, stream, operator
        self._warehouse, self._key = warehouse, tuple(sink.key)
        schema, _, self._name = sink.table.rpartition(".")
        self._schema = schema or None
        self._markers = Table(
            MARKERS,
            MetaData(),
            Column("sink", Text, primary_key=True),
            Column("id", BigInteger, nullable=False),
            schema=self._schema,
        )
        self._inserts: dict[pa.Schema, Any] = {}
        """of outputs with a schema, whose columns the table was found to have"""

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"stream {self.stream}: the JdbcSink of {self.operator}, table {self.table} in {self.url}"

    @property
    def url(self) -> str:
        """Where its database is, without the password."""
        return _show(self._url)

    @property
    def table(self) -> str:
        """The table, as NAME or SCHEMA.NAME."""
        return self.sink.table

    @cached_property
    def marker(self) -> str:
        """The name of its row in `siltstone_sinks`."""
        return sink_identity(self._warehouse, self.stream, self.operator)

    def check(self, schema: pa.Schema) -> None:
        """Check that rows of this schema can be written to it, and change nothing.

        Raises:
            UsageError: a column has a type that a database lacks, or not the one that the table has; or there can be no
                such database.
            Unreachable: the database does not answer.
        """
        columns = self._make_columns(schema)

        def look() -> None:
            with self._begin("to show its columns") as connection:
                found = inspect(connection)
                if self._schema is not None and self._schema not in found.get_schema_names():
                    raise UsageError(f"{self.label}: there is no schema {self._schema}: create it, or name another")
                if found.has_table(self._name, schema=self._schema):
                    self._check(found, columns)

        if self._is_there():
            self._outages.call(look)

    def deliver(self, output: "OutputRecord") -> None:
        """Write the rows of one checkpoint; does nothing if it has them.

        Raises:
            UsageError: as `check`.
            StateError: the database refuses the rows; none is written.
            CorruptObject: a staged object is missing, cut or altered, in two reads; none is written.
            Unreachable: the store or the database failed; whether the table has the rows is not known.
        """
        self._outages.call(lambda: read_again(lambda: self._deliver(output)))

    def find_delivered(self) -> int:
        """Return the newest id whose rows it has, 0 before the first.

        Raises:
            Unreachable: the database does not answer.
        """

        def look() -> int:
            with self._begin(f"to show {MARKERS}") as connection:
                there = inspect(connection).has_table(MARKERS, schema=self._schema)
                return self._read_marker(connection) if there else 0

        return self._outages.call(look) if self._is_there() else 0

    def list_published(self) -> tuple[set[int], int]:
        """Return ids whose rows it has, of those that are not older than the second: all older ones have been written.

        As `SinkTable.list_published`; only the newest id is recorded.
        """
        return set(), self.find_delivered() + 1

    def _deliver(self, output: "OutputRecord") -> None:
        insert = self._prepare(staged_schema(output.arrow_schema))
        first = self._insert(self._markers).values(sink=self.marker, id=0)
        first = first.on_conflict_do_nothing(index_elements=["sink"])
        with self._begin(f"the rows of checkpoint {output.checkpoint}") as connection:
            connection.execute(first)
            if self._read_marker(connection, lock=True) >= output.sink_id:
                return
            for stored in output.objects:
                for batch in read_output(self._warehouse.warehouse.store, stored, output.arrow_schema):
                    self._write(connection, insert, batch)
            mine = update(self._markers).where(self._markers.c.sink == self.marker)
            connection.execute(mine.values(id=output.sink_id))

    def _write(self, connection: Connection, insert: Any, batch: pa.RecordBatch) -> None:
        for name in self._key:
            # In SQLite not a number is null, too.
            if pc.any(pc.is_null(batch.column(name), nan_is_null=self._is_sqlite)).as_py():
                raise StateError(
                    f"{self.label}: column {name} of its key is null in a row of the output",
                    advice="a key finds the row to replace: leave out such rows, or name another key",
                )
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            if self._key or self._is_sqlite:
                connection.execute(insert, to_rows(part, self.label, sqlite=self._is_sqlite))
            else:
                _copy(connection, insert.table, part)

    def _prepare(self, schema: pa.Schema) -> Any:
        """Return the statement that writes rows of this schema; the first time, make the tables that are missing."""
        if schema in self._inserts:
            return self._inserts[schema]
        columns = self._make_columns(schema)
        if self._is_sqlite:
            make_private_file(Path(str(self._url.database)))
        table = Table(self._name, MetaData(), *columns, schema=self._schema)
        with self._begin("to make tables") as connection:
            if not self._is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(_MAKING)))
            self._markers.create(connection, checkfirst=True)
            table.create(connection, checkfirst=True)
            self._check(inspect(connection), columns)
        insert = self._insert(table)
        if self._key:
            others = {column.name: insert.excluded[column.name] for column in columns if column.name not in self._key}
            replace = {"index_elements": list(self._key)}
            insert = insert.on_conflict_do_update(**replace, set_=others) if others else insert.on_conflict_do_nothing()
        self._inserts[schema] = insert
        return insert

    def _check(self, found: Inspector, columns: Sequence[Column[Any]]) -> None:
        name, schema = self._name, self._schema
        check_columns(columns, found.get_columns(name, schema), self.label, sqlite=self._is_sqlite)
        if self._key and set(self._key) not in _unique_columns(found, name, schema):
            raise UsageError(
                f"{self.label}, has no primary key or unique constraint of the columns {', '.join(self._key)}, by "
                "which a row is found: add one, or name another key"
            )

    def _make_columns(self, schema: pa.Schema) -> list[Column[Any]]:
        check_length(self._name, f"{self.label}: the name", sqlite=self._is_sqlite)
        what = f"stream {self.stream}: the output of {self.operator}"
        return make_columns(schema, self._key, what, sqlite=self._is_sqlite)

    def _read_marker(self, connection: Connection, *, lock: bool = False) -> int:
        query = select(self._markers.c.id).where(self._markers.c.sink == self.marker)
        return connection.scalar(query.with_for_update() if lock else query) or 0

    def _insert(self, table: Table) -> Any:
        return sqlite.insert(table) if self._is_sqlite else postgresql.insert(table)

    def _is_there(self) -> bool:
        """Whether there may be a database; a missing file of SQLite is made by the first delivery.

        Raises:
            UsageError: there cannot be one.
        """
        path = Path(str(self._url.database))
        if not self._is_sqlite or path.is_file():
            return True
        if path.exists() or not path.parent.is_dir():
            raise UsageError(f"{self.label}: there can be no such file: name one in a directory that exists")
        return False

    @property
    def _is_sqlite(self) -> bool:
        return self._url.drivername == "sqlite"

    @cached_property
    def _url(self) -> URL:
        return open_url(self.sink)

    @cached_property
    def _outages(self) -> Outages:
        return Outages(self.label, OUTAGE_S, "the database of a sink")

    @cached_property
    def _engine(self) -> Engine:
        if not self._is_sqlite:
            check_extra("postgres", "psycopg", "a JdbcSink to PostgreSQL")
        engine = open_engine(self._url, create=False, timeout_s=_WAIT_S)
        weakref.finalize(self, engine.dispose)
        return engine.execution_options(**{WRITE: True})

    @contextmanager
    def _begin(self, what: str) -> Iterator[Connection]:
        """Begin a transaction for `what`, which is committed at the end, and translate the driver's errors.

        The driver's error is the cause, not SQLAlchemy's, which shows statements and values.

        Raises:
            StateError: the database refuses what it was given.
            Unreachable: anything else of the database; transient if the same may succeed a little later.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except (sa.DBAPIError, sa.TimeoutError) as error:
            cause = getattr(error, "orig", None)
            if _is_refusal(error):
                raise StateError(
                    f"{self.label}, which refuses {what}: {self._explain(error)}",
                    advice="correct the table or its permissions, or name the key by which rows are replaced, and run "
                    "again: what is not delivered comes first",
                ) from cause
            raise Unreachable(
                f"{self.label}, which cannot be used: {self._explain(error)}",
                advice="check that the database runs and takes connections, and the sink's URL and password",
                transient=is_passing(error),
            ) from cause

    def _explain(self, error: sa.SQLAlchemyError) -> str:
        lines = str(getattr(error, "orig", None) or error).strip().splitlines()
        return hide(lines[0].rstrip(" .;:") if lines else type(error).__name__, [self._url.password or ""])


def _is_refusal(error: sa.SQLAlchemyError) -> bool:
    """Whether the database answers, and would refuse the same again. Drivers call some of this operational."""
    if isinstance(error, _REFUSALS):
        return True
    orig = getattr(error, "orig", None)
    if isinstance(orig, sqlite3.Error):
        return getattr(orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_ERROR
    code = getattr(orig, "sqlstate", None)
    return code is not None and code[:2] not in _OUTAGES and not is_passing(error)


def _copy(connection: Connection, table: Table, batch: pa.RecordBatch) -> None:
    """Add rows to a table of PostgreSQL by COPY, which is several times as fast as INSERT.

    Raises:
        DBAPIError: the database failed or refused, as when SQLAlchemy executes a statement.
    """
    from psycopg import Error
    from psycopg.sql import SQL, Identifier

    # Not quoted by SQLAlchemy, which doubles each % for statements with parameters.
    place = Identifier(*filter(None, (table.schema, table.name)))
    columns = SQL(", ").join(Identifier(column.name) for column in table.columns)
    driver: Any = connection.connection.driver_connection
    statement = SQL("COPY {} ({}) FROM STDIN (FORMAT csv, ENCODING 'UTF8')").format(place, columns).as_string(driver)
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(to_csv(batch))
    except Error as error:
        raise sa.DBAPIError.instance(statement, None, error, Error) from error


def _unique_columns(found: Inspector, table: str, schema: str | None) -> list[set[str | None]]:
    """Return the sets of columns of which a table has each combination of values once."""
    unique: list[Sequence[str | None]] = [found.get_pk_constraint(table, schema)["constrained_columns"]]
    unique += [each["column_names"] for each in found.get_unique_constraints(table, schema)]
    for index in found.get_indexes(table, schema):
        is_partial = any(name.endswith("_where") for name in index.get("dialect_options", {}))
        if index["unique"] and not is_partial:
            unique.append(index["column_names"])
    return [set(columns) for columns in unique]
