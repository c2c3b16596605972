"""Materializations: chains consolidated into new bases. The stream may run meanwhile."""

import dagster as dg

from siltstone.dagster import materialization_asset
from siltstone.stream import Stream


def materialization_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """Make the asset of the stream's newest bases; a schedule materializes it when a chain has grown long enough."""
    return [materialization_asset(stream)]
