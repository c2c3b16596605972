"""A stream's run as one multi-asset: the base and delta chain of each operator, the sinks, and the checkpoints."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition
from siltstone.client import Client
from siltstone.dagster.code import code_version
from siltstone.dagster.failures import report_errors
from siltstone.dagster.fields import Number, Text
from siltstone.dagster.launch import Launch, launch_run
from siltstone.dagster.metadata import COLUMN_SCHEMA, column_schema, materialize_result
from siltstone.dagster.names import NO_OPTIONS, Keys, OpOptions, asset_key, dagster_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import UnknownStream, UsageError
from siltstone.pipes.outcomes import outcomes_of_run
from siltstone.pipes.parts import BASE_CHECKPOINT, BY_DAGSTER, CHECKPOINTS, DELTA_CHAIN, EVENTS, SINK
from siltstone.run.dead_letters import LETTERS
from siltstone.run.processing import outputs_of
from siltstone.run.region import Completed
from siltstone.settings import CONFIGURATION, Settings
from siltstone.sinks.delta import DeltaSink
from siltstone.sinks.jdbc import JdbcSink
from siltstone.sinks.kafka import KafkaSink
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import DEAD_LETTERS, Stream


class RunConfig(dg.Config):
    """Options of a run. Those not given come from siltstone.toml and `SILTSTONE_*`."""

    batches: Number | None = Field(default=None, description="most micro-batches to process; default no limit")
    parallelism: Number | None = Field(default=None, description="subtasks per operator; default as in the last run")
    policy: Text | None = Field(default=None, description="when to take a base: marginal-cost, adjust-d or files")
    options: dict[str, Text] = Field(default={}, description="source options of the stream")
    finish: bool = Field(default=False, description="at the end of the input, fire all that waits for event time")

    def command(self, stream: str) -> list[str]:
        """Return the arguments of `siltstone` that run a stream with these options."""
        given = {"--batches": self.batches, "--parallelism": self.parallelism, "--policy": self.policy}
        named = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        pairs = [text for name, value in self.options.items() for text in ("--set", f"{name}={value}")]
        return ["run", stream, "--json", *named, *pairs, *(["--finish"] if self.finish else [])]


def events_asset(stream: Stream) -> dg.AssetSpec:
    """Make the external asset of the stream's input events."""
    options = ", ".join(f"`{name}` {value}" for name, value in stream.options.items()) or "none"
    return dg.AssetSpec(
        asset_key(stream.name, EVENTS),
        group_name=dagster_name(stream.name),
        kinds={"spark"},
        description=f"The events that `{stream.name}` reads, micro-batch by micro-batch. Source options: {options}.",
    )


def run_asset(stream: Stream, launch: Launch | None = None, op: OpOptions = NO_OPTIONS) -> dg.AssetsDefinition:
    """Make the asset of a stream's run. A base gets an event only if one was taken.

    Args:
        launch: launches the run by a client of Dagster Pipes; None runs it in the step's own process.
    """

    @dg.multi_asset(
        name=dagster_name(stream.name, "run"),
        specs=run_specs(stream),
        op_tags=op.tags_of(stream.name, "run"),
        pool=op.pool_of(stream.name, "run"),
    )
    def run_stream(
        context: dg.AssetExecutionContext,
        config: RunConfig,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
    ) -> Iterator[dg.MaterializeResult]:
        with report_errors():
            settings = siltstone_warehouse.settings(
                siltstone_spark, parallelism=config.parallelism, policy=config.policy
            )
            if launch is None:
                yield from _run_here(context, settings, stream, config)
            else:
                _check_given_nothing(siltstone_warehouse, siltstone_spark)
                yield from launch_run(launch, context, settings, stream.name, config.command(stream.name))

    return run_stream


