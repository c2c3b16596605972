"""The stream's run, as one multi-asset: what each operator laid down, and the checkpoints all of them make together."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition
from siltstone.client import Client
from siltstone.dagster.failures import told_clearly
from siltstone.dagster.metadata import checkpoints_metadata, operator_metadata, sink_metadata
from siltstone.dagster.names import (
    BASE_CHECKPOINT,
    CHECKPOINTS,
    DELTA_CHAIN,
    EVENTS,
    SINK,
    asset_key,
    dagster_name,
    pool,
)
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import UnknownStream
from siltstone.model import Form
from siltstone.operator import SOURCE
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.sinks.parquet import parquet_sinks
from siltstone.stream import DEAD_LETTERS, Stream

BY_DAGSTER = "Dagster run "
"""what the catalog says of whose a writer epoch is begins so where Dagster ran the stream"""


class RunConfig(dg.Config):
    """How much of the stream to run, and how. What is not given is as in siltstone.toml and `SILTSTONE_*`."""

    batches: int | None = Field(default=None, description="stop after so many micro-batches; default all there are")
    parallelism: int | None = Field(default=None, description="subtasks an operator; default as the run before")
    policy: str | None = Field(default=None, description="when to take a base: marginal-cost or adjust-d")
    options: dict[str, str] = Field(default={}, description="source options of the stream")


def run_by_dagster(who: str) -> bool:
    """Whether a writer epoch was that of a run of Dagster's, which tells of its checkpoints itself."""
    return who.startswith(BY_DAGSTER)


def events_asset(stream: Stream) -> dg.AssetSpec:
    """What the stream's source has; nobody materializes it."""
    options = ", ".join(f"`{name}` {value}" for name, value in stream.options.items()) or "none"
    return dg.AssetSpec(
        asset_key(stream.name, EVENTS),
        group_name=dagster_name(stream.name),
        kinds={"spark"},
        description=f"The events that `{stream.name}` reads, micro-batch by micro-batch. Source options: {options}.",
    )


def run_asset(stream: Stream) -> dg.AssetsDefinition:
    """The run of one stream. A base appears only where one was taken."""

    @dg.multi_asset(
        name=dagster_name(stream.name, "run"),
        specs=run_specs(stream),
        pool=pool(stream.name, "run"),
        op_tags={"siltstone/stream": stream.name, "siltstone/operation": "run"},
    )
    def run_stream(
        context: dg.AssetExecutionContext, config: RunConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> Iterator[dg.MaterializeResult]:
        def tell(checkpoint: Completed) -> None:
            forms = ", ".join(f"{name} {form.value}" for name, form in checkpoint.forms.items())
            context.log.info(f"checkpoint {checkpoint.id}: {forms}; {checkpoint.rows_in:,} rows in")
            for operator, count in checkpoint.dead_letters.items():
                context.log.warning(f"checkpoint {checkpoint.id}: {count:,} dead letters of operator {operator}")

        with told_clearly():
            settings = warehouse.settings(spark, parallelism=config.parallelism, policy=config.policy)
            result = (
                Client(settings)
                .stream(_definition(settings, stream))
                .run(
                    batches=config.batches,
                    options=config.options,
                    who=f"{BY_DAGSTER}{context.run.run_id}",
                    on_checkpoint=tell,
                )
            )
            made = {
                "checkpoints_made": len(result.checkpoints),
                "rows": result.rows,
                "bytes": result.bytes,
                "dead_letters": sum(result.dead_letters.values()),
                "seconds": result.seconds,
            }
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                yield from _parts(place, stream, result.checkpoints)
                yield dg.MaterializeResult(
                    asset_key(stream.name, CHECKPOINTS),
                    metadata=made | checkpoints_metadata(place, stream.name),
                    data_version=dg.DataVersion(result.digest) if result.digest else None,
                )

    return run_stream


def run_specs(stream: Stream) -> list[dg.AssetSpec]:
    """Everything that a run of the stream lays down, with what it is made from."""
    name = stream.name
    group = dagster_name(name)
    specs = []
    for operator in stream.topological():
        base, deltas = (asset_key(name, operator.name, form) for form in (BASE_CHECKPOINT, DELTA_CHAIN))
        reads = [asset_key(name, EVENTS)]
        if operator.reads != SOURCE:
            reads = [asset_key(name, operator.reads, form) for form in (BASE_CHECKPOINT, DELTA_CHAIN)]
        variables = ", ".join(f"`{variable}`" for variable in operator.definition()["variables"])
        specs += [
            dg.AssetSpec(
                base,
                deps=reads,
                skippable=True,
                kinds={"spark", "parquet"},
                description=f"All state of operator `{operator.name}` ({variables}), as plain Parquet: where its "
                "chain begins. There is an event only where a run took a base.",
                group_name=group,
            ),
            dg.AssetSpec(
                deltas,
                deps=[*reads, base],
                skippable=True,
                kinds={"spark"},
                description=f"What changed in the state of operator `{operator.name}` since its base, checkpoint by "
                "checkpoint: what a restore reads after the base.",
                group_name=group,
            ),
        ]
    parts = [spec.key for spec in specs]
    specs += [
        dg.AssetSpec(
            asset_key(name, operator, SINK),
            deps=[
                asset_key(name, each, part)
                for each in ([op.name for op in stream.operators] if operator == DEAD_LETTERS else [operator])
                for part in (DELTA_CHAIN, BASE_CHECKPOINT)
            ],
            skippable=True,
            kinds={"spark", "parquet"},
            description="The rows that operators could not take, each exactly once, with the reason."
            if operator == DEAD_LETTERS
            else f"The rows that operator `{operator}` puts out, each exactly once.",
            group_name=group,
        )
        for operator in stream.sinks
    ]
    specs.append(
        dg.AssetSpec(
            asset_key(name, CHECKPOINTS),
            deps=parts,
            kinds={"spark"},
            description=f"The checkpoints of `{name}`: the state of all its operators at one point each. Materializing "
            "runs the stream over what its source has, from the newest completed checkpoint on.",
            group_name=group,
        )
    )
    return specs


def _definition(settings: Settings, stream: Stream) -> Stream:
    """The stream as project and catalog have it now; as it was given, if no module of the project defines it."""
    try:
        return find_definition(settings, stream.name)
    except UnknownStream:
        return stream


def _parts(place: OpenWarehouse, stream: Stream, checkpoints: list[int]) -> Iterator[dg.MaterializeResult]:
    """An event for each operator's newest base and newest delta of a run, and for its sink."""
    if not checkpoints:
        return
    newest: dict[tuple[str, Form], int] = {}
    for id in checkpoints:
        for operator, form in place.catalog.checkpoints.get(stream.name, id).forms.items():
            newest[operator, form] = id
    # Dagster wants what others are made from first.
    for operator in stream.topological():
        for form, part in ((Form.BASE, BASE_CHECKPOINT), (Form.DELTA, DELTA_CHAIN)):
            if id := newest.get((operator.name, form)):
                metadata, version = operator_metadata(place, stream.name, operator.name, id)
                yield dg.MaterializeResult(
                    asset_key(stream.name, operator.name, part), metadata=metadata, data_version=dg.DataVersion(version)
                )
    shown = parquet_sinks(stream.sinks, place.warehouse.local.sink(stream.name))
    for operator in stream.sinks:
        metadata = sink_metadata(checkpoints, shown.get(operator))
        yield dg.MaterializeResult(asset_key(stream.name, operator, SINK), metadata=metadata)
