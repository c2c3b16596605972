"""Checkpoints of streams that run outside Dagster, seen in the catalog and told as asset events."""

import json
from collections.abc import Iterator, Sequence

import dagster as dg

from siltstone.catalog.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import run_by_dagster
from siltstone.dagster.metadata import checkpoints_metadata, operator_metadata
from siltstone.dagster.names import BASE_CHECKPOINT, CHECKPOINTS, DELTA_CHAIN, asset_key, dagster_name
from siltstone.dagster.partitions import hours_of, hours_over, partitions_of
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import SiltstoneError
from siltstone.model import Form
from siltstone.stream import Stream

AT_ONCE = 50
"""how many checkpoints of a stream one look tells of"""
EVERY_S = 30


def new_checkpoints_sensor(stream: Stream) -> dg.SensorDefinition:
    """Reports a stream's checkpoints that were taken outside Dagster, as asset events.

    It also adds the hours in which checkpoints were committed as partitions, each when it is over. The cursor holds the
    newest checkpoint reported, and the hours that are not over yet.
    """

    @dg.sensor(
        name=dagster_name(stream.name, "new_checkpoints"),
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Turns checkpoints that `{stream.name}` took outside Dagster into asset events.",
    )
    def new_checkpoints(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.SensorResult | dg.SkipReason:
        cursor = json.loads(context.cursor or "{}")
        seen, hours = cursor.get("seen", 0), set(cursor.get("hours", ()))
        requests: list[dg.AddDynamicPartitionsRequest] = []
        settings = warehouse.settings(spark)
        try:
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                catalog = place.catalog
                if not any(record.name == stream.name for record in catalog.streams.list()):
                    return dg.SkipReason(f"{stream.name} has not run yet")
                records = catalog.checkpoints.list_after(stream.name, seen, AT_ONCE)
                events = list(_events(place, stream.name, records))
                partitions = partitions_of(stream)
                if isinstance(partitions, dg.DynamicPartitionsDefinition):
                    hours.update(hours_of(record.committed_at for record in records))
                    if over := hours_over(hours, catalog.now()):
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
    """The events of some checkpoints, but for those that runs of Dagster's told of themselves."""
    by_dagster = {run.epoch for run in place.catalog.runs.list(stream) if run_by_dagster(run.who)}
    for record in records:
        if record.epoch in by_dagster:
            continue
        for operator, form in record.forms.items():
            metadata, digest = operator_metadata(place, stream, operator, record.id)
            yield dg.AssetMaterialization(
                asset_key(stream, operator, BASE_CHECKPOINT if form is Form.BASE else DELTA_CHAIN),
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
                # What is drawn of the stream is drawn once a look, of what it is now.
                **(
                    checkpoints_metadata(place, stream)
                    if record.id == place.catalog.checkpoints.last_id(stream)
                    else {}
                ),
            },
            tags={"dagster/data_version": record.digest},
        )
