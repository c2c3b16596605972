"""Report checkpoints of runs outside Dagster as asset events, from the catalog, for all streams of a code location."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache

import dagster as dg

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.metadata import to_dagster
from siltstone.dagster.names import asset_key, location_name
from siltstone.dagster.partitions import hours_of, past_hours
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.runs import keys_in, streams_of
from siltstone.errors import SiltstoneError, Unreachable
from siltstone.model import Form
from siltstone.pipes.metadata import ROWS, checkpoints_metadata, operator_metadata
from siltstone.pipes.parts import BASE_CHECKPOINT, CHECKPOINTS, DELTA_CHAIN, is_dagster_run

AT_ONCE = 100
"""checkpoints after which a tick leaves the other streams to the next: other sensors wait while events are written"""
SHOWN = 25
"""most checkpoints of a stream that one tick reports, the newest; those before them are only in the catalog"""
EVERY_S = 10
Partitions = Mapping[str, dg.PartitionsDefinition | None]


@dataclass
class Seen:
    """What was reported: stream -> its newest reported checkpoint, and its hours that are not over yet.

    A checkpoint is its id; its epoch, since after a rollback ids come again under a later one; and when its stream
    began, since another catalog may have a stream of the same name.

    `last` is the stream that the last tick ended with, after which the next begins; `drawn` is the one whose chain was
    drawn last.
    """

    checkpoints: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    hours: dict[str, list[str]] = field(default_factory=dict)
    last: str = ""
    drawn: str = ""

    @classmethod
    def of(cls, cursor: str | None) -> "Seen":
        """Read a cursor; one that another version has left counts as none."""
        try:
            seen = cls(**json.loads(cursor or "{}"))
            seen.checkpoints = {name: (id, epoch, began) for name, (id, epoch, began) in seen.checkpoints.items()}
            return seen
        except (TypeError, ValueError, AttributeError):
            return cls()


@cache
def observation_sensor() -> dg.SensorDefinition:
    """Make the sensor that reports checkpoints of runs outside Dagster as asset events.

    It also adds each hour in which a checkpoint was committed as a partition, once the hour is over. One query tells
    which streams have new checkpoints. Of a stream that is far behind, as when Dagster comes later, the newest few are
    reported, and all hours.
    """

    @dg.sensor(
        name=location_name("new_checkpoints"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports checkpoints that were made outside Dagster as asset events, of all streams.",
    )
    def new_checkpoints(
        context: dg.SensorEvaluationContext, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> dg.SensorResult | dg.SkipReason:
        seen = Seen.of(context.cursor)
        partitions, settings = streams_of(context.repository_def), siltstone_warehouse.settings(siltstone_spark)
        try:
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                keys = keys_in(context.repository_def)
                told = _report_new(context, place, partitions, seen)
                events = [event._replace(asset_key=keys[event.asset_key]) for event in told]
                requests = _add_hours(partitions, seen, place.catalog.now())
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        return dg.SensorResult(
            asset_events=events, dynamic_partitions_requests=requests, cursor=json.dumps(asdict(seen))
        )

    return new_checkpoints


def _report_new(
    context: dg.SensorEvaluationContext, place: OpenWarehouse, partitions: Partitions, seen: Seen
) -> Iterator[dg.AssetMaterialization]:
    """Make the events of streams with new checkpoints, up to a number, and note what they are of."""
    catalog, left = place.catalog, AT_ONCE
    newest = {
        name: (id, epoch, began.isoformat())
        for name, (id, epoch, began) in catalog.checkpoints.list_newest().items()
        if name in partitions
    }
    new = [name for name in newest if newest[name] != seen.checkpoints.get(name)]
    draws = min(new, key=lambda name: (name <= seen.drawn, name), default=None)
    for name in sorted(new, key=lambda name: (name <= seen.last, name)):
        if left <= 0:
            break
        last, _, begin = newest[name]
        id, epoch, began_then = seen.checkpoints.get(name, (0, 0, begin))
        if began_then != begin:
            id, epoch = 0, 0
        listed = catalog.checkpoints.list(name, SHOWN)
        records = [each for each in listed if each.id <= last and (each.id > id or each.epoch > epoch)]
        yield from _events(context, place, name, records, draws=name == draws)
        if not isinstance(partitions[name], dg.TimeWindowPartitionsDefinition):
            hours = hours_of(catalog.checkpoints.list_times_after(name, id, epoch))
            seen.hours[name] = sorted({*seen.hours.get(name, ()), *hours})
        seen.drawn = name if name == draws else seen.drawn
        left, seen.last = left - len(records), name
        seen.checkpoints[name] = newest[name]


def _add_hours(partitions: Partitions, seen: Seen, now: datetime) -> list[dg.AddDynamicPartitionsRequest]:
    """Request partitions of the hours that are over, and forget these."""
    requests = []
    for name, hours in seen.hours.items():
        over, of_stream = past_hours(hours, now), partitions.get(name)
        if over and isinstance(of_stream, dg.DynamicPartitionsDefinition):
            requests.append(of_stream.build_add_request(over))
            seen.hours[name] = [hour for hour in hours if hour not in over]
    seen.hours = {name: hours for name, hours in seen.hours.items() if hours}
    return requests


def _events(
    context: dg.SensorEvaluationContext,
    place: OpenWarehouse,
    stream: str,
    records: Sequence[CheckpointRecord],
    *,
    draws: bool,
) -> Iterator[dg.AssetMaterialization]:
    """Make the events of some checkpoints, except those of runs of Dagster, which report their own.

    The newest one describes the chain, with a picture if it `draws`: that takes as long as a dozen events. A checkpoint
    that is damaged has no events; the checks say why.
    """
    owners = place.catalog.runs.get_owners(stream, {record.epoch for record in records})
    for record in records:
        if is_dagster_run(owners.get(record.epoch, "")):
            continue
        try:
            events = list(_events_of(place, record, draws=draws if record is records[-1] else None))
        except Unreachable:
            raise
        except SiltstoneError as error:
            context.log.warning(f"checkpoint {record.id} of stream {stream} is not reported: {error}")
        else:
            yield from events


def _events_of(
    place: OpenWarehouse, record: CheckpointRecord, *, draws: bool | None
) -> Iterator[dg.AssetMaterialization]:
    """Make the events of one checkpoint; `draws` is None unless it is the newest."""
    for operator, form in record.forms.items():
        metadata, digest = operator_metadata(place, record.stream, operator, record.id)
        yield dg.AssetMaterialization(
            asset_key(record.stream, operator, DELTA_CHAIN if form is Form.DELTA else BASE_CHECKPOINT),
            metadata=to_dagster(metadata),
            tags={"dagster/data_version": digest},
        )
    yield dg.AssetMaterialization(
        asset_key(record.stream, CHECKPOINTS),
        metadata={
            "checkpoint": record.id,
            "digest": record.digest,
            ROWS: record.rows,
            "bytes": record.bytes,
            "committed_at": record.committed_at.isoformat(timespec="seconds"),
            **to_dagster(checkpoints_metadata(place, record.stream, draws=draws) if draws is not None else {}),
        },
        tags={"dagster/data_version": record.digest},
    )
