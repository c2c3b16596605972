"""Alert on failed proofs, stalled materialization, and streams that make no checkpoints."""

import json
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta
from functools import cache

import dagster as dg

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.dagster.names import location_name
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.resources.notifier import Alert, Notifier
from siltstone.dagster.runs import streams_of
from siltstone.errors import SiltstoneError, Unreachable
from siltstone.settings import Settings

EVERY_S = 60
SENDING_S = 20.0
"""seconds after which a tick sends no more: Dagster ends one that takes a minute, and all that it sent came again"""


@cache
def alert_sensor() -> dg.SensorDefinition:
    """Make the sensor that reads alerts on all streams from the catalog, and sends each one once for as long as it
    lasts."""

    @dg.sensor(
        name=location_name("alerts"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sends alerts on failed proofs and stalled materialization, and when a run makes no checkpoints.",
    )
    def alerts(
        context: dg.SensorEvaluationContext,
        siltstone_warehouse: WarehouseResource,
        siltstone_spark: SparkResource,
        siltstone_notifier: Notifier,
    ) -> dg.SkipReason:
        sent = set(json.loads(context.cursor)) if context.cursor else set()
        streams, settings = streams_of(context.repository_def), siltstone_warehouse.settings(siltstone_spark)
        try:
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                found = list(find_alerts(settings, place, streams, context.log.warning))
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        began = time.monotonic()
        now = {
            key for key in sent if key.partition(" ")[0] not in streams
        }  # away for now, such as a module that is broken
        for alert in found:
            key = f"{alert.stream} {alert.kind} {alert.since}"
            if key not in sent:
                if time.monotonic() - began > SENDING_S:
                    continue  # the next tick sends it, if it lasts
                try:
                    siltstone_notifier.notify(alert)
                except Exception as error:  # a notifier may be user code; the next tick sends the alert again
                    context.log.warning(f"could not send an alert on {alert.stream}: {type(error).__name__}: {error}")
                    continue
            now.add(key)
        context.update_cursor(json.dumps(sorted(now)))
        return dg.SkipReason(f"{len(found)} alerts, {len(now - sent)} sent now")

    return alerts


def find_alerts(
    settings: Settings, place: OpenWarehouse, streams: Collection[str], warn: Callable[[str], object]
) -> Iterator[Alert]:
    """Find the current alerts on some streams in the catalog; nothing of those that have not run.

    What cannot be found out about one stream is a warning, and the others go on.
    """
    catalog = place.catalog
    for record in catalog.checkpoints.list_failed():
        if record.stream in streams:
            message = f"checkpoint {record.id} is not proven: {record.proof}"
            yield Alert(record.stream, "proof", message, f"checkpoint {record.id}")
    for record in catalog.streams.list():
        if record.name in streams:
            try:
                yield from list(_find_stalled(settings, catalog, record.name))
            except Unreachable:
                raise
            except SiltstoneError as error:
                warn(f"cannot tell whether stream {record.name} stands still: {error}")


def _find_stalled(settings: Settings, catalog: Catalog, stream: str) -> Iterator[Alert]:
    """Find materialization that does not keep up, and a run that makes no checkpoints."""
    health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
    for operator, each in health.items():
        if not each.fine:
            yield Alert(stream, "materialization", each.reason, f"{operator} {_iso(each.facts.since)}")
    run = catalog.runs.get_newest(stream)
    if run is not None and run.ended_at is None:
        newest = next(iter(catalog.checkpoints.list(stream, 1)), None)
        moved = max(run.started_at, newest.committed_at if newest else run.started_at)
        still = catalog.now() - moved
        if still > timedelta(seconds=settings.alerts.still_s):
            message = f"no checkpoint for {still.total_seconds():.0f} s, since {_iso(moved)}, though {run.who} runs it"
            yield Alert(stream, "stream", message, _iso(moved))


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
