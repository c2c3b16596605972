"""What happens without anybody's asking: schedules, and sensors that look at the catalog and at failed runs."""

import dagster as dg

from siltstone.dagster import stream_schedules, stream_sensors
from siltstone.settings import Settings
from siltstone.stream import Stream


def schedules_of(stream: Stream, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Materialization, truncation, proofs, reference copies and sweeps, at the times of `[schedules.STREAM]`."""
    return stream_schedules(stream, settings)


def sensors_of(stream: Stream, jobs: list[dg.JobDefinition], settings: Settings) -> list[dg.SensorDefinition]:
    """New checkpoints become events; failed runs are recovered and swept behind; people are alerted."""
    return stream_sensors(stream, jobs, settings)
