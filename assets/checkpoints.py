"""Bases and delta chains: what each operator writes, checkpoint by checkpoint, and what the stream's sinks show."""

import dagster as dg

from siltstone.dagster import events_asset, run_asset
from siltstone.stream import Stream


def checkpoint_assets(stream: Stream) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    """The events that the stream reads, and everything that one run of it lays down."""
    return [events_asset(stream), run_asset(stream)]
