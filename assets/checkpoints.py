"""Checkpoints: the bases and delta chains of each operator, and the output of the stream's sinks."""

import dagster as dg

from siltstone.dagster import events_asset, run_asset
from siltstone.stream import Stream


def checkpoint_assets(stream: Stream) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    """Make the assets of the stream's input events and of everything that a run writes."""
    return [events_asset(stream), run_asset(stream)]
