"""The asset `<stream>/restored_state`: one checkpoint's state, rebuilt from the store and proven."""

import dagster as dg
from pydantic import Field

from assets.failures import told_clearly
from assets.metadata import restored_metadata
from assets.names import CHECKPOINTS, RESTORED_STATE, asset_key, dagster_name
from jobs.restore_state import restore_state
from resources import SparkResource, WarehouseResource
from siltstone.stream import Stream


class RestoredStateConfig(dg.Config):
    """Which checkpoint to restore."""

    at: str = Field(default="latest", description="checkpoint id, commit time, or latest")
    as_of: str | None = Field(
        default=None, description="event time instead: the last checkpoint whose highest event time is not later"
    )
    parallelism: int | None = Field(default=None, description="tasks an operator; default Spark's own")


def restored_state_asset(stream: Stream) -> dg.AssetsDefinition:
    """The restored state of one stream; its data version is the digest of what was rebuilt."""

    @dg.asset(
        key=asset_key(stream.name, RESTORED_STATE),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        description=(
            f"The state of `{stream.name}` at one checkpoint, rebuilt from base and deltas alone, with every digest "
            "compared, as plain Parquet: a directory an operator, a directory a table."
        ),
    )
    def restored_state(
        config: RestoredStateConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.MaterializeResult:
        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism)
            result = restore_state(settings, stream.name, at=config.at, as_of=config.as_of)
        return dg.MaterializeResult(metadata=restored_metadata(result), data_version=dg.DataVersion(result.digest))

    return restored_state
