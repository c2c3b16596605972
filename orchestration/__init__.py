"""Puts assets, checks and resources together for Dagster."""