def run_specs(stream: Stream) -> list[dg.AssetSpec]:
    """Make the specs of all assets that a run of the stream writes, with their dependencies."""
    name = stream.name
    group = dagster_name(name)
    specs = []
    for operator in stream.sort_operators():
        base, deltas = (asset_key(name, operator.name, form) for form in (BASE_CHECKPOINT, DELTA_CHAIN))
        others = [each for each in operator.input_names if each not in stream.source_names]
        made = dict.fromkeys(stream.outputs[each].name for each in others)
        reads = [asset_key(name, each, form) for each in made for form in (BASE_CHECKPOINT, DELTA_CHAIN)]
        if len(others) < len(operator.input_names):
            reads.append(asset_key(name, EVENTS))
        variables = ", ".join(f"`{variable}`" for variable in operator.definition()["variables"])
        version = code_version(operator)
        schema = {COLUMN_SCHEMA: column_schema({t: of.shown_rows for t, of in operator.tables().items()})}
        specs += [
            dg.AssetSpec(
                base,
                deps=reads,
                skippable=True,
                kinds={"spark", "parquet"},
                metadata=schema,
                code_version=version,
                description=f"The whole state of operator `{operator.name}` ({variables}) as plain Parquet: the base "
                "of its chain. A run adds an event only if it took a base.",
                group_name=group,
            ),
            dg.AssetSpec(
                deltas,
                deps=[*reads, base],
                skippable=True,
                kinds={"spark"},
                metadata=schema,
                code_version=version,
                description=f"The changes in the state of operator `{operator.name}` since its base, checkpoint by "
                "checkpoint. A restore reads them after the base.",
                group_name=group,
            ),
        ]
    parts = [spec.key for spec in specs]
    specs += [_sink_spec(stream, output) for output in stream.sinks]
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


def _sink_spec(stream: Stream, output: str) -> dg.AssetSpec:
    """Make the spec of the sink of an output, or of dead letters."""
    sink, is_letters = stream.sinks[output], output == DEAD_LETTERS
    schema = LETTERS if is_letters else outputs_of(stream.operators)[output]
    makers = list(stream.operators) if is_letters else [stream.outputs[output]]
    return dg.AssetSpec(
        asset_key(stream.name, output, SINK),
        deps=[asset_key(stream.name, each.name, part) for each in makers for part in (DELTA_CHAIN, BASE_CHECKPOINT)],
        skippable=True,
        kinds={"spark", _kind(sink)},
        metadata={COLUMN_SCHEMA: column_schema({output: schema})},
        code_version=None if is_letters else code_version(*makers),
        description="The rows that operators could not process, each exactly once, with the reason."
        if is_letters
        else f"The output rows `{output}` of operator `{makers[0].name}`, each exactly once.",
        group_name=dagster_name(stream.name),
    )


def _kind(sink: object) -> str:
    if isinstance(sink, JdbcSink):
        return "sql"
    if isinstance(sink, KafkaSink):
        return "kafka"
    if sink is None or isinstance(sink, DeltaSink):
        return "deltalake"
    return "parquet" if isinstance(sink, ParquetSink) else "python"


def _run_here(
    context: dg.AssetExecutionContext, settings: Settings, stream: Stream, config: RunConfig
) -> Iterator[dg.MaterializeResult]:
    """Run the stream in this process."""

    def tell(checkpoint: Completed) -> None:
        forms = ", ".join(f"{name} {form.value}" for name, form in checkpoint.forms.items())
        context.log.info(f"checkpoint {checkpoint.id}: {forms}; {checkpoint.rows_in:,} rows in")
        for operator, count in checkpoint.dead_letters.items():
            context.log.warning(f"checkpoint {checkpoint.id}: {count:,} dead letters of operator {operator}")
        for operator, count in checkpoint.late.items():
            context.log.warning(f"checkpoint {checkpoint.id}: {count:,} late rows of operator {operator}")

    result = (
        Client(settings)
        .stream(_definition(settings, stream))
        .run(
            batches=config.batches,
            options=config.options,
            finish=config.finish,
            who=f"{BY_DAGSTER}{context.run.run_id}",
            on_checkpoint=tell,
        )
    )
    keys = Keys.of(context.assets_def.specs)
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        for outcome in outcomes_of_run(place, stream, result):
            yield materialize_result(outcome, keys)


def _check_given_nothing(warehouse: WarehouseResource, spark: SparkResource) -> None:
    """Raise UsageError if a launch gave a warehouse or Spark settings, which do not reach another process."""
    if warehouse.url or warehouse.catalog or spark.master or spark.conf:
        raise UsageError(
            f"this stream runs in a process of its own, which has its own {CONFIGURATION}: set warehouse, catalog and "
            "Spark there, not in the launch"
        )


def _definition(settings: Settings, stream: Stream) -> Stream:
    """Find the current definition of the stream; the given one, if no module of the project defines it."""
    try:
        return find_definition(settings, stream.name)
    except UnknownStream:
        return stream
