"""Moves a stream to another parallelism."""

import time
from dataclasses import dataclass
from typing import Any

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rescale import check_same_digests
from siltstone.restore.restore import read_manifest
from siltstone.result import Result
from siltstone.settings import Settings
from siltstone.spark.operations.changing import check_changeable, taken_over
from siltstone.spark.session import needs_spark, spark_session
from siltstone.spark.step import StepRun
from siltstone.stream import Stream


@dataclass(frozen=True)
class RescaleResult(Result):
    """A stream's state at another parallelism: `before` is the old one, `bytes` what was read from the store.

    `proven`: the digests per operator, variable and key group are those of before; else nothing was changed.
    """

    stream: str
    checkpoint: int
    parallelism: int
    before: int
    rows: int
    bytes: int
    seconds: float
    digest: str
    proven: bool


@needs_spark
def rescale(settings: Settings, stream: Stream, parallelism: int) -> RescaleResult:
    """Restore the newest checkpoint at another parallelism, prove it, and make it a checkpoint that later runs begin
    with, at that parallelism unless they name one. A run at work is fenced.

    Raises:
        UnknownStream, UnknownCheckpoint: it has never run here, or completed nothing.
        UsageError: more parallelism than key groups.
        CorruptObject, ProofFailed: the chain is damaged; the stream is as it was.
    """
    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as warehouse:
        options = check_changeable(warehouse.catalog, stream, parallelism)
        spark = spark_session(settings.master, settings.spark)
        start = time.perf_counter()
        with taken_over(
            settings.model_copy(update={"parallelism": parallelism}), stream, warehouse, spark, options
        ) as runner:
            region, store = runner.region, warehouse.warehouse.store
            before = warehouse.catalog.checkpoints.get(stream.name, region.completed)
            manifest = read_manifest(store, before.manifest, stream.name)
            read = 0

            def proven(run: StepRun) -> dict[str, Any]:
                nonlocal read
                check_same_digests(manifest.digests, region.digests())
                read = sum(a.restored_bytes for received in run.received.values() for a in received)
                return {"parallelism": parallelism}

            completed = runner.step_without_input(changed=proven)
        seconds = round(time.perf_counter() - start, 3)
    return RescaleResult(
        stream=stream.name,
        checkpoint=completed.id,
        parallelism=parallelism,
        before=before.statistics["parallelism"],
        rows=completed.state_rows,
        bytes=read,
        seconds=seconds,
        digest=completed.digest,
        proven=True,
    )
