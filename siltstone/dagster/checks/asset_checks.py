"""Make each property of `checks.suites` a Dagster check of the asset it is about."""

import dagster as dg

from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import SUITES, Suite
from siltstone.dagster.checks.validation import check
from siltstone.dagster.failures import RETRIES, report_errors
from siltstone.dagster.metadata import to_dagster
from siltstone.dagster.names import NO_OPTIONS, OpOptions, asset_key
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.stream import Stream


def stream_checks(stream: Stream, op: OpOptions = NO_OPTIONS) -> list[dg.AssetChecksDefinition]:
    """Make all checks of one stream."""
    return [asset_check(stream, suite, op) for suite in SUITES]


def asset_check(stream: Stream, suite: Suite, op: OpOptions = NO_OPTIONS) -> dg.AssetChecksDefinition:
    """Make the check of one property. If a blocking check fails, the run makes no downstream asset."""

    @dg.asset_check(
        asset=asset_key(stream.name, suite.about),
        name=suite.name,
        blocking=suite.blocking,
        description=suite.description,
        op_tags=op.tags_of(stream.name, "check"),
        pool=op.pool_of(stream.name, "check"),
        retry_policy=RETRIES,
    )
    def run_check(siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource) -> dg.AssetCheckResult:
        with report_errors():
            outcome = check(Subject(siltstone_warehouse.settings(siltstone_spark), stream), suite)
        told = outcome.told(stream.name)
        return dg.AssetCheckResult(
            passed=told.passed,
            severity=dg.AssetCheckSeverity(told.severity),
            description=outcome.summary,
            metadata=to_dagster(told.metadata),
        )

    return run_check
