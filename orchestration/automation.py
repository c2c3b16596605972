"""Schedules, and sensors that watch the catalog and failed runs."""

import dagster as dg

from siltstone.dagster import stream_schedules, stream_sensors
from siltstone.settings import Settings
from siltstone.stream import Stream


def schedules_of(stream: Stream, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Make the schedules of materialization, truncation, proofs, reference copies and sweeps (`[schedules.STREAM]`)."""
    return stream_schedules(stream, settings)


def sensors_of(stream: Stream, jobs: list[dg.JobDefinition], settings: Settings) -> list[dg.SensorDefinition]:
    """Make the sensors that report new checkpoints, recover and sweep after failed runs, and send alerts."""
    return stream_sensors(stream, jobs, settings)
