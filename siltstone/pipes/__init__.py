"""Tell Dagster what operations on a stream have made, from a process with or without Dagster.

parts       the assets of a stream, by name
metadata    describe checkpoints, what operators wrote, and sinks, as plain values
outcomes    what the result of an operation says about the stream's assets
session     report outcomes to the Dagster that launched this process by Pipes

A step inside Dagster (`siltstone.dagster`) yields the same outcomes that a process elsewhere reports by Dagster Pipes.
"""
