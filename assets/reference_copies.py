"""Reference copies: the live state in full, copied from the working state, to compare restores with."""

import dagster as dg

from siltstone.dagster import full_snapshot_asset
from siltstone.stream import Stream


def reference_copy_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """Make the asset of the full copy of the newest checkpoint; a schedule takes it each night."""
    return [full_snapshot_asset(stream)]
