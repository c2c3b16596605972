"""A stream's run as one multi-asset: the base and delta chain of each operator, the sinks, and the checkpoints."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition
from siltstone.client import Client
from siltstone.dagster.failures import report_errors
from siltstone.dagster.fields import Number, Text
from siltstone.dagster.metadata import checkpoints_metadata, operator_metadata, sink_metadata
from siltstone.dagster.names import (
    BASE_CHECKPOINT,
    CHECKPOINTS,
    DELTA_CHAIN,
    EVENTS,
    SINK,
    Keys,
    asset_key,
    dagster_name,
    pool,
    run_tags,
)
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import UnknownStream
from siltstone.model import Form
from siltstone.operator import SOURCE
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.sinks.delta import DeltaSink
from siltstone.sinks.resolve import resolve_sinks
from siltstone.stream import DEAD_LETTERS, Stream

BY_DAGSTER = "Dagster run "
"""prefix of the owner that the catalog records for a run of Dagster"""


class RunConfig(dg.Config):
    """Options of a run. Those not given come from siltstone.toml and `SILTSTONE_*`."""

    batches: Number | None = Field(default=None, description="most micro-batches to process; default no limit")
    parallelism: Number | None = Field(default=None, description="subtasks per operator; default as in the last run")
    policy: Text | None = Field(default=None, description="when to take a base: marginal-cost, adjust-d or files")
    options: dict[str, Text] = Field(default={}, description="source options of the stream")


def is_dagster_run(who: str) -> bool:
    """Whether the owner of a writer epoch is a run of Dagster, which reports its checkpoints itself."""
    return who.startswith(BY_DAGSTER)


def events_asset(stream: Stream) -> dg.AssetSpec:
    """Make the external asset of the stream's input events."""
    options = ", ".join(f"`{name}` {value}" for name, value in stream.options.items()) or "none"
    return dg.AssetSpec(
        asset_key(stream.name, EVENTS),
        group_name=dagster_name(stream.name),
        kinds={"spark"},
        description=f"The events that `{stream.name}` reads, micro-batch by micro-batch. Source options: {options}.",
    )


def run_asset(stream: Stream) -> dg.AssetsDefinition:
    """Make the asset of a stream's run. A base gets an event only if one was taken."""

    @dg.multi_asset(
        name=dagster_name(stream.name, "run"),
        specs=run_specs(stream),
        pool=pool(stream.name, "run"),
        op_tags=run_tags(stream.name, "run"),
    )
    def run_stream(
        context: dg.AssetExecutionContext,
        config: RunConfig,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
    ) -> Iterator[dg.MaterializeResult]:
        def tell(checkpoint: Completed) -> None:
            forms = ", ".join(f"{name} {form.value}" for name, form in checkpoint.forms.items())
            context.log.info(f"checkpoint {checkpoint.id}: {forms}; {checkpoint.rows_in:,} rows in")
            for operator, count in checkpoint.dead_letters.items():
                context.log.warning(f"checkpoint {checkpoint.id}: {count:,} dead letters of operator {operator}")

        with report_errors():
            settings = siltstone_warehouse.settings(
                siltstone_spark, parallelism=config.parallelism, policy=config.policy
            )
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
                "resets": result.resets,
                "seconds": result.seconds,
            }
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                keys = Keys.of(context.assets_def.specs)
                yield from _parts(place, stream, result.checkpoints, keys)
                yield dg.MaterializeResult(
                    keys[asset_key(stream.name, CHECKPOINTS)],
                    metadata=made | checkpoints_metadata(place, stream.name),
                    data_version=dg.DataVersion(result.digest) if result.digest else None,
                )

    return run_stream


def run_specs(stream: Stream) -> list[dg.AssetSpec]:
    """Make the specs of all assets that a run of the stream writes, with their dependencies."""
    name = stream.name
    group = dagster_name(name)
    specs = []
    for operator in stream.sort_operators():
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
                description=f"The whole state of operator `{operator.name}` ({variables}) as plain Parquet: the base "
                "of its chain. A run adds an event only if it took a base.",
                group_name=group,
            ),
            dg.AssetSpec(
                deltas,
                deps=[*reads, base],
                skippable=True,
                kinds={"spark"},
                description=f"The changes in the state of operator `{operator.name}` since its base, checkpoint by "
                "checkpoint. A restore reads them after the base.",
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
            kinds={"spark", "deltalake" if sink is None or isinstance(sink, DeltaSink) else "parquet"},
            description="The rows that operators could not process, each exactly once, with the reason."
            if operator == DEAD_LETTERS
            else f"The output rows of operator `{operator}`, each exactly once.",
            group_name=group,
        )
        for operator, sink in stream.sinks.items()
    ]
    specs.append(
        dg.AssetSpec(
            asset_key(name, CHECKPOINTS),
            deps=parts,
            kinds={"spark"},
            description=f"The checkpoints of `{name}`: each is the state of all its operators at one point. To "
            "materialize this runs the stream over available input, starting after the newest completed checkpoint.",
            group_name=group,
        )
    )
    return specs


def _definition(settings: Settings, stream: Stream) -> Stream:
    """Find the current definition of the stream; the given one, if no module of the project defines it."""
    try:
        return find_definition(settings, stream.name)
    except UnknownStream:
        return stream


def _parts(place: OpenWarehouse, stream: Stream, checkpoints: list[int], keys: Keys) -> Iterator[dg.MaterializeResult]:
    """Make the events of a run: for each operator's newest base and newest delta, and for each sink."""
    if not checkpoints:
        return
    newest: dict[tuple[str, Form], int] = {}
    for id in checkpoints:
        for operator, form in place.catalog.checkpoints.get(stream.name, id).forms.items():
            newest[operator, form] = id
    # Dagster requires the events of dependencies first.
    for operator in stream.sort_operators():
        # Files are a checkpoint that holds everything, as a base is.
        for forms, part in (((Form.BASE, Form.FILES), BASE_CHECKPOINT), ((Form.DELTA,), DELTA_CHAIN)):
            if id := max(newest.get((operator.name, form), 0) for form in forms):
                metadata, version = operator_metadata(place, stream.name, operator.name, id)
                yield dg.MaterializeResult(
                    keys[asset_key(stream.name, operator.name, part)],
                    metadata=metadata,
                    data_version=dg.DataVersion(version),
                )
    for operator, sink in resolve_sinks(stream, place).items():
        metadata = sink_metadata(checkpoints, sink)
        yield dg.MaterializeResult(keys[asset_key(stream.name, operator, SINK)], metadata=metadata)
