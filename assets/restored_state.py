"""The asset `<stream>/restored_state`: the state as it was, day by day or hour by hour, rebuilt and proven."""

import dagster as dg
from pydantic import Field

from assets.failures import told_clearly
from assets.names import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE, asset_key, dagster_name, pool
from assets.partitions import checkpoint_of, partitions_of
from assets.stream_run import OWNERS
from jobs.restore_series import restore_series
from resources import SparkResource, WarehouseResource
from siltstone.lifecycle.series import RestoredLabel
from siltstone.stream import Stream


class RestoredStateConfig(dg.Config):
    """How to restore."""

    parallelism: int | None = Field(default=None, description="tasks an operator; default Spark's own")


def restored_state_asset(stream: Stream, automation: dg.AutomationCondition | None = None) -> dg.AssetsDefinition:
    """The restored state of one stream. Any range of partitions is one run, and each appears as soon as it is whole."""

    @dg.asset(
        key=asset_key(stream.name, RESTORED_STATE),
        deps=[asset_key(stream.name, CHECKPOINTS), asset_key(stream.name, MATERIALIZATION)],
        partitions_def=partitions_of(stream),
        backfill_policy=dg.BackfillPolicy.single_run(),
        automation_condition=automation,
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        owners=OWNERS,
        pool=pool(stream.name, "restore"),
        op_tags={"siltstone/stream": stream.name, "siltstone/operation": "restore"},
        description=(
            f"The state of `{stream.name}` as it was, rebuilt from bases and deltas alone, every digest compared, as "
            "plain Parquet: a directory a partition, an operator, a table."
        ),
    )
    def restored_state(
        context: dg.AssetExecutionContext,
        config: RestoredStateConfig,
        warehouse: WarehouseResource,
        spark: SparkResource,
    ) -> dg.MaterializeResult:
        partitions = list(context.partition_keys)

        def tell(label: RestoredLabel) -> None:
            context.log.info(f"{label.label}: checkpoint {label.checkpoint}, {label.rows:,} rows, proven")

        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism)
            result = restore_series(
                settings,
                stream.name,
                lambda catalog: {key: checkpoint_of(catalog, stream, key) for key in partitions},
                on_label=tell,
            )
        for label in (*result.restored, *result.kept):
            context.add_asset_metadata(
                {
                    "checkpoint": label.checkpoint,
                    "digest": label.digest,
                    "dagster/row_count": label.rows,
                    "path": dg.MetadataValue.path(f"{result.root}/{label.label}"),
                },
                partition_key=label.label,
            )
        return dg.MaterializeResult(
            metadata={
                "restored": len(result.restored),
                "kept": len(result.kept),
                "checkpoints": len({label.checkpoint for label in result.restored}),
                "seconds": result.seconds,
            }
        )

    return restored_state
