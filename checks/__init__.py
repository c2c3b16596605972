"""The Dagster asset checks of each stream.

`python -m siltstone.dagster.checks STREAM` runs the same checks without Dagster.
"""

import dagster as dg

from siltstone.dagster import SUITES, asset_check
from siltstone.stream import Stream


def checks_of(stream: Stream) -> list[dg.AssetChecksDefinition]:
    """Make all checks of a stream: proofs, chains, missing objects, costs, orphans, sinks."""
    return [asset_check(stream, suite) for suite in SUITES]
