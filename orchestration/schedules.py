"""When each operation is done to each stream, unless siltstone.toml says otherwise. Turn them on in the page.

[schedules.flights]
sweep = "0 5 * * *"     # cron, UTC
verify_deep = "off"     # no schedule at all
"""

import dagster as dg

from assets.names import asset_key, dagster_name
from orchestration.operations import MATERIALIZE, SWEEP, TRUNCATE, VERIFY, VERIFY_DEEP, job_tags
from siltstone.settings import Settings
from siltstone.stream import Stream

OFF = "off"
DEFAULTS = {
    MATERIALIZE: "*/10 * * * *",
    TRUNCATE: "5 * * * *",
    VERIFY: "20 * * * *",
    VERIFY_DEEP: "30 3 * * *",
    SWEEP: "45 4 * * *",
}
"""operation -> cron, UTC: chains every ten minutes, where they are due; proofs hourly; row by row and orphans daily"""


def stream_schedules(stream: Stream, settings: Settings) -> list[dg.ScheduleDefinition]:
    """The schedules of one stream."""
    crons = DEFAULTS | settings.schedules.get(stream.name, {})
    return [_schedule(stream, operation, cron) for operation, cron in crons.items() if cron != OFF]


def _schedule(stream: Stream, operation: str, cron: str) -> dg.ScheduleDefinition:
    job = dagster_name(stream.name, operation)

    @dg.schedule(
        name=dagster_name(stream.name, operation, "schedule"),
        job_name=job,
        cron_schedule=cron,
        execution_timezone="UTC",
        description=f"{operation} of `{stream.name}`; a tick is skipped while the run of an earlier one goes on",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        if before := unfinished(context.instance, stream, operation):
            return dg.SkipReason(f"run {before} is not done yet")
        return dg.RunRequest(run_config=_config(stream, operation), tags=job_tags(stream, operation))

    return schedule


def unfinished(instance: dg.DagsterInstance, stream: Stream, operation: str) -> str | None:
    """The id of a run of an operation on a stream that waits or is at work, if there is one."""
    going = [
        dg.DagsterRunStatus.NOT_STARTED,
        dg.DagsterRunStatus.QUEUED,
        dg.DagsterRunStatus.STARTING,
        dg.DagsterRunStatus.STARTED,
        dg.DagsterRunStatus.CANCELING,
    ]
    found = instance.get_runs(dg.RunsFilter(tags=job_tags(stream, operation), statuses=going), limit=1)
    return found[0].run_id if found else None


def _config(stream: Stream, operation: str) -> dict:
    """Only chains that have grown long enough are worth the work."""
    if operation != MATERIALIZE:
        return {}
    return {"ops": {asset_key(stream.name, "materialization").to_python_identifier(): {"config": {"due": True}}}}
