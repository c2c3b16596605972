"""What must hold of a stream's assets, as Dagster asset checks: a factory a check, called once a stream."""
