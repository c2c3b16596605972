"""Change the parallelism of a stream."""

import time
from dataclasses import dataclass
from typing import Any

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.compare_digests import check_same_digests
from siltstone.format.manifests import read_manifest
from siltstone.result import Result
from siltstone.settings import Settings
from siltstone.spark.operations.changing import check_changeable, hold_epoch_for_change
from siltstone.spark.session import needs_spark, spark_session
from siltstone.spark.step import StepRun
from siltstone.stream import Stream


@dataclass(frozen=True)
class RescaleResult(Result):
    """The outcome of a rescale.

    Attributes:
        before: the parallelism before.
        rows, bytes: rows of state, and bytes read from the store.
        proven: whether the digests per operator, variable and key group are unchanged.
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
    """Take a step without rows at the new parallelism, and compare digests (`StreamClient.rescale`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        options = check_changeable(warehouse.catalog, stream, parallelism)
        spark = spark_session(settings.master, settings.spark)
        start = time.perf_counter()
        with hold_epoch_for_change(
            settings.model_copy(update={"parallelism": parallelism}), stream, warehouse, spark, options
        ) as runner:
            region, store = runner.region, warehouse.warehouse.store
            before = warehouse.catalog.checkpoints.get(stream.name, region.completed)
            manifest = read_manifest(store, before.manifest, stream.name)
            read = 0

            def check(run: StepRun) -> dict[str, Any]:
                nonlocal read
                check_same_digests(manifest.digests, region.digests())
                read = sum(a.restored_bytes for received in run.received.values() for a in received)
                return {"parallelism": parallelism}

            completed = runner.change(changed=check)
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
