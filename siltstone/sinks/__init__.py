"""Sinks, which get the output of completed checkpoints."""
