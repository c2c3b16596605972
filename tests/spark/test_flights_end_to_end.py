"""The whole year through Spark, in two runs of different parallelism, restored from its checkpoints: plain pandas."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.place import Place
from siltstone.errors import UsageError
from siltstone.lifecycle.export import UnitTask, rebuild
from siltstone.lifecycle.restore import MemoryState, read_manifests
from siltstone.model import KeyGroupRange
from siltstone.policy.restore_plan import plan_restore
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from streams import FLIGHTS
from streams.flights import ALERT
from tests.oracle_flights import all_flights, check, expected

WEEKS = 53


def restored(settings: Settings) -> dict[str, MemoryState]:
    """Operator -> its state at the newest checkpoint, rebuilt from the store alone."""
    with Place.existing(settings.warehouse) as place:
        store, catalog = place.warehouse.store, place.catalog
        newest = catalog.last_id(FLIGHTS.name)
        chain = [catalog.checkpoint(FLIGHTS.name, id).manifest for id in catalog.chain(FLIGHTS.name, newest)]
        manifests = read_manifests(store, chain)
    states = {}
    for op in FLIGHTS.operators:
        handles = {id: [h for h in m.handles if h.operator == op.name] for id, m in manifests.items()}
        whole = KeyGroupRange(0, FLIGHTS.max_parallelism)
        (unit,) = plan_restore(handles, newest, FLIGHTS.max_parallelism, 1, whole).units
        states[op.name] = rebuild(store, UnitTask(unit, manifests, newest, None))
    return states


def tables(states: dict[str, MemoryState]) -> dict[tuple[str, str], pa.Table]:
    return {
        (name, table): pa.concat_tables(rows for rows, _ in state.tables[table].scan(state.groups))
        for name, state in states.items()
        for table in state.tables
    }


def test_the_year_ends_as_pandas_says(spark: SparkSession, tmp_path: Path) -> None:
    first = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=2)
    begun = run(first, FLIGHTS, RunRequest(batches=20))
    assert begun.checkpoints == list(range(1, 21))
    second = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=3)
    ended = run(second, FLIGHTS, RunRequest())
    assert ended.checkpoints == list(range(21, WEEKS + 1))
    assert run(second, FLIGHTS, RunRequest()).checkpoints == []

    wanted = expected(all_flights())
    states = restored(second)
    check(wanted, tables(states), states["aircraft"].opaque["delays"], FLIGHTS.max_parallelism)
    alerts = pq.read_table(tmp_path / "warehouse" / "sink" / "flights" / "aircraft")
    assert alerts.select(ALERT.names).cast(ALERT).sort_by("sequence").to_pylist() == wanted.alerts


def test_an_unknown_period_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    settings = Settings(warehouse=str(tmp_path / "warehouse"), parallelism=2)
    with pytest.raises(UsageError, match=r"period is 'hour': use day or week"):
        run(settings, FLIGHTS, RunRequest(options={"period": "hour"}))
    with Place.existing(settings.warehouse) as place:
        assert place.catalog.last_id(FLIGHTS.name) == 0
