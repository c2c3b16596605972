"""Alert on failed proofs, stalled materialization, and streams that make no checkpoints."""

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
    """Make the sensor that reads alerts from the catalog and sends each one once, for as long as it lasts."""

    @dg.sensor(
        name=dagster_name(stream.name, "alerts"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Sends alerts on failed proofs and stalled materialization of `{stream.name}`, and when a run "
        "makes no checkpoints.",
    )
    def alerts(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource, spark: SparkResource, notifier: Notifier
    ) -> dg.SkipReason:
        sent = set(json.loads(context.cursor)) if context.cursor else set()
        settings = warehouse.settings(spark)
        try:
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                there = any(record.name == stream.name for record in place.catalog.streams.list())
                found = list(find_alerts(settings, place, stream.name)) if there else []
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        now = set()
        for alert in found:
            key = f"{alert.kind} {alert.since}"
            if key not in sent:
                try:
                    notifier.notify(alert)
                except Exception as error:  # a notifier may be user code; the next tick sends the alert again
                    context.log.warning(f"could not send an alert on {alert.stream}: {type(error).__name__}: {error}")
                    continue
            now.add(key)
        context.update_cursor(json.dumps(sorted(now)))
        return dg.SkipReason(f"{len(found)} alerts, {len(now - sent)} sent now")

    return alerts


def find_alerts(settings: Settings, place: OpenWarehouse, stream: str) -> Iterator[Alert]:
    """Find the current alerts of a stream in the catalog."""
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
            message = f"no checkpoint for {still.total_seconds():.0f} s, since {_iso(moved)}, though {run.who} runs it"
            yield Alert(stream, "stream", message, _iso(moved))


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
