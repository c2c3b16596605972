"""The Dagster jobs of a stream, one per operation.

<stream>                                                       runs the stream
<stream>__materialize  __snapshot  __verify  __verify_deep     of assets and checks
<stream>__truncate  __sweep  __optimize  __recover             of one op each, whose output metadata is the result
"""

from collections.abc import Callable
from typing import Any

import dagster as dg
from pydantic import Field

from siltstone.client import Client
from siltstone.dagster.checks.suites import RESTORE_EQUALS_SNAPSHOT
from siltstone.dagster.failures import report_errors
from siltstone.dagster.fields import Flag, Number
from siltstone.dagster.names import CHECKPOINTS, FULL_SNAPSHOT, MATERIALIZATION, asset_key, dagster_name, pool
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.result import Result
from siltstone.stream import Stream

RUN, MATERIALIZE, VERIFY, VERIFY_DEEP = "run", "materialize", "verify", "verify_deep"
SNAPSHOT = "snapshot"
TRUNCATE, SWEEP, OPTIMIZE, RECOVER = "truncate", "sweep", "optimize", "recover"
STREAM_TAG, OPERATION_TAG = "siltstone/stream", "siltstone/operation"


def job_tags(stream: Stream, operation: str) -> dict[str, str]:
    """Make the tags that identify runs of one operation on one stream."""
    return {STREAM_TAG: stream.name, OPERATION_TAG: operation}


def asset_jobs(stream: Stream) -> list[Any]:  # Dagster does not export the return type of define_asset_job
    """Make the jobs of one stream that materialize or check assets."""
    name = stream.name
    deep = dg.AssetCheckKey(asset_key(name, FULL_SNAPSHOT), RESTORE_EQUALS_SNAPSHOT.name)
    quick = dg.AssetSelection.checks_for_assets(asset_key(name, CHECKPOINTS), asset_key(name, MATERIALIZATION))
    checkpoints = dg.AssetSelection.assets(asset_key(name, CHECKPOINTS)).required_multi_asset_neighbors()
    return [
        dg.define_asset_job(
            dagster_name(name),
            selection=checkpoints,
            tags=job_tags(stream, RUN),
            description=f"Run `{name}` over available input, then check its assets.",
        ),
        dg.define_asset_job(
            dagster_name(name, MATERIALIZE),
            selection=dg.AssetSelection.assets(asset_key(name, MATERIALIZATION)),
            tags=job_tags(stream, MATERIALIZE),
            description=f"Consolidate the chains of `{name}`.",
        ),
        dg.define_asset_job(
            dagster_name(name, VERIFY),
            selection=quick,
            tags=job_tags(stream, VERIFY),
            description=f"Prove every checkpoint of `{name}`, and check its chains, store, sinks and materialization.",
        ),
        dg.define_asset_job(
            dagster_name(name, SNAPSHOT),
            selection=dg.AssetSelection.assets(asset_key(name, FULL_SNAPSHOT)).without_checks(),
            tags=job_tags(stream, SNAPSHOT),
            description=f"Copy the live state of `{name}` in full, to compare restores with.",
        ),
        dg.define_asset_job(
            dagster_name(name, VERIFY_DEEP),
            selection=dg.AssetSelection.checks(deep),
            tags=job_tags(stream, VERIFY_DEEP),
            description=f"Compare the newest full snapshot of `{name}` with a restore, row by row.",
        ),
    ]


class SweepConfig(dg.Config):
    """Options of a sweep."""

    dry_run: Flag = Field(default=False, description="only report what would be deleted")
    limit: Number | None = Field(default=None, description="most objects to delete; default no limit")
    incomplete: Flag = Field(default=False, description="search only entries of checkpoints that did not complete")


class TruncateConfig(dg.Config):
    """Options of a truncation. Its rules are those of [retention] in siltstone.toml or those of the stream."""

    dry_run: Flag = Field(default=False, description="only report what would be deleted")


class OptimizeConfig(dg.Config):
    """Options of an optimization."""

    dry_run: Flag = Field(default=False, description="only count what would be deleted")


class RecoverConfig(dg.Config):
    """Options of a recovery."""

    dry_run: Flag = Field(default=False, description="only report what would be given up")


def op_jobs(stream: Stream) -> list[dg.JobDefinition]:
    """Make the jobs of one stream that sweep, truncate and recover it, and optimize its tables."""
    name = stream.name

    @dg.op(name=dagster_name(name, SWEEP, "op"), pool=pool(name, SWEEP), tags=job_tags(stream, SWEEP))
    def sweep_op(
        context: dg.OpExecutionContext, config: SweepConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> None:
        with report_errors():
            of_stream = Client(warehouse.settings(spark)).stream(name)
            result = of_stream.sweep(dry_run=config.dry_run, limit=config.limit, incomplete=config.incomplete)
            _report(context, result)

    @dg.op(name=dagster_name(name, TRUNCATE, "op"), pool=pool(name, TRUNCATE), tags=job_tags(stream, TRUNCATE))
    def truncate_op(
        context: dg.OpExecutionContext, config: TruncateConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> None:
        with report_errors():
            _report(context, Client(warehouse.settings(spark)).stream(name).truncate(dry_run=config.dry_run))

    @dg.op(name=dagster_name(name, OPTIMIZE, "op"), pool=pool(name, OPTIMIZE), tags=job_tags(stream, OPTIMIZE))
    def optimize_op(
        context: dg.OpExecutionContext, config: OptimizeConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> None:
        with report_errors():
            of_stream = Client(warehouse.settings(spark)).stream(name)
            _report(context, of_stream.optimize_sinks(dry_run=config.dry_run))

    @dg.op(name=dagster_name(name, RECOVER, "op"), pool=pool(name, RUN), tags=job_tags(stream, RECOVER))
    def recover_op(
        context: dg.OpExecutionContext, config: RecoverConfig, warehouse: WarehouseResource, spark: SparkResource
    ) -> None:
        with report_errors():
            of_stream = Client(warehouse.settings(spark)).stream(name)
            _report(context, of_stream.recover(dry_run=config.dry_run, on_step=context.log.info))

    ops = {
        SWEEP: (sweep_op, f"Delete objects of `{name}` that nothing refers to."),
        OPTIMIZE: (optimize_op, f"Merge small files of the tables of `{name}`, and delete those no longer needed."),
        TRUNCATE: (truncate_op, f"Delete the checkpoints of `{name}` that retention does not keep."),
        RECOVER: (recover_op, f"If `{name}` is damaged, go back to its newest checkpoint that restores."),
    }
    return [_job(stream, operation, op, description) for operation, (op, description) in ops.items()]


def _job(stream: Stream, operation: str, op: Callable[..., Any], description: str) -> dg.JobDefinition:
    @dg.job(name=dagster_name(stream.name, operation), tags=job_tags(stream, operation), description=description)
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
