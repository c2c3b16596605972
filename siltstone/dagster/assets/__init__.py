"""The assets of a stream in Dagster: one factory per kind of asset, called once per stream."""
