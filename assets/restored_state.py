"""Restored state: the state as it was, one partition for each day or hour, rebuilt from bases and deltas."""

import dagster as dg

from siltstone.dagster import restore_condition, restored_state_asset
from siltstone.stream import Stream


def restored_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """The partitions; with Automation turned on in the page, each is made once its checkpoints passed all checks."""
    return [restored_state_asset(stream, restore_condition(stream))]
