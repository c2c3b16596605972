"""The schedules of a stream's operations. siltstone.toml can change them.

On by default: the snapshot, the deep verification that compares with it, and the upkeep of the tables of sinks, without
which each checkpoint leaves them one more small file. Turn the others on in the page.

[schedules.flights]
sweep = "0 5 * * *"     # cron, UTC
verify_deep = "off"     # no schedule at all
"""

from collections.abc import Collection

import dagster as dg

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.dagster.jobs import MATERIALIZE, OPTIMIZE, SNAPSHOT, SWEEP, TRUNCATE, VERIFY, VERIFY_DEEP, job_tags
from siltstone.dagster.names import FULL_SNAPSHOT, MATERIALIZATION, asset_key, dagster_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import SiltstoneError, UsageError
from siltstone.run.snapshot import find_obstacle
from siltstone.settings import CONFIGURATION, Settings
from siltstone.store.paths import sink_tables
from siltstone.stream import Stream

OFF = "off"
DEFAULTS = {
    MATERIALIZE: "*/10 * * * *",
    TRUNCATE: "5 * * * *",
    VERIFY: "20 * * * *",
    SNAPSHOT: "0 3 * * *",
    VERIFY_DEEP: "30 3 * * *",
    SWEEP: "45 4 * * *",
    OPTIMIZE: "15 5 * * *",
}
"""operation -> cron, UTC"""
ON = frozenset({SNAPSHOT, VERIFY_DEEP, OPTIMIZE})
"""operations whose schedules are on by default"""


def check_schedules(settings: Settings, streams: Collection[str]) -> None:
    """Raise UsageError if the settings have schedules of a stream that is not in `streams`."""
    if unknown := sorted(settings.schedules.keys() - set(streams)):
        known = ", ".join(sorted(streams)) or "none"
        raise UsageError(
            f"[schedules.{unknown[0]}] in {CONFIGURATION}: no stream {unknown[0]!r} is defined (defined: {known})"
        )


def stream_schedules(stream: Stream, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Make the schedules of one stream, one for each operation that is not off.

    Raises:
        UsageError: the settings name an unknown operation, or a value that is not a cron expression.
    """
    given = settings.schedules.get(stream.name, {})
    if unknown := sorted(given.keys() - DEFAULTS):
        raise UsageError(
            f"[schedules.{stream.name}] in {CONFIGURATION}: {unknown[0]!r} is not an operation with a schedule: use "
            + ", ".join(sorted(DEFAULTS))
        )
    return [_schedule(stream, operation, cron) for operation, cron in (DEFAULTS | given).items() if cron != OFF]


def _schedule(stream: Stream, operation: str, cron: str) -> dg.ScheduleDefinition:
    def tick(
        context: dg.ScheduleEvaluationContext, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.RunRequest | dg.SkipReason:
        if before := find_unfinished(context.instance, stream, operation):
            return dg.SkipReason(f"run {before} is not done yet")
        if reason := _skip_reason(warehouse.settings(spark), stream.name, operation):
            return dg.SkipReason(reason)
        return dg.RunRequest(run_config=_config(stream, operation), tags=job_tags(stream, operation))

    decorated = dg.schedule(
        name=dagster_name(stream.name, operation, "schedule"),
        job_name=dagster_name(stream.name, operation),
        cron_schedule=cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if operation in ON else dg.DefaultScheduleStatus.STOPPED,
        description=f"{operation} of `{stream.name}`; a tick is skipped while an earlier run is in progress, or if "
        "there is nothing to do",
    )
    try:
        return decorated(tick)
    except dg.DagsterInvalidDefinitionError:
        raise UsageError(
            f"[schedules.{stream.name}] in {CONFIGURATION}: {operation} is {cron!r}, which is not a cron expression: "
            "write it like '0 5 * * *', or off"
        ) from None


def find_unfinished(instance: dg.DagsterInstance, stream: Stream, operation: str) -> str | None:
    """Return the id of a waiting or active run of an operation on a stream, if there is one."""
    going = [
        dg.DagsterRunStatus.NOT_STARTED,
        dg.DagsterRunStatus.QUEUED,
        dg.DagsterRunStatus.STARTING,
        dg.DagsterRunStatus.STARTED,
        dg.DagsterRunStatus.CANCELING,
    ]
    found = instance.get_runs(dg.RunsFilter(tags=job_tags(stream, operation), statuses=going), limit=1)
    return found[0].run_id if found else None


def _skip_reason(settings: Settings, stream: str, operation: str) -> str | None:
    """Say why no run is needed; None if one is, or if the catalog cannot be read, which the run then reports."""
    try:
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
            catalog = place.catalog
            if not any(record.name == stream for record in catalog.streams.list()) or not catalog.checkpoints.list(
                stream, 1
            ):
                return f"{stream} has no checkpoint yet"
            if operation == MATERIALIZE and not _is_due(settings, catalog, stream):
                return "no chain is due"
            if operation == SNAPSHOT:
                return find_obstacle(place, stream)
            if operation == VERIFY_DEEP and not catalog.reference_copies.list(stream):
                return f"no full snapshot to compare with: materialize {stream}/full_snapshot"
            if operation == OPTIMIZE and not any(place.warehouse.store.list(sink_tables(stream))):
                return f"no sink of {stream} is a table"
    except UsageError as error:  # mostly: no warehouse yet
        return str(error)
    except SiltstoneError:
        pass
    return None


def _is_due(settings: Settings, catalog: Catalog, stream: str) -> bool:
    health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
    return any(each.trigger for each in health.values())


def _config(stream: Stream, operation: str) -> dict:
    """Make the run config: materialize only chains that are due, and allow a snapshot to fail while a run is active."""
    configs = {MATERIALIZE: (MATERIALIZATION, {"due": True}), SNAPSHOT: (FULL_SNAPSHOT, {"if_possible": True})}
    if operation not in configs:
        return {}
    asset, config = configs[operation]
    return {"ops": {asset_key(stream.name, asset).to_python_identifier(): {"config": config}}}
