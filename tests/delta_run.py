"""A stream whose sink is a Delta table, run without Spark, and what is in the table."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.sinks.delta import SinkTable
from siltstone.stream import DEAD_LETTERS
from tests.outbox_run import NAME, SINK, Heard, Outboxed

TABLES = frozenset({SINK, DEAD_LETTERS})


class TableRun(Outboxed):
    """One run of the stream, which delivers to the tables of its sinks."""

    def __init__(self, place: OpenWarehouse, **options: Any) -> None:
        self.given: list[int] = []
        """ids that were handed to the table"""
        super().__init__(place, Heard(), tables=TABLES, **options)

    def give(self, output: OutputRecord) -> None:
        """Hand one output over."""
        self.given.append(output.sink_id)
        SinkTable(self.region.warehouse.store, output.stream, output.name).deliver(output)


def read_sink(root: Path | str, stream: str, sink: str) -> pa.Table:
    """What a reader of the table of a sink sees, in a warehouse of files."""
    return DeltaTable(str(Path(root) / "objects" / "_sinks" / stream / sink)).to_pyarrow_table()


def sink_table(place: OpenWarehouse, stream: str = NAME, sink: str = SINK) -> SinkTable:
    """The table of the sink."""
    return SinkTable(place.warehouse.store, stream, sink)


def rows_in(place: OpenWarehouse, stream: str = NAME, sink: str = SINK, column: str = "n") -> list[Any]:
    """What a reader of the table sees of one column."""
    table = sink_table(place, stream, sink).open()
    return [] if table is None else sorted(table.to_pyarrow_table().column(column).to_pylist())


def table_directory(place: OpenWarehouse, stream: str = NAME, sink: str = SINK) -> Path:
    """Where the table is in a warehouse of files."""
    return place.warehouse.local.objects / "_sinks" / stream / sink


def table_files(place: OpenWarehouse, stream: str = NAME, sink: str = SINK) -> set[str]:
    """Names of the Parquet files below the table's directory, whether in its log or not."""
    return {name for name, _ in place.warehouse.store.list(f"_sinks/{stream}/{sink}/") if name.endswith(".parquet")}
