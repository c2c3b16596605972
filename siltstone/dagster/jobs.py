"""The Dagster jobs: one per stream, which runs it, and one per operation for all streams of a code location.

<stream>                                                                   runs the stream
siltstone__materialize  siltstone__snapshot  siltstone__verify  siltstone__verify_deep   of assets and checks
siltstone__truncate  siltstone__sweep  siltstone__optimize  siltstone__recover           of one op, given a stream

A run of the first four is for the streams whose assets were selected, all of them by default.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import dagster as dg
from dagster._check import CheckError
from pydantic import Field

from siltstone.client import Client, StreamClient
from siltstone.dagster.failures import RETRIES, report_errors
from siltstone.dagster.fields import Flag, Number, Text
from siltstone.dagster.names import OPERATION_TAG, STREAM_TAG, Keys, dagster_name, location_name, run_tags, select_part
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.runs import AT_WORK, RUN, StreamRuns, keys_in
from siltstone.errors import UsageError
from siltstone.model import check_name
from siltstone.pipes.parts import CHECKPOINTS, FULL_SNAPSHOT, MATERIALIZATION
from siltstone.result import Result
from siltstone.stream import Stream

MATERIALIZE, VERIFY, VERIFY_DEEP = "materialize", "verify", "verify_deep"
SNAPSHOT = "snapshot"
TRUNCATE, SWEEP, OPTIMIZE, RECOVER = "truncate", "sweep", "optimize", "recover"
EXECUTOR = dg.in_process_executor
"""of our jobs: one process, and so one Spark session, for all steps of a run"""


def stream_job(stream: Stream) -> Any:  # Dagster does not export the return type of define_asset_job
    """Make the job that runs one stream."""
    return dg.define_asset_job(
        dagster_name(stream.name),
        selection=select_part(CHECKPOINTS, stream=stream.name).required_multi_asset_neighbors(),
        tags=run_tags(stream.name, RUN),
        executor_def=EXECUTOR,
        description=f"Run `{stream.name}` over available input, then check its assets.",
    )


@cache
def operation_jobs() -> tuple[Any, ...]:
    """Make the jobs that all streams of a code location share; each call returns the same objects.

    So definitions of several streams can be merged: Dagster takes an object that comes twice once.
    """
    return (*_asset_jobs(), *(_op_job(operation) for operation in _OPERATIONS))


def _asset_jobs() -> list[Any]:
    def checks_of(*parts: str) -> dg.AssetSelection:
        return select_part(*parts) - select_part(*parts).without_checks()

    jobs = {
        MATERIALIZE: (select_part(MATERIALIZATION), "Consolidate chains."),
        VERIFY: (
            checks_of(CHECKPOINTS, MATERIALIZATION),
            "Prove every checkpoint, and check chains, store, sinks and materialization.",
        ),
        SNAPSHOT: (
            select_part(FULL_SNAPSHOT).without_checks(),
            "Copy the live state in full, to compare restores with.",
        ),
        VERIFY_DEEP: (checks_of(FULL_SNAPSHOT), "Compare the newest full snapshot with a restore, row by row."),
    }
    return [
        dg.define_asset_job(
            location_name(operation),
            selection=selection,
            tags={OPERATION_TAG: operation},
            executor_def=EXECUTOR,
            description=f"{description} Of all streams, or of those whose assets are selected.",
        )
        for operation, (selection, description) in jobs.items()
    ]


class OperationConfig(dg.Config):
    """The stream of an operation."""

    stream: Text = Field(description="name of the stream")


class SweepConfig(OperationConfig):
    """Options of a sweep."""

    dry_run: Flag = Field(default=False, description="only report what would be deleted")
    limit: Number | None = Field(default=None, description="most objects to delete; default no limit")
    incomplete: Flag = Field(default=False, description="search only entries of checkpoints that did not complete")


class TruncateConfig(OperationConfig):
    """Options of a truncation. Its rules are those of [retention] in siltstone.toml or those of the stream."""

    dry_run: Flag = Field(default=False, description="only report what would be deleted")


class OptimizeConfig(OperationConfig):
    """Options of an optimization."""

    dry_run: Flag = Field(default=False, description="only count what would be deleted")


class RecoverConfig(OperationConfig):
    """Options of a recovery."""

    dry_run: Flag = Field(default=False, description="only report what would be given up")


class StreamBusy(UsageError):
    """A recovery is refused while a run of the stream is at work."""


BUSY = StreamBusy.__name__


def _sweep(stream: StreamClient, config: SweepConfig, context: dg.OpExecutionContext) -> Result:
    return stream.sweep(dry_run=config.dry_run, limit=config.limit, incomplete=config.incomplete)


def _truncate(stream: StreamClient, config: TruncateConfig, context: dg.OpExecutionContext) -> Result:
    return stream.truncate(dry_run=config.dry_run)


def _optimize(stream: StreamClient, config: OptimizeConfig, context: dg.OpExecutionContext) -> Result:
    return stream.optimize_sinks(dry_run=config.dry_run)


def _keys_of(context: dg.OpExecutionContext) -> Keys:
    """Find the keys of the code location's assets; empty where a job is executed without one, as in tests."""
    try:
        return keys_in(context.repository_def)
    except CheckError:
        return Keys()


