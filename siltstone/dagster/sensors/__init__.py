"""What Dagster looks at again and again: new checkpoints, failed runs, what people should know of."""
