"""Combine assets, checks and resources with schedules and sensors."""
