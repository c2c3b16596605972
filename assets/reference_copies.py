"""Reference copies: the live state in full, read from where the stream keeps it, to compare restores with."""

import dagster as dg

from siltstone.dagster import full_snapshot_asset
from siltstone.stream import Stream


def reference_copy_assets(stream: Stream) -> list[dg.AssetsDefinition]:
    """The full copy of the newest checkpoint; a schedule takes it each night."""
    return [full_snapshot_asset(stream)]
