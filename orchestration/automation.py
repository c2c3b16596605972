"""Schedules, and sensors that watch the catalog and failed runs."""

import dagster as dg

from siltstone.dagster import stream_schedules, stream_sensors
from siltstone.settings import Settings
from siltstone.stream import Stream


def schedules_of(stream: Stream, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Make the schedules of materialization, truncation, proofs, reference copies and sweeps (`[schedules.STREAM]`).

    Those that have not been changed for this stream are the same for all streams.
    """
    return stream_schedules(stream, settings)


def sensors_of() -> list[dg.SensorDefinition]:
    """Make the sensors that recover and sweep after failed runs, report new checkpoints, and send alerts."""
    return stream_sensors()
