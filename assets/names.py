"""How a stream's assets are called and grouped."""

import dagster as dg

CHECKPOINTS = "checkpoints"
RESTORED_STATE = "restored_state"


def asset_key(stream: str, asset: str) -> dg.AssetKey:
    """`<stream>/<asset>`."""
    return dg.AssetKey([stream, asset])


def dagster_name(stream: str) -> str:
    """A stream's name where Dagster allows no dash: for groups, and within the names of its steps."""
    return stream.replace("-", "_")
