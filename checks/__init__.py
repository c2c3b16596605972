"""What must hold of each stream, as Dagster asset checks.

`python -m siltstone.dagster.checks STREAM` makes the same checks without Dagster.
"""

import dagster as dg

from siltstone.dagster import SUITES, asset_check
from siltstone.stream import Stream


def checks_of(stream: Stream) -> list[dg.AssetChecksDefinition]:
    """Every property that Siltstone can check: proofs, chains, missing objects, costs, orphans, sinks."""
    return [asset_check(stream, suite) for suite in SUITES]
