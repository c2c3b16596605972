"""What tests ask of runs under Spark: their settings, what they recorded, and what is restored."""

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from siltstone.catalog.records.streams import StreamRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings
from siltstone.spark.operations import restore, verify


def at(path: Path, **options: object) -> Settings:
    """Settings with a warehouse there, and two subtasks per operator."""
    return Settings(warehouse=str(path), **{"parallelism": 2, **options})


def digests(settings: Settings, stream: str) -> dict[int, str]:
    """Step of every checkpoint -> digest."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        steps = {
            s.checkpoint: s.step
            for s in place.catalog.input_log.list(stream, place.catalog.checkpoints.last_id(stream))
        }
        return {steps[c.id]: c.digest for c in place.catalog.checkpoints.list(stream)}


def recorded(settings: Settings, stream: str) -> tuple[StreamRecord, int, int]:
    """All that a run that is refused must leave alone."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        catalog = place.catalog
        return catalog.streams.get(stream), len(catalog.runs.list(stream)), catalog.checkpoints.last_id(stream)


def check_proven(settings: Settings, stream: str) -> None:
    """Every checkpoint restores."""
    result = verify(settings, stream, every=True)
    assert result.proven and not result.failed


def read_parquet_sink(warehouse: Path, stream: str, output: str) -> pa.Table:
    """The rows that a sink of Parquet files got, each with its checkpoint."""
    partitioning = ds.partitioning(pa.schema([("checkpoint", pa.int64())]), flavor="hive")
    return pq.read_table(warehouse / "sink" / stream / output, partitioning=partitioning)


def state(settings: Settings, stream: str, operator: str, table: str, to: Path) -> pa.Table:
    """A table of the newest checkpoint, restored."""
    restore(settings, stream, to=to)
    return pq.read_table(to / operator / table)
