"""This project's own deployment: what Dagster loads."""
