"""Puts assets, checks and resources together, with schedules and sensors."""
