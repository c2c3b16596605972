"""Restored state: the state as of each day or hour, one partition each, restored from bases and deltas."""

import dagster as dg

from siltstone.dagster import restore_condition, restored_state_asset
from siltstone.stream import Stream


def restored_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """Make the asset. With Automation on, each partition is restored once its checkpoints passed all checks."""
    return [restored_state_asset(stream, restore_condition(stream))]
