"""A stream whose sink is a table of a database, run without Spark, and what is in the table."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import Connection, create_engine, text

from siltstone.catalog.database.engine import parse_url
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.format.output import OutputWriter
from siltstone.sinks.jdbc import JdbcSink, JdbcTable
from siltstone.store.paths import CheckpointPath
from tests.outbox_run import NAME, SINK, Heard, Outboxed
from tests.places import place_at

TABLE = "tallied"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with place_at(tmp_path / "w") as opened:
        yield opened


@pytest.fixture
def sink(catalog_url: str) -> JdbcSink:
    """A sink that adds rows, in a database of each kind."""
    return JdbcSink(catalog_url.replace("catalog.db", "sales.db"), TABLE)


@pytest.fixture
def url(sink: JdbcSink) -> str:
    assert isinstance(sink.url, str)
    return sink.url


def written_by(place: OpenWarehouse, sink: JdbcSink) -> JdbcTable:
    """The table of a stream that has begun."""
    begin_stream(place)
    return JdbcTable(sink, place, NAME, SINK)


def is_postgres(url: str) -> bool:
    return url.startswith("postgresql")


class JdbcRun(Outboxed):
    """One run of the stream, which delivers to a table of a database."""

    def __init__(self, place: OpenWarehouse, sink: JdbcSink, **options: Any) -> None:
        self.table = JdbcTable(sink, place, NAME, SINK)
        self.given: list[int] = []
        """ids that were handed to the table"""
        super().__init__(place, Heard(), **options)

    def give(self, output: OutputRecord) -> None:
        """Hand one output over."""
        self.given.append(output.sink_id)
        self.table.deliver(output)


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """A connection of another program to the database."""
    engine = create_engine(parse_url(url))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def run_sql(url: str, *statements: str) -> None:
    """Change the database as another program does."""
    with connected(url) as connection:
        for statement in statements:
            connection.execute(text(statement))


def rows_in(url: str, query: str = f"SELECT n FROM {TABLE} ORDER BY n") -> list[Any]:
    """What another program reads of one column, or of several."""
    with connected(url) as connection:
        return [row[0] if len(row) == 1 else tuple(row) for row in connection.execute(text(query))]


def stage(place: OpenWarehouse, *parts: pa.Table, id: int = 1) -> OutputRecord:
    """Stage rows as the output of a checkpoint, each part as one object."""
    path = CheckpointPath(NAME, 1, id)
    objects = []
    for number, part in enumerate(parts):
        name = path.output(SINK, number, "staged")
        writer = OutputWriter(place.warehouse.store, lambda _, name=name: name, part.schema, inline_bytes=-1)
        for batch in part.to_batches():
            writer.add(batch)
        objects += writer.finish().objects
    schema, rows = parts[0].schema.serialize().to_pybytes(), sum(part.num_rows for part in parts)
    return OutputRecord(SINK, schema, rows, tuple(objects), NAME, id, id, 1, lost=False, delivered_at=None)


def begin_stream(place: OpenWarehouse) -> None:
    """Let the catalog know the stream, which has not run."""
    place.catalog.streams.register(NAME, 4, {"operators": {}, "options": {}})
