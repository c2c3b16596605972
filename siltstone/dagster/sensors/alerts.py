"""Tells people of what needs them: a failed proof, a stalled materialization, a stream that stands still."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta

import dagster as dg

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.dagster.names import dagster_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.resources.notifier import Alert, Notifier
from siltstone.errors import SiltstoneError
from siltstone.settings import Settings
from siltstone.stream import Stream

EVERY_S = 60


def alert_sensor(stream: Stream) -> dg.SensorDefinition:
    """Looks at the catalog, and tells the notifier of each alert once for as long as it lasts."""

    @dg.sensor(
        name=dagster_name(stream.name, "alerts"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Tells the notifier of failed proofs and stalled materializations of `{stream.name}`, and when "
        "it stands still.",
    )
    def alerts(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource, spark: SparkResource, notifier: Notifier
    ) -> dg.SkipReason:
        told = set(json.loads(context.cursor)) if context.cursor else set()
        settings = warehouse.settings(spark)
        try:
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                there = any(record.name == stream.name for record in place.catalog.streams.list())
                found = list(alerts_of(settings, place, stream.name)) if there else []
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        now = set()
        for alert in found:
            key = f"{alert.kind} {alert.since}"
            if key not in told:
                try:
                    notifier.notify(alert)
                except Exception as error:  # a notifier is anybody's code; the alert is told at the next look
                    context.log.warning(f"could not tell of {alert.stream}: {type(error).__name__}: {error}")
                    continue
            now.add(key)
        context.update_cursor(json.dumps(sorted(now)))
        return dg.SkipReason(f"{len(found)} alerts, {len(now - told)} told now")

    return alerts


def alerts_of(settings: Settings, place: OpenWarehouse, stream: str) -> Iterator[Alert]:
    """Everything about a stream that a person should look at."""
    catalog = place.catalog
    for record in catalog.checkpoints.list(stream):
        if record.proven is False:
            message = f"checkpoint {record.id} is not proven: {record.proof}"
            yield Alert(stream, "proof", message, f"checkpoint {record.id}")
    health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
    for operator, each in health.items():
        if not each.fine:
            yield Alert(stream, "materialization", each.reason, f"{operator} {_iso(each.facts.since)}")
    if catalog.runs.is_open(stream):
        run, newest = catalog.runs.list(stream)[-1], next(iter(catalog.checkpoints.list(stream, 1)), None)
        moved = max(run.started_at, newest.committed_at if newest else run.started_at)
        still = catalog.now() - moved
        if still > timedelta(seconds=settings.alerts.still_s):
            message = f"no checkpoint for {still.total_seconds():.0f} s, though {run.who} runs it since {_iso(moved)}"
            yield Alert(stream, "stream", message, _iso(moved))


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
