"""Make each property of `checks.suites` a Dagster check of the asset it is about."""

import dagster as dg

from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import NOT_STALLED, RESTORE_EQUALS_SNAPSHOT, SUITES, Suite
from siltstone.dagster.checks.validation import Outcome, check
from siltstone.dagster.failures import report_errors
from siltstone.dagster.metadata import Metadata, table
from siltstone.dagster.names import CHECKPOINTS, FULL_SNAPSHOT, MATERIALIZATION, asset_key, dagster_name, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.stream import Stream

ABOUT = {RESTORE_EQUALS_SNAPSHOT.name: FULL_SNAPSHOT, NOT_STALLED.name: MATERIALIZATION}
"""name of a suite -> the asset that it checks; all others check the checkpoints"""


def stream_checks(stream: Stream) -> list[dg.AssetChecksDefinition]:
    """Make all checks of one stream."""
    return [asset_check(stream, suite) for suite in SUITES]


def asset_check(stream: Stream, suite: Suite) -> dg.AssetChecksDefinition:
    """Make the check of one property. If a blocking check fails, the run makes no downstream asset."""

    @dg.asset_check(
        asset=asset_key(stream.name, ABOUT.get(suite.name, CHECKPOINTS)),
        name=suite.name,
        blocking=suite.blocking,
        description=suite.description,
        op_tags=run_tags(stream.name, "check"),
        pool=dagster_name(stream.name, "check"),
    )
    def run_check(siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource) -> dg.AssetCheckResult:
        with report_errors():
            return _result(check(Subject(siltstone_warehouse.settings(siltstone_spark), stream), suite))

    return run_check


def _result(outcome: Outcome) -> dg.AssetCheckResult:
    metadata: Metadata = {"facts": outcome.facts, "failing": outcome.failing}
    if outcome.rows:
        names = outcome.rows[0].keys()
        rows = [{name: None if row[name] is None else str(row[name]) for name in names} for row in outcome.rows]
        metadata["rows"] = table(dict.fromkeys(names, "string"), rows)
    return dg.AssetCheckResult(
        passed=outcome.holds,
        severity=dg.AssetCheckSeverity.ERROR if outcome.suite.blocking else dg.AssetCheckSeverity.WARN,
        description=outcome.summary,
        metadata=metadata,
    )
