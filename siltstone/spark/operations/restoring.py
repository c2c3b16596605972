"""Restore a checkpoint's state."""

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import ProofFailed, Unreachable
from siltstone.format.manifests import read_manifests
from siltstone.restore.export import (
    recorded_digest,
    restore_unit,
    select_tables,
    staged_directory,
    unit_tasks,
    whole_digest,
)
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.run.definition import check_parallelism
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.times import parse_time


@dataclass(frozen=True)
class RestoreResult(Result):
    """The outcome of a restore.

    Attributes:
        digest: of the restored state, or of the part of it that was asked for.
        proven: whether it is the recorded one.
    """

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float
    digest: str
    proven: bool
    path: str | None = None


@needs_spark
def restore(
    settings: Settings,
    stream: str,
    *,
    at: str = "latest",
    as_of: str | None = None,
    to: Path | None = None,
    only: Sequence[str] = (),
) -> RestoreResult:
    """Restore key-group ranges in Spark tasks, under a lease (`StreamClient.restore`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        catalog, store, local = warehouse.catalog, warehouse.warehouse.store, warehouse.warehouse.local
        checkpoint = (
            catalog.checkpoints.as_of(stream, parse_time(as_of)) if as_of else catalog.checkpoints.resolve(stream, at)
        )
        record = catalog.checkpoints.get(stream, checkpoint)
        check_parallelism(settings.parallelism or 1, catalog.streams.get(stream).max_parallelism)
        with (
            nullcontext() if to is None else staged_directory(to) as staged,
            hold_lease(catalog, stream, [checkpoint], what="restores"),
        ):
            spark = spark_session(settings.master, settings.spark)
            start = time.perf_counter()
            manifests = read_manifests(store, catalog.chains.list_manifests(stream, checkpoint), stream)
            parallelism = settings.parallelism or cores(spark)
            manifest = manifests[checkpoint]
            wanted = select_tables(manifest, only) if only else None
            tasks, size = unit_tasks(manifests, checkpoint, parallelism, staged, wanted)
            results = spark_map(
                spark, lambda task: restore_unit(store, task, local.scratch()), tasks, on=warehouse.warehouse
            )
            digest = whole_digest(results, manifest.max_parallelism)
            recorded = record.digest if wanted is None else recorded_digest(manifest, wanted)
            if digest != recorded:
                raise ProofFailed(
                    f"checkpoint {checkpoint} of {stream}: digest {digest} is not the recorded {recorded}"
                )
            seconds = time.perf_counter() - start
            if wanted is None:
                slowest = round(max((result.seconds for result in results), default=0.0), 6)
                with suppress(Unreachable):  # the restore is done; only the policies would have learned from it
                    catalog.checkpoints.record_restore(
                        stream, checkpoint, epoch=record.epoch, restore_s=slowest, restore_bytes=size
                    )
    rows = sum(result.rows for result in results)
    return RestoreResult(stream, checkpoint, rows, size, round(seconds, 3), digest, True, str(to) if to else None)
