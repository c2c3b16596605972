"""The asset `<stream>/restored_state`: the state as it was, day by day or hour by hour, rebuilt and proven."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
from pydantic import Field

from assets.failures import told_clearly
from assets.names import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE, asset_key, dagster_name, pool
from assets.partitions import CheckpointGone, checkpoint_of, partitions_of
from assets.stream_run import OWNERS
from jobs.restore_series import restore_series
from resources import SparkResource, WarehouseResource
from siltstone.catalog.repository import Catalog
from siltstone.restore.series import RestoredLabel
from siltstone.store.open import Warehouse
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
        output_required=False,
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
    ) -> Iterator[dg.MaterializeResult]:
        # An event a partition, each with a digest of its own and as soon as it lies there: what Dagster makes of one
        # output has one data version for all of them, and comes when the last is done.
        def tell(label: RestoredLabel, anew: bool = True) -> None:
            context.log_event(_event(stream, label, root / label.label, anew))

        def labels(catalog: Catalog) -> Mapping[str, int]:
            found = {}
            for key in context.partition_keys:
                try:
                    found[key] = checkpoint_of(catalog, stream, key)
                except CheckpointGone as error:
                    if len(context.partition_keys) == 1:
                        raise
                    context.log.error(str(error))
                    context.log_event(_observation(stream, key, error))
            return found

        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism)
            root = Warehouse.at(settings.warehouse).local.restored_series(stream.name)
            result = restore_series(settings, stream.name, labels, on_label=tell)
        for label in result.kept:
            tell(label, anew=False)
        checkpoints = len({label.checkpoint for label in result.restored})
        context.log.info(
            f"{len(result.restored)} partitions restored of {checkpoints} checkpoints in {result.seconds:.1f} s, "
            f"{len(result.kept)} lay there proven, below {root}"
        )
        yield from ()

    return restored_state


def _observation(stream: Stream, partition: str, gone: CheckpointGone) -> dg.AssetObservation:
    return dg.AssetObservation(
        asset_key(stream.name, RESTORED_STATE), partition=partition, metadata={"cannot be restored": str(gone)}
    )


def _event(stream: Stream, label: RestoredLabel, path: Path, anew: bool) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        asset_key(stream.name, RESTORED_STATE),
        partition=label.label,
        metadata={
            "checkpoint": label.checkpoint,
            "digest": label.digest,
            "dagster/row_count": label.rows,
            "path": dg.MetadataValue.path(str(path)),
            "restored": "now" if anew else "before",
        },
        tags={"dagster/data_version": label.digest},
    )
