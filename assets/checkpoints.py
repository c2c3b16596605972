"""The asset `<stream>/checkpoints`: the stream, run over what is available."""

import dagster as dg
from pydantic import Field

from assets.failures import told_clearly
from assets.metadata import checkpoints_metadata
from assets.names import CHECKPOINTS, asset_key, dagster_name
from jobs.run_stream import run_stream
from resources import SparkResource, WarehouseResource
from siltstone.lifecycle.region import Completed
from siltstone.stream import Stream


class CheckpointsConfig(dg.Config):
    """How much of the stream to run, and how. What is not given is as in siltstone.toml and `SILTSTONE_*`."""

    batches: int | None = Field(default=None, description="stop after so many micro-batches; default all there are")
    parallelism: int | None = Field(default=None, description="subtasks an operator; default Spark's own")
    policy: str | None = Field(default=None, description="when to take a base: marginal-cost or adjust-d")
    options: dict[str, str] = Field(default={}, description="source options of the stream")


def checkpoints_asset(stream: Stream) -> dg.AssetsDefinition:
    """The checkpoints of one stream; its data version is the newest one's digest."""

    @dg.asset(
        key=asset_key(stream.name, CHECKPOINTS),
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        description=_description(stream),
    )
    def checkpoints(
        context: dg.AssetExecutionContext,
        config: CheckpointsConfig,
        warehouse: WarehouseResource,
        spark: SparkResource,
    ) -> dg.MaterializeResult:
        def tell(checkpoint: Completed) -> None:
            forms = ", ".join(f"{name} {form.value}" for name, form in checkpoint.forms.items())
            context.log.info(f"checkpoint {checkpoint.id}: {forms}; {checkpoint.rows_in:,} rows in")

        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism, policy=config.policy)
            result = run_stream(
                settings, stream.name, batches=config.batches, options=config.options, on_checkpoint=tell
            )
            return dg.MaterializeResult(
                metadata=checkpoints_metadata(settings, result),
                data_version=dg.DataVersion(result.digest) if result.digest else None,
            )

    return checkpoints


def _description(stream: Stream) -> str:
    operators = "\n".join(f"- `{op.name}` reads {op.reads}" for op in stream.operators)
    return (
        f"Durable state of the stream `{stream.name}`, checkpoint by checkpoint, as bases and deltas. Materializing "
        f"runs the stream over what its source has, from the newest completed checkpoint on.\n\n{operators}"
    )
