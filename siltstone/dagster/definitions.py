"""Puts together what Dagster is shown of streams: assets, checks, jobs, schedules, sensors and resources.

Loading imports Dagster and the modules that define streams, and nothing else happens: no warehouse or catalog is
looked at, no JVM starts.
"""

import re
from collections.abc import Iterable, Mapping

import dagster as dg

from siltstone.dagster.assets.full_snapshot import full_snapshot_asset
from siltstone.dagster.assets.materialization import materialization_asset
from siltstone.dagster.assets.restored_state import restored_state_asset
from siltstone.dagster.assets.run import events_asset, run_asset
from siltstone.dagster.automation import restore_condition
from siltstone.dagster.checks.asset_checks import stream_checks
from siltstone.dagster.code import code_reference
from siltstone.dagster.jobs import OPERATION_TAG, RECOVER, SWEEP, asset_jobs, op_jobs
from siltstone.dagster.names import SINK, asset_of, dagster_name, store_kinds
from siltstone.dagster.resources import LogNotifier, SparkResource, WarehouseResource, WebhookNotifier
from siltstone.dagster.schedules import all_schedules
from siltstone.dagster.sensors.alerts import alert_sensor
from siltstone.dagster.sensors.observation import new_checkpoints_sensor
from siltstone.dagster.sensors.recovery import recovery_sensor, sweep_sensor
from siltstone.settings import Settings, load_settings
from siltstone.stream import Stream, find_streams

BROKEN = "broken_stream_modules"


def project_definitions() -> dg.Definitions:
    """Definitions for every stream of the modules that siltstone.toml names.

    Raises:
        UsageError: siltstone.toml or a `SILTSTONE_*` variable holds what is no option.
    """
    settings = load_settings()
    return definitions_of(*find_streams(settings.streams), settings)


def definitions_of(
    streams: Mapping[str, Stream], broken: Mapping[str, str], settings: Settings | None = None
) -> dg.Definitions:
    """Definitions for some streams; each of `broken` (what did not load -> why) is shown with its reason."""
    settings = settings or load_settings()
    shown, clashing = _distinct(streams.values())
    not_loaded = {**broken, **clashing}
    for what, why in not_loaded.items():
        dg.get_dagster_logger().warning(f"{what} did not load: {why}")
    by_name = {stream.name: stream for stream in shown}
    kept = [job for stream in shown for job in op_jobs(stream)]
    recoveries, sweeps = ([j for j in kept if j.tags[OPERATION_TAG] == operation] for operation in (RECOVER, SWEEP))
    return dg.Definitions(
        assets=[
            *(asset for stream in shown for asset in stream_assets(stream, settings)),
            *(_broken(what, why) for what, why in not_loaded.items()),
        ],
        asset_checks=[check for stream in shown for check in stream_checks(stream)],
        jobs=[*(job for stream in shown for job in asset_jobs(stream)), *kept],
        schedules=all_schedules(shown, settings, not_loaded),
        sensors=[
            new_checkpoints_sensor(by_name),
            recovery_sensor(by_name, recoveries, settings),
            sweep_sensor(by_name, recoveries, sweeps, settings),
            alert_sensor(by_name),
        ]
        if shown
        else [],
        resources={
            "warehouse": WarehouseResource(),
            "spark": SparkResource(),
            "notifier": WebhookNotifier() if settings.alerts.webhook else LogNotifier(),
        },
        # One process, hence one Spark session, for all steps of a run.
        executor=dg.in_process_executor,
    )


def stream_assets(stream: Stream, settings: Settings) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    """The assets of one stream, upstream first, each with the code that it comes from and the store it lies in."""
    stored = [run_asset(stream), materialization_asset(stream), full_snapshot_asset(stream)]
    in_store = store_kinds(settings.warehouse)
    assets: list[dg.AssetSpec | dg.AssetsDefinition] = [
        events_asset(stream),
        *dg.map_asset_specs(lambda s: s if asset_of(s.key)[1] == SINK else s.merge_attributes(kinds=in_store), stored),
        restored_state_asset(stream, restore_condition(stream)),
    ]
    return list(dg.map_asset_specs(lambda s: s.merge_attributes(metadata=code_reference(stream, s.key)), assets))


def _distinct(streams: Iterable[Stream]) -> tuple[list[Stream], dict[str, str]]:
    """The streams that Dagster can tell apart, and why the others are left out."""
    by_name: dict[str, Stream] = {}
    clashing: dict[str, str] = {}
    for stream in streams:
        first = by_name.setdefault(dagster_name(stream.name), stream)
        if first is not stream:
            clashing[stream.name] = f"Dagster takes it for stream {first.name}, as - and _ are one to it: rename one"
    return list(by_name.values()), clashing


def _broken(what: str, why: str) -> dg.AssetSpec:
    """A place in the asset graph where the reader sees what is missing, and why."""
    return dg.AssetSpec(
        dg.AssetKey([BROKEN, *re.findall(r"[\w-]+", what)]),
        group_name=BROKEN,
        description=f"Its streams are missing here, as `{what}` did not load:\n\n    {why}",
        metadata={"error": why},
    )
