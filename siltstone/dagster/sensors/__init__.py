"""The sensors of a stream: new checkpoints, failed runs, and alerts."""
