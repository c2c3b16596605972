"""Make all Dagster definitions of a stream in one call.

Loading only imports Dagster and the modules that define streams: no warehouse or catalog is read, no JVM starts.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache

import dagster as dg

from siltstone.dagster.assets.full_snapshot import full_snapshot_asset
from siltstone.dagster.assets.materialization import materialization_asset
from siltstone.dagster.assets.restored_state import restored_state_asset
from siltstone.dagster.assets.run import events_asset, run_asset
from siltstone.dagster.automation import restore_condition
from siltstone.dagster.checks.asset_checks import stream_checks
from siltstone.dagster.code import code_reference
from siltstone.dagster.jobs import operation_jobs, stream_job
from siltstone.dagster.launch import Launch
from siltstone.dagster.names import NO_OPTIONS, PART_TAG, OpOptions, asset_of, mark, store_kinds
from siltstone.dagster.resources import LogNotifier, Notifier, SparkResource, WarehouseResource, WebhookNotifier
from siltstone.dagster.schedules import stream_schedules
from siltstone.dagster.sensors.alerts import alert_sensor
from siltstone.dagster.sensors.observation import observation_sensor
from siltstone.dagster.sensors.recovery import recovery_sensor, sweep_sensor
from siltstone.dagster.translator import Asset, StreamTranslator, translate
from siltstone.errors import UsageError, summarize
from siltstone.pipes.parts import CHECKPOINTS, STORED
from siltstone.settings import Settings, load_settings
from siltstone.stream import Stream, find_stream

FRESHNESS_MIN_S = 60


def stream_definitions(
    stream: Stream | str,
    *,
    forks: Sequence[str] = (),
    owners: Sequence[str] = (),
    fresh_within_s: float | None = None,
    settings: Settings | None = None,
    translator: StreamTranslator | None = None,
    launch: Launch | None = None,
    select: str | None = None,
    op: OpOptions = NO_OPTIONS,
    shared: bool = True,
) -> dg.Definitions:
    """Make all assets, checks, jobs, schedules, sensors and resources of a stream and its forks.

    Definitions of several streams can be merged (`dg.Definitions.merge`), also with those of other projects. The assets
    and the job of one stream begin with its name. What all streams share begins with `siltstone` and is there once:
    sensors, the jobs and schedules of operations, resources.

        from siltstone.dagster import stream_definitions

        defs = stream_definitions("flights", forks=["flights-what-if"])

    Args:
        stream: a `Stream`, or the name of one in the modules listed in siltstone.toml.
        forks: names of forks that have no definition of their own; they need not exist yet.
        owners: emails, or teams as `team:NAME`, shown with each asset.
        fresh_within_s: a new checkpoint is expected within this many seconds (60 or more), after which Dagster shows
            the checkpoints as stale. None expects nothing, for a stream that runs only when there is input.
        settings: the engine's settings; default those of siltstone.toml and `SILTSTONE_*`, which what all streams share
            follows in any case.
        translator: gives the assets other keys and attributes.
        launch: runs the streams in processes of their own (`siltstone.dagster.launch`); default in those of the steps.
        select: which assets to define, in Dagster's syntax; those that a run makes come together.
        op: tags, pool and backfill policy of the steps.
        shared: whether what all streams share is part of the definitions. It must be there once, so where definitions
            are copied before they are merged, only one of them may have it.

    Raises:
        UnknownStream: no stream of that name is defined; the message lists those found.
        UsageError: a fork would write to its parent's sinks, or an option is not valid.
    """
    settings = settings or load_settings()
    first = find_stream(stream, settings.streams) if isinstance(stream, str) else stream
    streams = [first, *(first.as_fork(name, first.origin or first.name) for name in forks)]
    assets = [asset for each in streams for asset in stream_assets(each, launch, op)]
    if fresh_within_s is not None:
        assets = expect_checkpoints(assets, fresh_within_s)
    annotated = annotate(assets, streams, settings, owners)
    checks = [check for each in streams for check in stream_checks(each, op)]
    assets, checks = _select(*translate(annotated, checks, streams, translator or StreamTranslator()), select)
    return dg.Definitions(
        assets=assets,
        asset_checks=checks,
        jobs=[*(map(stream_job, streams) if _has_run(assets) else ()), *(operation_jobs() if shared else ())],
        schedules=list(dict.fromkeys(s for each in streams for s in stream_schedules(each, settings, shared=shared))),
        sensors=stream_sensors() if shared else (),
        resources=stream_resources(webhook=bool(settings.alerts.webhook)),
    )


def stream_assets(stream: Stream, launch: Launch | None = None, op: OpOptions = NO_OPTIONS) -> list[Asset]:
    """Make the assets of one stream, upstream first."""
    return [
        events_asset(stream),
        run_asset(stream, launch, op),
        materialization_asset(stream, op),
        full_snapshot_asset(stream, op),
        restored_state_asset(stream, restore_condition(stream), op),
    ]


def _select(
    assets: list[Asset], checks: list[dg.AssetsDefinition], select: str | None
) -> tuple[list[Asset], list[dg.AssetsDefinition]]:
    """Select assets by Dagster's syntax, such as `not tag:siltstone/part=full_snapshot`, and the checks of these.

    Raises:
        UsageError: it is not a selection, or selects nothing.
    """
    if select is None:
        return assets, checks
    there = [dg.AssetsDefinition(specs=[each]) if isinstance(each, dg.AssetSpec) else each for each in assets]
    try:
        chosen = dg.AssetSelection.from_string(select, include_sources=True).resolve(there)
    except Exception as error:  # what Dagster parses it may not be able to resolve
        text = summarize(error)
        raise UsageError(f"select is {select!r}, which is not a selection of a stream's assets: {text}") from None
    if not chosen:
        raise UsageError(f"select is {select!r}, which is none of the stream's assets")
    made = [asset for asset in assets if not chosen.isdisjoint(_keys(asset))]
    about = {key for asset in made for key in _keys(asset)}
    return made, [check for check in checks if {key.asset_key for key in check.check_keys} <= about]


def _has_run(assets: Iterable[Asset]) -> bool:
    specs = (spec for asset in assets if isinstance(asset, dg.AssetsDefinition) for spec in asset.specs)
    return any(spec.tags.get(PART_TAG) == CHECKPOINTS for spec in specs)


def _keys(asset: Asset) -> set[dg.AssetKey]:
    return {asset.key} if isinstance(asset, dg.AssetSpec) else set(asset.keys)


def annotate(
    assets: Iterable[Asset], streams: Iterable[Stream], settings: Settings, owners: Sequence[str] = ()
) -> list[Asset]:
    """Add to each asset a link to its code, the kind of its store, its owners, and the tags by which it is found."""
    by_name = {stream.name: stream for stream in streams}
    in_store = store_kinds(settings.warehouse)

    def add_attributes(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.merge_attributes(
            metadata=code_reference(by_name[spec.key.path[0]], spec.key),
            kinds=in_store if asset_of(spec.key)[1] in STORED else set(),
            owners=owners,
        )

    return list(dg.map_asset_specs(lambda spec: mark(add_attributes(spec)), list(assets)))


def expect_checkpoints(assets: Iterable[Asset], within_s: float) -> list[Asset]:
    """Expect a new checkpoint within a number of seconds: Dagster shows the checkpoints as stale after that.

    Raises:
        UsageError: less than 60 seconds, which Dagster does not evaluate.
    """
    if within_s < FRESHNESS_MIN_S:
        raise UsageError(f"fresh_within_s is {within_s}: use {FRESHNESS_MIN_S} seconds or more")
    policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=within_s))

    def add_policy(spec: dg.AssetSpec) -> dg.AssetSpec:
        return dg.apply_freshness_policy(spec, policy) if asset_of(spec.key)[1] == CHECKPOINTS else spec

    return list(dg.map_asset_specs(add_policy, list(assets)))


def stream_sensors() -> list[dg.SensorDefinition]:
    """Make the sensors that all streams of a code location share; recovery is first, and waits for none."""
    return [recovery_sensor(), sweep_sensor(), observation_sensor(), alert_sensor()]


@cache
def stream_resources(*, webhook: bool = False) -> dict[str, WarehouseResource | SparkResource | Notifier]:
    """Make the resources that all streams share; each call returns the same objects.

    Args:
        webhook: whether alerts go to the webhook of the settings; otherwise to the log.
    """
    return {
        "siltstone_warehouse": WarehouseResource(),
        "siltstone_spark": SparkResource(),
        "siltstone_notifier": WebhookNotifier() if webhook else LogNotifier(),
    }
