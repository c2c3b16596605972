"""The check `digest`: every retained checkpoint restores to exactly the state the stream had."""

from typing import TYPE_CHECKING

import dagster as dg

from assets.failures import told_clearly
from assets.metadata import table
from assets.names import CHECKPOINTS, asset_key
from jobs.verify_checkpoints import verify_checkpoints
from resources import SparkResource, WarehouseResource
from siltstone.stream import Stream

if TYPE_CHECKING:
    from siltstone.spark.operations import VerifyResult

FAILURES = {"checkpoint": "int", "object": "string", "reason": "string"}


def digest_check(stream: Stream) -> dg.AssetChecksDefinition:
    """Proves all retained checkpoints of one stream; it blocks, so that no damaged state is restored and used."""

    @dg.asset_check(
        asset=asset_key(stream.name, CHECKPOINTS),
        name="digest",
        blocking=True,
        description=(
            "Rebuilds every retained checkpoint from its base and deltas and compares each digest with the one kept "
            "while the stream ran. Each stored object is read once, and its checksum compared."
        ),
    )
    def digest(warehouse: WarehouseResource, spark: SparkResource) -> dg.AssetCheckResult:
        with told_clearly():
            return _result(verify_checkpoints(warehouse.settings(spark), stream.name))

    return digest


def _result(found: "VerifyResult") -> dg.AssetCheckResult:
    """Failed checkpoints with the object and the reason, the first of them in the summary."""
    proven, failed = len(found.proven), found.failed
    summary = f"{proven} of {proven + len(failed)} checkpoints proven"
    if failed:
        summary += f"; checkpoint {failed[0].checkpoint}: {failed[0].reason}"
    rows = [{"checkpoint": f.checkpoint, "object": f.object, "reason": f.reason} for f in failed]
    return dg.AssetCheckResult(
        passed=not failed,
        description=summary,
        metadata={
            "proven": proven,
            "failed": len(failed),
            "seconds": found.seconds,
            **({"failures": table(FAILURES, rows)} if failed else {}),
        },
    )
