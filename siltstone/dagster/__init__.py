"""Streams in Dagster: factories of assets, checks, jobs, schedules, sensors and resources (extra `dagster`)."""
