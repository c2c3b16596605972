"""The asset `<stream>/materialization`: chains consolidated into new bases."""

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import told_clearly
from siltstone.dagster.metadata import table
from siltstone.dagster.names import CHECKPOINTS, MATERIALIZATION, asset_key, dagster_name, pool
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.stream import Stream

COLUMNS = {"operator": "string", "checkpoint": "int", "rows": "int", "bytes": "int", "seconds": "float"}


class MaterializationConfig(dg.Config):
    """What to consolidate."""

    at: str = Field(default="latest", description="checkpoint id, commit time, savepoint or latest")
    operators: list[str] = Field(default=[], description="only these operators; default all")
    due: bool = Field(default=False, description="only operators whose chain has grown long enough")
    parallelism: int | None = Field(default=None, description="tasks an operator; default Spark's own")


def materialization_asset(stream: Stream) -> dg.AssetsDefinition:
    """The materialization of one stream; the stream may run meanwhile."""

    @dg.asset(
        key=asset_key(stream.name, MATERIALIZATION),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        pool=pool(stream.name, "materialize"),
        op_tags={"siltstone/stream": stream.name, "siltstone/operation": "materialize"},
        description=(
            f"The chains of `{stream.name}` up to a checkpoint, consolidated into new bases, proven before anything "
            "refers to them. Restores of that checkpoint and of all later ones begin there."
        ),
    )
    def materialization(
        config: MaterializationConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.MaterializeResult:
        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism)
            done = (
                Client(settings)
                .stream(stream.name)
                .materialize(at=config.at, operators=config.operators, due=config.due)
            )
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                digest = place.catalog.checkpoints.get(stream.name, done.checkpoint).digest
        rows = [
            {"operator": m.operator, "checkpoint": m.checkpoint, "rows": m.rows, "bytes": m.bytes, "seconds": m.seconds}
            for m in done.operators
        ]
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest),
            metadata={
                "checkpoint": done.checkpoint,
                "digest": digest,
                "dagster/row_count": done.rows,
                "bytes": done.bytes,
                "seconds": done.seconds,
                "operators": table(COLUMNS, rows),
                "began_there_anyway": ", ".join(done.kept) or "none",
            },
        )

    return materialization
