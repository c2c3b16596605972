"""The asset `<stream>/restored_state`: the state as of each day or hour, restored and proven."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import RETRIES, report_errors
from siltstone.dagster.fields import Number
from siltstone.dagster.names import NO_OPTIONS, OpOptions, asset_key, dagster_name
from siltstone.dagster.partitions import CheckpointGone, checkpoint_of, forget_hours, partitions_of
from siltstone.dagster.quiet import without_beta_warnings
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import ProofFailed, UnknownCheckpoint
from siltstone.format.manifests import read_manifest
from siltstone.pipes.parts import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE
from siltstone.restore.series import RestoredLabel, prove_label, read_label
from siltstone.store.open import Warehouse
from siltstone.stream import Stream

if TYPE_CHECKING:
    from siltstone.spark.operations import SeriesResult


RESTORED_EQUALS_CHECKPOINT = "restored_equals_checkpoint"


class RestoredStateConfig(dg.Config):
    """Options of a restore."""

    parallelism: Number | None = Field(default=None, description="tasks per operator; default Spark's number of cores")


@without_beta_warnings()
def restored_state_asset(
    stream: Stream, automation: dg.AutomationCondition | None = None, op: OpOptions = NO_OPTIONS
) -> dg.AssetsDefinition:
    """Make the asset of a stream's restored state, with a check for each partition.

    One run restores any range of partitions, and each appears as soon as it is complete. The check reads the files of a
    partition again and compares them with its checkpoint; it can run alone, without a restore.
    """

    @dg.multi_asset(
        name=dagster_name(stream.name, RESTORED_STATE),
        specs=[_asset_spec(stream, automation)],
        check_specs=[_check_spec(stream)],
        backfill_policy=op.backfill_policy or dg.BackfillPolicy.single_run(),
        can_subset=True,
        retry_policy=RETRIES,
        op_tags=op.tags_of(stream.name, "restore"),
        pool=op.pool_of(stream.name, "restore"),
    )
    def restored_state(
        context: dg.AssetExecutionContext,
        config: RestoredStateConfig,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
    ) -> Iterator[dg.MaterializeResult]:
        # One event per partition, with its own digest and as soon as it is complete. The event that Dagster makes of an
        # output would have one data version for all partitions, and come after the last.
        def tell(label: RestoredLabel, is_new: bool = True) -> None:
            context.log_event(_event(asset, label, root / label.label, is_new))

        checks = context.selected_asset_check_keys
        (asset,) = {*context.selected_asset_keys, *(check.asset_key for check in checks)}
        with report_errors():
            settings = siltstone_warehouse.settings(siltstone_spark, parallelism=config.parallelism)
            root = Warehouse.at(settings.warehouse).local.restored_series(stream.name)
            keys, gone = list(context.partition_keys), dict[str, CheckpointGone]()
            if context.selected_asset_keys:
                with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                    labels, gone = _labels(place.catalog, stream, keys)
                for key, error in gone.items() if len(keys) > 1 else ():
                    context.log.error(str(error))
                    context.log_event(_observation(asset, key, error))
                if labels:
                    result = Client(settings).stream(stream.name).restore_series(labels, tell)
                    for label in result.kept:
                        tell(label, is_new=False)
                    context.log.info(_summary(result))
                    _check_proven(result)
            if checks:
                with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                    for key in keys:
                        context.log_event(_evaluation(place, stream, asset, key))  # pyright: ignore[reportArgumentType]
            if gone:  # last, because Dagster looks the run's partitions up while it is at work
                restored = context.instance.get_materialized_partitions(asset)
                forget_hours(context.instance, stream, gone.keys() - restored)
            if len(keys) == 1 and gone:
                raise gone[keys[0]]
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
            f"The state of `{stream.name}` as of each partition, restored from bases and deltas and proven by its "
            "digests, as plain Parquet: one directory per partition, operator and table."
        ),
    )


def _check_spec(stream: Stream) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        RESTORED_EQUALS_CHECKPOINT,
        asset=asset_key(stream.name, RESTORED_STATE),
        partitions_def=partitions_of(stream),
        description="The partition's files have exactly the rows of its checkpoint: the digests of their rows add up "
        "to those recorded while the stream ran.",
    )


def _summary(result: "SeriesResult") -> str:
    checkpoints = len({label.checkpoint for label in result.restored})
    return (
        f"{len(result.restored)} partitions restored from {checkpoints} checkpoints in {result.seconds:.1f} s, "
        f"{len(result.kept)} kept, below {result.root}"
    )


def _evaluation(place: OpenWarehouse, stream: Stream, asset: dg.AssetKey, partition: str) -> dg.AssetCheckEvaluation:
    """Evaluate whether the files of one partition are the state of its checkpoint."""
    root = place.warehouse.local.restored_series(stream.name)
    label = read_label(root, partition)
    found: dict[str, Any] = {"checkpoint": label.checkpoint, "digest": label.digest} if label else {}
    severity = dg.AssetCheckSeverity.ERROR
    if label is None:
        reason = "the partition was not restored: materialize it"
    else:
        try:
            recorded = place.catalog.checkpoints.get(stream.name, label.checkpoint)
            reason = prove_label(root, partition, read_manifest(place.warehouse.store, recorded.manifest))
        except UnknownCheckpoint:
            reason = f"checkpoint {label.checkpoint} was deleted: the files can no longer be compared with it"
            severity = dg.AssetCheckSeverity.WARN
    return dg.AssetCheckEvaluation(
        asset_key=asset,
        check_name=RESTORED_EQUALS_CHECKPOINT,
        passed=reason is None,
        severity=severity,
        description=reason or "the files have exactly the rows of the checkpoint",
        metadata=found,
        partition=partition,
    )


def _labels(catalog: Catalog, stream: Stream, keys: Sequence[str]) -> tuple[dict[str, int], dict[str, CheckpointGone]]:
    """Map each partition to its checkpoint, or to the error that says that this was deleted."""
    found, gone = dict[str, int](), dict[str, CheckpointGone]()
    for key in keys:
        try:
            found[key] = checkpoint_of(catalog, stream, key)
        except CheckpointGone as error:
            gone[key] = error
    return found, gone


def _check_proven(result: "SeriesResult") -> None:
    """Raise ProofFailed if a checkpoint could not be restored; the others were."""
    if result.failed:
        first, good = result.failed[0], len(result.restored) + len(result.kept)
        raise ProofFailed(f"{len(result.failed)} checkpoints could not be restored, {good} labels were: {first.reason}")


def _observation(asset: dg.AssetKey, partition: str, gone: CheckpointGone) -> dg.AssetObservation:
    return dg.AssetObservation(asset, partition=partition, metadata={"cannot be restored": str(gone)})


def _event(asset: dg.AssetKey, label: RestoredLabel, path: Path, is_new: bool) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        asset,
        partition=label.label,
        metadata={
            "checkpoint": label.checkpoint,
            "digest": label.digest,
            "dagster/row_count": label.rows,
            "path": dg.MetadataValue.path(str(path)),
            "restored": "now" if is_new else "before",
        },
        tags={"dagster/data_version": label.digest},
    )
