"""The asset `<stream>/full_snapshot`: a full copy of the live state, to compare restores with."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import RETRIES, report_errors
from siltstone.dagster.fields import Flag
from siltstone.dagster.metadata import materialize_result
from siltstone.dagster.names import NO_OPTIONS, Keys, OpOptions, asset_key, dagster_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import NoLiveState
from siltstone.pipes.outcomes import newest_snapshot
from siltstone.pipes.parts import CHECKPOINTS, FULL_SNAPSHOT
from siltstone.settings import Settings
from siltstone.stream import Stream


class FullSnapshotConfig(dg.Config):
    """What to do if the snapshot cannot be taken."""

    if_possible: Flag = Field(default=False, description="if the live state is not available, log that and succeed")


def full_snapshot_asset(stream: Stream, op: OpOptions = NO_OPTIONS) -> dg.AssetsDefinition:
    """Make the asset of a full snapshot of a stream's newest checkpoint."""

    @dg.asset(
        key=asset_key(stream.name, FULL_SNAPSHOT),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        output_required=False,
        retry_policy=RETRIES,
        op_tags=op.tags_of(stream.name, "snapshot"),
        pool=op.pool_of(stream.name, "snapshot"),
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
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                outcome = newest_snapshot(place, stream.name)
        outcome.metadata.update(taken="now" if taken else "before", **taken)
        yield materialize_result(outcome, Keys.of(context.assets_def.specs))

    return full_snapshot


def _has_snapshot(settings: Settings, stream: str) -> bool:
    """Whether the newest checkpoint has a full snapshot. The state of a checkpoint never changes."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        newest = place.catalog.checkpoints.get_latest(stream).id
        return any(snapshot.checkpoint == newest for snapshot in place.catalog.reference_copies.list(stream))
