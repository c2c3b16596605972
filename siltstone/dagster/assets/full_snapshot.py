"""The asset `<stream>/full_snapshot`: a full copy of the live state, to compare restores with."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import report_errors
from siltstone.dagster.fields import Flag
from siltstone.dagster.metadata import Metadata
from siltstone.dagster.names import CHECKPOINTS, FULL_SNAPSHOT, asset_key, dagster_name, pool, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import NoLiveState
from siltstone.settings import Settings
from siltstone.stream import Stream


class FullSnapshotConfig(dg.Config):
    """What to do if the snapshot cannot be taken."""

    if_possible: Flag = Field(default=False, description="if the live state is not available, log that and succeed")


def full_snapshot_asset(stream: Stream) -> dg.AssetsDefinition:
    """Make the asset of a full snapshot of a stream's newest checkpoint."""

    @dg.asset(
        key=asset_key(stream.name, FULL_SNAPSHOT),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        output_required=False,
        pool=pool(stream.name, "snapshot"),
        op_tags=run_tags(stream.name, "snapshot"),
        description=(
            f"The live state of `{stream.name}` at its newest checkpoint, copied from the stream's working state and "
            "not from the changelog, to compare restores with. It can only be taken on the machine that ran the stream."
        ),
    )
    def full_snapshot(
        context: dg.AssetExecutionContext,
        config: FullSnapshotConfig,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
    ) -> Iterator[dg.MaterializeResult]:
        with report_errors():
            settings = siltstone_warehouse.settings(siltstone_spark)
            taken = {}
            if not _has_snapshot(settings, stream.name):
                try:
                    taken = {"seconds": Client(settings).stream(stream.name).snapshot().seconds}
                except NoLiveState as error:
                    if not config.if_possible:
                        raise
                    context.log.warning(f"no snapshot was taken: {error}")
                    return
            metadata, digest = _describe_newest(settings, stream.name)
        metadata |= {"taken": "now" if taken else "before", **taken}
        yield dg.MaterializeResult(metadata=metadata, data_version=dg.DataVersion(digest))

    return full_snapshot


def _has_snapshot(settings: Settings, stream: str) -> bool:
    """Whether the newest checkpoint has a full snapshot. The state of a checkpoint never changes."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        newest = place.catalog.checkpoints.get_latest(stream).id
        return any(snapshot.checkpoint == newest for snapshot in place.catalog.reference_copies.list(stream))


def _describe_newest(settings: Settings, stream: str) -> tuple[Metadata, str]:
    """Describe the newest full snapshot; return its metadata and the digest of its checkpoint."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        snapshot = place.catalog.reference_copies.list(stream)[-1]
        digest = place.catalog.checkpoints.get(stream, snapshot.checkpoint).digest
    return {
        "checkpoint": snapshot.checkpoint,
        "digest": digest,
        "dagster/row_count": snapshot.rows,
        "bytes": snapshot.bytes,
    }, digest