def _recover(stream: StreamClient, config: RecoverConfig, context: dg.OpExecutionContext) -> Result:
    runs = StreamRuns(context.instance, _keys_of(context))
    if run := None if config.dry_run else runs.find_unfinished(RUN, AT_WORK).get(config.stream):
        raise StreamBusy(
            f"run {run} of stream {config.stream} is at work by what Dagster knows, and a recovery would end it: wait "
            "until it ends, or terminate it"
        )
    return stream.recover(dry_run=config.dry_run, on_step=context.log.info)


_OPERATIONS: dict[str, tuple[Callable[[StreamClient, Any, dg.OpExecutionContext], Result], type, str]] = {
    SWEEP: (_sweep, SweepConfig, "Delete objects of a stream that nothing refers to."),
    OPTIMIZE: (_optimize, OptimizeConfig, "Merge small files of a stream's tables, and delete those no longer needed."),
    TRUNCATE: (_truncate, TruncateConfig, "Delete the checkpoints of a stream that retention does not keep."),
    RECOVER: (_recover, RecoverConfig, "If a stream is damaged, go back to its newest checkpoint that restores."),
}


def _op_job(operation: str) -> dg.JobDefinition:
    operate, config_type, description = _OPERATIONS[operation]

    @dg.op(
        name=location_name(operation, "op"),
        # Nothing of several streams waits for a recovery, nor a recovery for another's.
        pool=None if operation == RECOVER else location_name(operation),
        tags={OPERATION_TAG: operation},
        retry_policy=None if operation == RECOVER else RETRIES,  # the sensor repeats recoveries
        config_schema=config_type.to_config_schema(),
    )
    def op(
        context: dg.OpExecutionContext, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> None:
        config = config_type(**context.op_config)
        with report_errors():
            context.instance.add_run_tags(context.run_id, {STREAM_TAG: check_name("stream", config.stream)})
            stream = Client(siltstone_warehouse.settings(siltstone_spark)).stream(config.stream)
            _report(context, operate(stream, config, context))

    @dg.job(
        name=location_name(operation), tags={OPERATION_TAG: operation}, executor_def=EXECUTOR, description=description
    )
    def job() -> None:
        op()

    return job


def _report(context: dg.OpExecutionContext, result: Result) -> None:
    """Add the result of an operation to its output's metadata, in which Dagster plots numbers, and to the log."""
    plain = {
        name: value if isinstance(value, str | int | float | bool) else dg.MetadataValue.json(value)
        for name, value in result.to_dict().items()
        if value is not None
    }
    context.add_output_metadata(plain)
    context.log.info(", ".join(f"{name} {value}" for name, value in plain.items() if isinstance(value, int | float)))
