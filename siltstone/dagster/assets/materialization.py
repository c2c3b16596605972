"""The asset `<stream>/materialization`: chains consolidated into new bases."""

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.failures import report_errors
from siltstone.dagster.fields import Flag, Number, Text
from siltstone.dagster.metadata import table
from siltstone.dagster.names import CHECKPOINTS, MATERIALIZATION, asset_key, dagster_name, pool, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.stream import Stream

COLUMNS = {"operator": "string", "checkpoint": "int", "rows": "int", "bytes": "int", "seconds": "float"}


class MaterializationConfig(dg.Config):
    """The chains to consolidate."""

    at: Text = Field(default="latest", description="checkpoint id, commit time, savepoint or latest")
    operators: list[Text] = Field(default=[], description="names of operators; default all")
    due: Flag = Field(default=False, description="only operators that are due by [materialization] in siltstone.toml")
    parallelism: Number | None = Field(default=None, description="tasks per operator; default Spark's number of cores")


def materialization_asset(stream: Stream) -> dg.AssetsDefinition:
    """Make the materialization asset of a stream. The stream may run meanwhile."""

    @dg.asset(
        key=asset_key(stream.name, MATERIALIZATION),
        deps=[asset_key(stream.name, CHECKPOINTS)],
        group_name=dagster_name(stream.name),
        kinds={"spark", "parquet"},
        pool=pool(stream.name, "materialize"),
        op_tags=run_tags(stream.name, "materialize"),
        description=(
            f"The chains of `{stream.name}` up to a checkpoint, consolidated into new bases that are proven before "
            "they are used. Restores of that checkpoint and of later ones begin with them."
        ),
    )
    def materialization(
        config: MaterializationConfig, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> dg.MaterializeResult:
        with report_errors():
            settings = siltstone_warehouse.settings(siltstone_spark, parallelism=config.parallelism)
            done = (
                Client(settings)
                .stream(stream.name)
                .materialize(at=config.at, operators=config.operators, due=config.due)
            )
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
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
                "had_a_base_already": ", ".join(done.kept) or "none",
            },
        )

    return materialization
