"""Materializations: chains consolidated into new bases, while the stream may run."""

import dagster as dg

from siltstone.dagster import materialization_asset
from siltstone.stream import Stream


def materialization_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """The newest bases of the stream's chains; a schedule makes them where a chain has grown long enough."""
    return [materialization_asset(stream)]
