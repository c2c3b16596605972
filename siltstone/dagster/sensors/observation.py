"""Checkpoints of streams that run outside Dagster, seen in the catalog and told as asset events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from siltstone.catalog.records import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import run_by_dagster
from siltstone.dagster.metadata import checkpoints_metadata, operator_metadata
from siltstone.dagster.names import BASE_CHECKPOINT, CHECKPOINTS, DELTA_CHAIN, asset_key
from siltstone.dagster.partitions import hours_of, hours_over, partitions_of
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.errors import SiltstoneError
from siltstone.model import Form
from siltstone.stream import Stream

AT_ONCE = 50
"""how many checkpoints of a stream one look tells of"""
EVERY_S = 30


def new_checkpoints_sensor(streams: Mapping[str, Stream]) -> dg.SensorDefinition:
    """Tells of checkpoints that came to be outside Dagster, and adds the hours in which any did as partitions, each
    when it is over.

    The cursor holds the last checkpoint told of, and the hours that are not over yet.
    """

    @dg.sensor(
        name="new_checkpoints",
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Turns checkpoints that streams took outside Dagster into asset events.",
    )
    def new_checkpoints(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource, spark: SparkResource
    ) -> dg.SensorResult | dg.SkipReason:
        cursor: dict[str, dict[str, Any]] = json.loads(context.cursor or "{}")
        seen, to_come = cursor.get("seen", {}), cursor.get("hours", {})
        events: list[dg.AssetMaterialization] = []
        hours: list[dg.AddDynamicPartitionsRequest] = []
        settings = warehouse.settings(spark)
        try:
            with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
                there = {record.name for record in place.catalog.streams()}
                for name in sorted(there & streams.keys()):
                    records = place.catalog.checkpoints_after(name, seen.get(name, 0), AT_ONCE)
                    if records:
                        events += _events(place, name, records)
                        seen[name] = records[-1].id
                    partitions = partitions_of(streams[name])
                    if isinstance(partitions, dg.DynamicPartitionsDefinition):
                        known = {*to_come.pop(name, ()), *hours_of(record.committed_at for record in records)}
                        over = hours_over(known, place.catalog.now())
                        if over:
                            hours.append(partitions.build_add_request(over))
                        if left := sorted(known.difference(over)):
                            to_come[name] = left
        except SiltstoneError as error:
            return dg.SkipReason(str(error))
        cursor = {"seen": seen, "hours": to_come}
        return dg.SensorResult(asset_events=events, dynamic_partitions_requests=hours, cursor=json.dumps(cursor))

    return new_checkpoints


def _events(
    place: OpenWarehouse, stream: str, records: Sequence[CheckpointRecord]
) -> Iterator[dg.AssetMaterialization]:
    """The events of some checkpoints, but for those that runs of Dagster's told of themselves."""
    by_dagster = {run.epoch for run in place.catalog.runs(stream) if run_by_dagster(run.who)}
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
                **(checkpoints_metadata(place, stream) if record.id == place.catalog.last_id(stream) else {}),
            },
            tags={"dagster/data_version": record.digest},
        )
