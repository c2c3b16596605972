"""Decide what a stream's sinks are in a warehouse: its tables, Parquet files and topics, and the user's own.

An output whose definition names no sink goes to a Delta table. It goes to Parquet files on this machine instead if

    the stream has such files, or is recorded to write them: its rows are never split over two places. `DeltaSink()` in
    its definition changes over
    the warehouse is in Redis, Cassandra or RocksDB, where no other program could read a table, or delta-rs cannot open
    its path
"""

from dataclasses import replace
from typing import Any

from siltstone.catalog.records.streams import TABLE
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.run.dead_letters import LETTERS
from siltstone.run.processing import outputs_of
from siltstone.sinks.delta import DeltaSink, SinkTable
from siltstone.sinks.jdbc import JdbcSink, JdbcTable
from siltstone.sinks.kafka import KafkaSink, KafkaTopic
from siltstone.sinks.kafka_transactions import KafkaTransactions
from siltstone.sinks.parquet import ParquetSink
from siltstone.store.table_place import find_table_obstacle
from siltstone.stream import DEAD_LETTERS, Stream

DatabaseOrTopic = JdbcTable | KafkaTopic
"""what takes an output as it is staged, and records which ids it has"""


def resolve_sinks(stream: Stream, warehouse: OpenWarehouse) -> dict[str, Any]:
    """Map each sink's name to its `SinkTable`, `JdbcTable`, `KafkaTopic`, `ParquetSink` with a path, or the user's own.

    Raises:
        UsageError: a `DeltaSink` in a warehouse that cannot have tables.
    """
    transactions = KafkaTransactions(warehouse, stream.name)
    return {name: _resolve(stream, name, sink, warehouse, transactions) for name, sink in stream.sinks.items()}


def _resolve(stream: Stream, name: str, sink: Any, warehouse: OpenWarehouse, transactions: KafkaTransactions) -> Any:
    if isinstance(sink, JdbcSink):
        return JdbcTable(sink, warehouse, stream.name, name)
    if isinstance(sink, KafkaSink):
        return KafkaTopic(sink, warehouse, stream.name, name, stream.output_times.get(name), transactions)
    if not (sink is None or isinstance(sink, DeltaSink | ParquetSink)):
        return sink
    path = warehouse.warehouse.local.sink(stream.name) / name
    if isinstance(sink, ParquetSink):  # or a user's class derived from it
        return replace(sink, path=path) if sink.path is None else sink
    files = ParquetSink(path)
    store = warehouse.warehouse.store
    table, obstacle = SinkTable(store, stream.name, name), find_table_obstacle(store)
    if sink is None:
        if obstacle is not None or files.list_published():
            return files
        # A catalog that was rebuilt does not say how the stream began, but then the table is there.
        return table if _begins_with_tables(stream, warehouse) or table.open() is not None else files
    if obstacle is not None:
        raise UsageError(
            f"the sink of {name} is a Delta table, and {obstacle}: give the stream a ParquetSink, which writes on this "
            "machine, or a function, or a warehouse in another directory or in S3"
        )
    return table


def _begins_with_tables(stream: Stream, warehouse: OpenWarehouse) -> bool:
    recorded = next((s for s in warehouse.catalog.streams.list() if s.name == stream.name), None)
    return recorded is None or recorded.default_sink == TABLE


def tables_of(sinks: dict[str, Any]) -> frozenset[str]:
    """Return the names of the resolved sinks that are Delta tables, for which tasks stage the tables' own files."""
    return frozenset(name for name, sink in sinks.items() if isinstance(sink, SinkTable))


def check_sinks(stream: Stream, sinks: dict[str, Any]) -> None:
    """Check that the outputs of a stream can go on in its tables and topics, before a run takes the stream over.

    Raises:
        UsageError: a column has a type or a name that its table cannot have, or another type than in the table; or see
            `KafkaTopic.check`.
        Unreachable, StateError: the database of a table does not answer; or see `KafkaTopic.check`.
    """
    schemas = outputs_of(stream.operators) | {DEAD_LETTERS: LETTERS}
    for name, sink in sinks.items():
        if isinstance(sink, SinkTable | DatabaseOrTopic):
            sink.check(schemas[name])
