"""Copy the live state in full."""

import os
import time
from dataclasses import dataclass

from pyspark.sql import SparkSession

from siltstone.catalog.extract_writer import try_write_extract
from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import NoLiveState, UsageError
from siltstone.format.manifests import read_manifest
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.run.snapshot import pin_states, snapshot_tasks, take_snapshot
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.masters import is_local
from siltstone.spark.session import needs_spark, spark_session

_ATTEMPTS = 5


@dataclass(frozen=True)
class SnapshotResult(Result):
    """The outcome of a snapshot: its rows and bytes."""

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float


@needs_spark
def snapshot(settings: Settings, stream: str) -> SnapshotResult:
    """Write pinned live state in Spark tasks, under a lease (`StreamClient.snapshot`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        for _ in range(_ATTEMPTS):
            record = place.catalog.checkpoints.get_latest(stream)
            try:
                return _take(place, settings, stream, record)
            except NoLiveState:
                # A run may have completed another checkpoint, and let the state of this one go.
                if place.catalog.checkpoints.get_latest(stream).id == record.id:
                    raise
        raise NoLiveState(
            f"{stream} completes checkpoints faster than a snapshot begins", advice="try again, or when it pauses"
        )


def _take(place: OpenWarehouse, settings: Settings, stream: str, record: CheckpointRecord) -> SnapshotResult:
    catalog, warehouse = place.catalog, place.warehouse
    epoch = catalog.streams.get(stream).epoch
    if any(s.checkpoint == record.id for s in catalog.reference_copies.list(stream)):
        raise UsageError(f"checkpoint {record.id} of {stream} already has a snapshot: run the stream first")
    # The lease also protects objects that are written and not recorded yet.
    with hold_lease(catalog, stream, [record.id], what="takes a snapshot"):
        spark = spark_session(settings.master, settings.spark)
        if isinstance(spark, SparkSession) and not is_local(spark.sparkContext.master):
            raise NoLiveState(
                f"the live state of {stream} is with the executors of its run, and a snapshot's tasks run on any",
                advice="take snapshots of streams that run on a local master (--master 'local[*]')",
            )
        start = time.perf_counter()
        manifest = read_manifest(warehouse.store, record.manifest, stream)
        tasks = snapshot_tasks(warehouse, manifest, settings.backend, f"s{os.getpid()}-{time.time_ns():x}")
        with pin_states(tasks) as held:
            parts = spark_map(spark, take_snapshot, held)
        objects = [stored for part in parts for stored in part.objects]
        rows = sum(part.rows for part in parts)
        catalog.reference_copies.add(stream, epoch, record.id, objects, rows)
        try_write_extract(place, stream)
    seconds = round(time.perf_counter() - start, 3)
    return SnapshotResult(stream, record.id, rows, sum(o.bytes for o in objects), seconds)
