"""Report checkpoints of runs outside Dagster as asset events, from the catalog."""

import json
from collections.abc import Iterator, Sequence

import dagster as dg

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import is_dagster_run
from siltstone.dagster.metadata import checkpoints_metadata, operator_metadata
from siltstone.dagster.names import BASE_CHECKPOINT, CHECKPOINTS, DELTA_CHAIN, asset_key, dagster_name
from siltstone.dagster.partitions import hours_of, partitions_of, past_hours
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import SiltstoneError
from siltstone.model import Form
from siltstone.stream import Stream

AT_ONCE = 50
"""most checkpoints that one tick reports"""
EVERY_S = 30


def new_checkpoints_sensor(stream: Stream) -> dg.SensorDefinition:
    """Make the sensor that reports a stream's checkpoints of runs outside Dagster as asset events.

    It also adds each hour in which a checkpoint was committed as a partition, once the hour is over. The cursor has the
    newest reported checkpoint, and the hours that are not over yet.
    """

    @dg.sensor(
        name=dagster_name(stream.name, "new_checkpoints"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Reports checkpoints of `{stream.name}` that were made outside Dagster as asset events.",
    )
    def new_checkpoints(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.SensorResult | dg.SkipReason:
        cursor = json.loads(context.cursor or "{}")
        seen, hours = cursor.get("seen", 0), set(cursor.get("hours", ()))
        requests: list[dg.AddDynamicPartitionsRequest] = []
        settings = warehouse.settings(spark)
        try:
            with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
                catalog = place.catalog
                if not any(record.name == stream.name for record in catalog.streams.list()):
                    return dg.SkipReason(f"{stream.name} has not run yet")
                records = catalog.checkpoints.list_after(stream.name, seen, AT_ONCE)
                events = list(_events(place, stream.name, records))
                partitions = partitions_of(stream)
                if isinstance(partitions, dg.DynamicPartitionsDefinition):
                    hours.update(hours_of(record.committed_at for record in records))
                    if over := past_hours(hours, catalog.now()):
                        requests.append(partitions.build_add_request(over))
                        hours.difference_update(over)
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        cursor = {"seen": records[-1].id if records else seen, "hours": sorted(hours)}
        return dg.SensorResult(asset_events=events, dynamic_partitions_requests=requests, cursor=json.dumps(cursor))

    return new_checkpoints


def _events(
    place: OpenWarehouse, stream: str, records: Sequence[CheckpointRecord]
) -> Iterator[dg.AssetMaterialization]:
    """Make the events of some checkpoints, except those of runs of Dagster, which report their own."""
    by_dagster = {run.epoch for run in place.catalog.runs.list(stream) if is_dagster_run(run.who)}
    for record in records:
        if record.epoch in by_dagster:
            continue
        for operator, form in record.forms.items():
            metadata, digest = operator_metadata(place, stream, operator, record.id)
            yield dg.AssetMaterialization(
                asset_key(stream, operator, DELTA_CHAIN if form is Form.DELTA else BASE_CHECKPOINT),
                metadata=metadata,
                tags={"dagster/data_version": digest},
            )
        yield dg.AssetMaterialization(
            asset_key(stream, CHECKPOINTS),
            metadata={
                "checkpoint": record.id,
                "digest": record.digest,
                "state_rows": record.rows,
                "bytes": record.bytes,
                "committed_at": record.committed_at.isoformat(timespec="seconds"),
                # The picture shows the current stream, so only the newest checkpoint gets one.
                **(
                    checkpoints_metadata(place, stream)
                    if record.id == place.catalog.checkpoints.last_id(stream)
                    else {}
                ),
            },
            tags={"dagster/data_version": record.digest},
        )
