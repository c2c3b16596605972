"""The schedules of operations, one each for all streams of a code location. siltstone.toml can change them by stream.

On by default: the snapshot, the deep verification that compares with it, and the upkeep of the tables of sinks, without
which each checkpoint leaves them one more small file. Turn the others on in the page.

[schedules.flights]
sweep = "0 5 * * *"     # cron, UTC: a schedule of its own
verify_deep = "off"     # no schedule at all
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache

import dagster as dg

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.dagster.jobs import MATERIALIZE, OPTIMIZE, SNAPSHOT, SWEEP, TRUNCATE, VERIFY, VERIFY_DEEP
from siltstone.dagster.names import Keys, asset_key, dagster_name, location_name, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.runs import StreamRuns, keys_in, op_config, streams_of
from siltstone.errors import SiltstoneError, UsageError
from siltstone.pipes.parts import CHECKPOINTS, FULL_SNAPSHOT, MATERIALIZATION
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
_MADE = {MATERIALIZE: (MATERIALIZATION, {"due": True}), SNAPSHOT: (FULL_SNAPSHOT, {"if_possible": True})}
"""operation -> the asset that it makes and the options: only chains that are due; none while a run is active"""
_CHECKED = {VERIFY: (CHECKPOINTS, MATERIALIZATION), VERIFY_DEEP: (FULL_SNAPSHOT,)}
"""operation -> the assets whose checks it runs"""
_NAMED = 3
"""most streams that a reason names"""


def check_schedules(settings: Settings, streams: Collection[str]) -> None:
    """Raise UsageError if the settings have schedules of a stream that is not in `streams`."""
    if unknown := sorted(settings.schedules.keys() - set(streams)):
        known = ", ".join(sorted(streams)) or "none"
        raise UsageError(
            f"[schedules.{unknown[0]}] in {CONFIGURATION}: no stream {unknown[0]!r} is defined (defined: {known})"
        )


def stream_schedules(stream: Stream, settings: Settings, *, shared: bool = True) -> list[dg.ScheduleDefinition]:
    """Make the schedules of one stream: those of its own, and if they are `shared`, those of all streams.

    The latter are the same objects for each stream. A stream may have turned each off for itself.

    Raises:
        UsageError: the settings name an unknown operation, or a value that is not a cron expression.
    """
    given = settings.schedules.get(stream.name, {})
    if unknown := sorted(given.keys() - DEFAULTS):
        raise UsageError(
            f"[schedules.{stream.name}] in {CONFIGURATION}: {unknown[0]!r} is not an operation with a schedule: use "
            + ", ".join(sorted(DEFAULTS))
        )
    own = [(operation, cron) for operation, cron in given.items() if cron not in (OFF, DEFAULTS[operation])]
    return [
        *(map(_common_schedule, DEFAULTS) if shared else ()),
        *(_own_schedule(stream.name, operation, cron) for operation, cron in own),
    ]


@cache
def _common_schedule(operation: str) -> dg.ScheduleDefinition:
    def streams(context: dg.ScheduleEvaluationContext, settings: Settings) -> list[str]:
        usual = DEFAULTS[operation]
        return [s for s in streams_of(context.repository_def) if _cron(settings, s, operation) == usual]

    return _schedule(location_name(operation, "schedule"), operation, DEFAULTS[operation], streams, "every stream")


def _own_schedule(stream: str, operation: str, cron: str) -> dg.ScheduleDefinition:
    try:
        return _schedule(
            dagster_name(stream, operation, "schedule"), operation, cron, lambda *_: [stream], f"`{stream}`"
        )
    except dg.DagsterInvalidDefinitionError:
        raise UsageError(
            f"[schedules.{stream}] in {CONFIGURATION}: {operation} is {cron!r}, which is not a cron expression: "
            "write it like '0 5 * * *', or off"
        ) from None


def _cron(settings: Settings, stream: str, operation: str) -> str:
    return settings.schedules.get(stream, {}).get(operation, DEFAULTS[operation])


def _schedule(
    name: str,
    operation: str,
    cron: str,
    streams: Callable[[dg.ScheduleEvaluationContext, Settings], list[str]],
    whose: str,
) -> dg.ScheduleDefinition:
    def tick(
        context: dg.ScheduleEvaluationContext, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> list[dg.RunRequest] | dg.SkipReason:
        settings = siltstone_warehouse.settings(siltstone_spark)
        given = streams(context, settings)
        reasons = _skip_reasons(settings, given, operation)
        keys = keys_in(context.repository_def)
        before = StreamRuns(context.instance, keys).find_unfinished(operation)
        reasons |= {name: f"run {before[name]} is not done yet" for name in given if name in before}
        due = [name for name in given if name not in reasons]
        checks = context.repository_def.asset_graph.asset_check_keys
        requests = [request for name in due if (request := _request(keys, checks, name, operation))]
        return requests or dg.SkipReason(_summarize(reasons) or "no stream has this schedule")

    return dg.schedule(
        name=name,
        job_name=location_name(operation),
        cron_schedule=cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if operation in ON else dg.DefaultScheduleStatus.STOPPED,
        description=f"{operation} of {whose}; a stream is skipped while an earlier run is in progress, or if there is "
        "nothing to do",
    )(tick)


def _summarize(reasons: Mapping[str, str]) -> str:
    """Say why nothing is launched: each reason once, with the streams that it is of."""
    by_reason: dict[str, list[str]] = {}
    for stream, reason in reasons.items():
        by_reason.setdefault(reason, []).append(stream)
    return "; ".join(
        f"{', '.join(names[:_NAMED])}{' ...' * (len(names) > _NAMED)}: {why}" for why, names in by_reason.items()
    )


def _skip_reasons(settings: Settings, streams: Collection[str], operation: str) -> dict[str, str]:
    """Say for which streams no run is needed, and why; if the catalog cannot be read, the runs report that."""
    try:
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
            ran = place.catalog.checkpoints.list_newest()
            found = {name: _skip_reason(settings, place, ran, name, operation) for name in streams}
            return {name: reason for name, reason in found.items() if reason}
    except UsageError as error:  # mostly: no warehouse yet
        return dict.fromkeys(streams, str(error))
    except SiltstoneError:
        return {}


def _skip_reason(
    settings: Settings, place: OpenWarehouse, ran: Collection[str], stream: str, operation: str
) -> str | None:
    """Say why no run is needed; None if one is, or if that cannot be found out, which the run then reports."""
    try:
        return _find_reason(settings, place, ran, stream, operation)
    except UsageError as error:
        return str(error)
    except SiltstoneError:
        return None


def _find_reason(
    settings: Settings, place: OpenWarehouse, ran: Collection[str], stream: str, operation: str
) -> str | None:
    catalog = place.catalog
    if stream not in ran:
        return "no checkpoint yet"
    if operation == MATERIALIZE and not _is_due(settings, catalog, stream):
        return "no chain is due"
    if operation == SNAPSHOT:
        return find_obstacle(place, stream)
    if operation == VERIFY_DEEP and not catalog.reference_copies.list(stream):
        return "no full snapshot to compare with: materialize its full_snapshot"
    if operation == OPTIMIZE and not any(place.warehouse.store.list(sink_tables(stream))):
        return "no sink is a table"
    return None


def _is_due(settings: Settings, catalog: Catalog, stream: str) -> bool:
    health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
    return any(each.trigger for each in health.values())


def _request(keys: Keys, checks: Collection[dg.AssetCheckKey], stream: str, operation: str) -> dg.RunRequest | None:
    """Request a run of one stream; None if a project left out what it would make or check.

    Args:
        keys: those of the code location's assets.
        checks: the code location's.
    """
    tags = run_tags(stream, operation)
    if operation in _MADE:
        asset, config = _MADE[operation]
        name = asset_key(stream, asset)
        if name not in keys:
            return None
        run_config = {"ops": {name.to_python_identifier(): {"config": config}}}
        checked = None if operation == MATERIALIZE else []
        return dg.RunRequest(
            stream, run_config=run_config, asset_selection=[keys[name]], asset_check_keys=checked, tags=tags
        )
    if operation in _CHECKED:
        about = {keys[asset_key(stream, asset)] for asset in _CHECKED[operation]}
        found = sorted(check for check in checks if check.asset_key in about)
        return dg.RunRequest(stream, asset_check_keys=found, tags=tags) if found else None
    return dg.RunRequest(stream, run_config=op_config(operation, stream), tags=tags)
