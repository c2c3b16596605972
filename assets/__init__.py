"""The Dagster assets of each stream, one file per kind."""
