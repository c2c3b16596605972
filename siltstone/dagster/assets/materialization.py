"""The asset `<stream>/materialization`: chains consolidated into new bases."""

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import RETRIES, report_errors
from siltstone.dagster.fields import Flag, Number, Text
from siltstone.dagster.metadata import materialize_result
from siltstone.dagster.names import NO_OPTIONS, Keys, OpOptions, asset_key, dagster_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.pipes.outcomes import outcome_of_materialization
from siltstone.pipes.parts import CHECKPOINTS, MATERIALIZATION
from siltstone.stream import Stream


class MaterializationConfig(dg.Config):
    """The chains to consolidate."""

    at: Text = Field(default="latest", description="checkpoint id, commit time, savepoint or latest")
    operators: list[Text] = Field(default=[], description="names of operators; default all")
    due: Flag = Field(default=False, description="only operators that are due by [materialization] in siltstone.toml")
    parallelism: Number | None = Field(default=None, description="tasks per operator; default Spark's number of cores")


def materialization_asset(stream: Stream, op: OpOptions = NO_OPTIONS) -> dg.AssetsDefinition:
    """Make the materialization asset of a stream. The stream may run meanwhile."""

    @dg.asset(
        key=asset_key(stream.name, MATERIALIZATION),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        retry_policy=RETRIES,
        op_tags=op.tags_of(stream.name, "materialize"),
        pool=op.pool_of(stream.name, "materialize"),
        description=(
            f"The chains of `{stream.name}` up to a checkpoint, consolidated into new bases that are proven before "
            "they are used. Restores of that checkpoint and of later ones begin with them."
        ),
    )
    def materialization(
        context: dg.AssetExecutionContext,
        config: MaterializationConfig,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
    ) -> dg.MaterializeResult:
        with report_errors():
            settings = siltstone_warehouse.settings(siltstone_spark, parallelism=config.parallelism)
            done = (
                Client(settings)
                .stream(stream.name)
                .materialize(at=config.at, operators=config.operators, due=config.due)
            )
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                outcome = outcome_of_materialization(place, done)
            return materialize_result(outcome, Keys.of(context.assets_def.specs))

    return materialization
