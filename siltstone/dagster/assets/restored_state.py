"""The asset `<stream>/restored_state`: the state as it was, day by day or hour by hour, rebuilt and proven."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import told_clearly
from siltstone.dagster.names import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE, asset_key, dagster_name, pool
from siltstone.dagster.partitions import CheckpointGone, checkpoint_of, partitions_of
from siltstone.dagster.quiet import without_beta_warnings
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import ProofFailed, UnknownCheckpoint
from siltstone.restore.restore import read_manifest
from siltstone.restore.series import RestoredLabel, prove_label, read_label
from siltstone.store.open import Warehouse
from siltstone.stream import Stream

if TYPE_CHECKING:
    from siltstone.spark.operations import SeriesResult


RESTORED_EQUALS_CHECKPOINT = "restored_equals_checkpoint"


class RestoredStateConfig(dg.Config):
    """How to restore."""

    parallelism: int | None = Field(default=None, description="tasks an operator; default Spark's own")


@without_beta_warnings()
def restored_state_asset(stream: Stream, automation: dg.AutomationCondition | None = None) -> dg.AssetsDefinition:
    """The restored state of one stream, with a check for each partition.

    Any range of partitions is one run, and each appears as soon as it is whole. The check reads the partition's files
    again and compares them with its checkpoint; it can be run by itself, and then nothing is restored.
    """

    @dg.multi_asset(
        name=dagster_name(stream.name, RESTORED_STATE),
        specs=[_asset_spec(stream, automation)],
        check_specs=[_check_spec(stream)],
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
        pool=pool(stream.name, "restore"),
        op_tags={"siltstone/stream": stream.name, "siltstone/operation": "restore"},
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
            settings = warehouse.settings(spark, parallelism=config.parallelism)
            root = Warehouse.at(settings.warehouse).local.restored_series(stream.name)
            if context.selected_asset_keys:
                with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                    labels = _labels(context, place.catalog, stream)
                result = Client(settings).stream(stream.name).restore_series(labels, tell)
                for label in result.kept:
                    tell(label, anew=False)
                context.log.info(_summary(result))
                _check_proven(result)
            if context.selected_asset_check_keys:
                with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                    for key in context.partition_keys:
                        context.log_event(_evaluation(place, stream, key))  # pyright: ignore[reportArgumentType]
        yield from ()

    return restored_state


def _asset_spec(stream: Stream, automation: dg.AutomationCondition | None) -> dg.AssetSpec:
    return dg.AssetSpec(
        asset_key(stream.name, RESTORED_STATE),
        deps=[asset_key(stream.name, CHECKPOINTS), asset_key(stream.name, MATERIALIZATION)],
        partitions_def=partitions_of(stream),
        skippable=True,
        automation_condition=automation,
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        description=(
            f"The state of `{stream.name}` as it was, rebuilt from bases and deltas alone, every digest compared, as "
            "plain Parquet: one directory for each partition, operator and table."
        ),
    )


def _check_spec(stream: Stream) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        RESTORED_EQUALS_CHECKPOINT,
        asset=asset_key(stream.name, RESTORED_STATE),
        partitions_def=partitions_of(stream),
        description="The files of the partition, read again, have exactly the rows that its checkpoint had: the "
        "digests of their rows add up to those recorded while the stream ran.",
    )


def _summary(result: "SeriesResult") -> str:
    checkpoints = len({label.checkpoint for label in result.restored})
    return (
        f"{len(result.restored)} partitions restored of {checkpoints} checkpoints in {result.seconds:.1f} s, "
        f"{len(result.kept)} lay there proven, below {result.root}"
    )


def _evaluation(place: OpenWarehouse, stream: Stream, partition: str) -> dg.AssetCheckEvaluation:
    """Whether the files of one partition are the state of its checkpoint."""
    root = place.warehouse.local.restored_series(stream.name)
    label = read_label(root, partition)
    found: dict[str, Any] = {"checkpoint": label.checkpoint, "digest": label.digest} if label else {}
    severity = dg.AssetCheckSeverity.ERROR
    if label is None:
        reason = "nothing was restored here: materialize the partition"
    else:
        try:
            recorded = place.catalog.checkpoints.get(stream.name, label.checkpoint)
            reason = prove_label(root, partition, read_manifest(place.warehouse.store, recorded.manifest))
        except UnknownCheckpoint:
            reason = f"checkpoint {label.checkpoint} was deleted: there is nothing to compare with any more"
            severity = dg.AssetCheckSeverity.WARN
    return dg.AssetCheckEvaluation(
        asset_key=asset_key(stream.name, RESTORED_STATE),
        check_name=RESTORED_EQUALS_CHECKPOINT,
        passed=reason is None,
        severity=severity,
        description=reason or "the files have exactly the rows of the checkpoint",
        metadata=found,
        partition=partition,
    )


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
