"""The asset `<stream>/full_snapshot`: the live state copied in full, an independent witness for restores."""

import dagster as dg

from assets.failures import told_clearly
from assets.names import CHECKPOINTS, FULL_SNAPSHOT, asset_key, dagster_name, pool
from assets.stream_run import OWNERS
from jobs.take_snapshot import take_snapshot
from resources import SparkResource, WarehouseResource
from siltstone.stream import Stream


def full_snapshot_asset(stream: Stream) -> dg.AssetsDefinition:
    """The full snapshot of one stream's newest checkpoint."""

    @dg.asset(
        key=asset_key(stream.name, FULL_SNAPSHOT),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        owners=OWNERS,
        pool=pool(stream.name, "snapshot"),
        op_tags={"siltstone/stream": stream.name, "siltstone/operation": "snapshot"},
        description=(
            f"The live state of `{stream.name}` at its newest checkpoint, read from where the stream keeps it and not "
            "from the changelog, to compare restores with. It can only be taken where the stream ran."
        ),
    )
    def full_snapshot(warehouse: WarehouseResource, spark: SparkResource) -> dg.MaterializeResult:
        with told_clearly():
            taken = take_snapshot(warehouse.settings(spark), stream.name)
        return dg.MaterializeResult(
            metadata={
                "checkpoint": taken.checkpoint,
                "dagster/row_count": taken.rows,
                "bytes": taken.bytes,
                "seconds": taken.seconds,
            }
        )

    return full_snapshot
