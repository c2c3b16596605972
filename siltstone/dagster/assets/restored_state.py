"""The asset `<stream>/restored_state`: the state as it was, day by day or hour by hour, rebuilt and proven."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.failures import told_clearly
from siltstone.dagster.names import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE, asset_key, dagster_name, pool
from siltstone.dagster.partitions import CheckpointGone, checkpoint_of, partitions_of
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import ProofFailed
from siltstone.restore.series import RestoredLabel
from siltstone.store.open import Warehouse
from siltstone.stream import Stream

if TYPE_CHECKING:
    from siltstone.spark.operations import SeriesResult


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

        with told_clearly():
            from siltstone.spark.operations import restore_series

            settings = warehouse.settings(spark, parallelism=config.parallelism)
            root = Warehouse.at(settings.warehouse).local.restored_series(stream.name)
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                labels = _labels(context, place.catalog, stream)
            result = restore_series(settings, stream.name, labels, tell)
            _check_proven(result)
        for label in result.kept:
            tell(label, anew=False)
        checkpoints = len({label.checkpoint for label in result.restored})
        context.log.info(
            f"{len(result.restored)} partitions restored of {checkpoints} checkpoints in {result.seconds:.1f} s, "
            f"{len(result.kept)} lay there proven, below {root}"
        )
        yield from ()

    return restored_state


def _labels(context: dg.AssetExecutionContext, catalog: Catalog, stream: Stream) -> dict[str, int]:
    """The checkpoint of each partition of the run; of many partitions, one whose checkpoint is gone is only told of."""
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


def _check_proven(result: "SeriesResult") -> None:
    """ProofFailed if a checkpoint could not be restored; all others were."""
    if result.failed:
        first, good = result.failed[0], len(result.restored) + len(result.kept)
        raise ProofFailed(f"{len(result.failed)} checkpoints are not restored, {good} labels are: {first.reason}")


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
