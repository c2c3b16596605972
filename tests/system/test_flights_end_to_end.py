"""Flights through Spark, in two runs of different parallelism, restored from their checkpoints: plain pandas.

`make test-thorough` takes the whole year, `make test` its first weeks (the demo takes the year, too).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import open_client
from siltstone.errors import UsageError
from siltstone.format.index import field_bytes
from siltstone.format.manifests import read_manifest
from siltstone.format.segment import Segment
from siltstone.model import Form, Kind
from siltstone.restore.restore import MemoryState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from streams import FLIGHTS
from streams.flights import ALERT, UNKNOWN
from streams.flights_data import SCHEMA, prepare
from tests.examples import is_thorough
from tests.fault.reference import restored
from tests.oracle_flights import all_flights, check, expected

WEEKS, AT_ONCE = (53, 8) if is_thorough() else (16, 4)
BATCHES = math.ceil(WEEKS / AT_ONCE)
ROWS_A_WEEK = 5_000
"""at least, on average"""
FIELDS_BYTES_MAX = 4
"""of the patent's four fields, an entry of the index"""


def some_weeks(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """The stream's own files, some in a micro-batch: steps cost more than rows here."""
    directory = Path(options["directory"])
    prepare(directory / "week", "week")
    (directory / "taken").mkdir(exist_ok=True)
    for path in sorted((directory / "week").iterdir())[:WEEKS]:
        taken = directory / "taken" / path.name
        if not taken.exists():
            os.link(path, taken)
    reader = spark.readStream.schema(from_arrow_schema(SCHEMA)).option("maxFilesPerTrigger", AT_ONCE)
    return reader.parquet((directory / "taken").as_uri()).withColumn("tailnum", F.coalesce("tailnum", F.lit(UNKNOWN)))


def tables(states: dict[str, MemoryState]) -> dict[tuple[str, str], pa.Table]:
    return {
        (name, table): pa.concat_tables(rows for rows, _ in state.tables[table].scan(state.groups))
        for name, state in states.items()
        for table in state.tables
    }


@pytest.mark.smoke
def test_flights_end_as_pandas_says(spark: SparkSession, tmp_path: Path) -> None:
    stream = replace(FLIGHTS, source=some_weeks)
    first = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=2)
    begun = run(first, stream, RunRequest(batches=2))
    assert begun.checkpoints == [1, 2]
    second = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=3)
    ended = run(second, stream, RunRequest())
    assert ended.checkpoints == list(range(3, BATCHES + 1))

    wanted = expected(all_flights().head(begun.rows + ended.rows))
    assert begun.rows + ended.rows > ROWS_A_WEEK * WEEKS
    with OpenWarehouse.open_existing(second.warehouse) as place:
        states = restored(place, FLIGHTS, place.catalog.checkpoints.last_id(FLIGHTS.name))
    check(wanted, tables(states), states["aircraft"].opaque["delays"], FLIGHTS.max_parallelism)
    alerts = open_client(tmp_path / "warehouse").stream("flights").sink_table("aircraft").to_pyarrow_table()
    assert alerts.select(ALERT.names).cast(ALERT).sort_by("sequence").to_pylist() == wanted.alerts
    the_four_fields_are_short(second)


def the_four_fields_are_short(settings: Settings) -> None:
    """Form, offset and what a delta builds on: few bytes an entry, for every operator, whatever the form."""
    found: dict[tuple[str, Form], list[float]] = {}
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        store = place.warehouse.store
        for record in place.catalog.checkpoints.list(FLIGHTS.name):
            handles = read_manifest(store, record.manifest).handles
            for index in (h for h in handles if h.kind is Kind.INDEX):
                mine = [h for h in handles if (h.operator, h.object) == (index.operator, index.object)]
                start = min(h.offset for h in mine if h.key_groups == index.key_groups)
                end = index.offset + index.length
                segment = Segment.unpack(store.read_range(index.object, start, end - start))
                entries = segment.entries()
                short = sum(field_bytes(segment.index).values()) / len(entries)
                found.setdefault((segment.operator, entries[0].form), []).append(short)
    assert {name for name, _ in found} == {op.name for op in FLIGHTS.operators}
    assert {form for _, form in found} == {Form.BASE, Form.DELTA}
    assert max(max(each) for each in found.values()) <= FIELDS_BYTES_MAX


def test_an_unknown_period_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    settings = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=2)
    with pytest.raises(UsageError, match=r"period is 'hour': use day or week"):
        run(settings, FLIGHTS, RunRequest(options={"period": "hour"}))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.streams.list() == []
