"""Recover a stream after a failed run, in a few attempts with growing delays, then sweep it.

If the catalog has a later run that was started outside Dagster and is in progress or done, no recovery is needed.
A recovery from here never accepts a loss (`change.rollback_rules`); a person decides that.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import dagster as dg

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import BY_DAGSTER
from siltstone.dagster.jobs import OPERATION_TAG, RECOVER, RUN, STREAM_TAG, SWEEP, job_tags
from siltstone.dagster.names import CHECKPOINTS, OF_OPERATORS, asset_of, dagster_name
from siltstone.dagster.schedules import find_unfinished
from siltstone.errors import SiltstoneError
from siltstone.settings import RecoveryOptions, Settings
from siltstone.stream import Stream

LOOK_BACK_S = 86_400.0
NEWEST = 500
"""most runs that one tick reads"""
RECOVERS_TAG = "siltstone/recovers"
ATTEMPT_TAG = "siltstone/attempt"
FOLLOWS_TAG = "siltstone/follows"
"""tag of a sweep with the recovery that it follows. A failed sweep is not recovered, or the two could repeat forever"""
NOT_RECOVERABLE = {2, 4}
"""exit codes of errors that a recovery does not solve: bad input, and being fenced by a newer run"""


def recovery_sensor(stream: Stream, settings: Settings) -> dg.SensorDefinition:
    """Make the sensor that starts a recovery when a run of a stream's jobs or assets has failed, if it may help."""
    options = settings.recovery

    @dg.sensor(
        name=dagster_name(stream.name, "recover_failed"),
        job_name=dagster_name(stream.name, RECOVER),
        minimum_interval_seconds=settings.ui.sensors_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Recovers `{stream.name}` after a failed run, in at most {options.attempts} attempts with growing "
        "delays; not after bad input.",
    )
    def recover_failed(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        request = due_recovery(context.instance, stream, options, time.time(), partial(newest_run, settings))
        return request or dg.SkipReason("no failed run needs a recovery now")

    return recover_failed


def newest_run(settings: Settings, stream: str) -> RunRecord | None:
    """Read a stream's newest run from the catalog; None if that fails."""
    try:
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
            return next(reversed(warehouse.catalog.runs.list(stream)), None)
    except SiltstoneError:  # the recovery reports the error
        return None


def due_recovery(
    instance: dg.DagsterInstance,
    stream: Stream,
    options: RecoveryOptions,
    now: float,
    writer: Callable[[str], RunRecord | None],
) -> dg.RunRequest | None:
    """Request a recovery for the newest failure of the stream's runs, if one is due; else None.

    Args:
        now: seconds since 1970.
        writer: returns a stream's newest run (`newest_run`).
    """
    since = datetime.fromtimestamp(now - LOOK_BACK_S, UTC)
    newest = instance.get_run_records(dg.RunsFilter(updated_after=since), limit=NEWEST)
    runs = [record for record in newest if _stream_of(record.dagster_run) == stream.name]
    return _next_attempt(instance, stream, runs, options, now, writer)


def _next_attempt(
    instance: dg.DagsterInstance,
    stream: Stream,
    runs: Sequence[dg.RunRecord],
    options: RecoveryOptions,
    now: float,
    writer: Callable[[str], RunRecord | None],
) -> dg.RunRequest | None:
    """Request the next attempt, if one is due. `runs` are those of the stream, newest first."""
    others = [r for r in runs if _operation_of(r.dagster_run) != RECOVER and FOLLOWS_TAG not in r.dagster_run.tags]
    failed = next((r for r in others if _has_failed(r)), None)
    if failed is None:
        return None
    id, operation = failed.dagster_run.run_id, _operation_of(failed.dagster_run)
    later = others[: others.index(failed)]
    if any(r.dagster_run.is_success and _operation_of(r.dagster_run) == operation for r in later):
        return None  # the operation succeeded later
    attempts = [r for r in runs if r.dagster_run.tags.get(RECOVERS_TAG) == id]
    if len(attempts) >= options.attempts or not all(_has_failed(r) for r in attempts):
        return None
    if not all(_is_recoverable(instance, r.dagster_run.run_id) for r in (failed, *attempts)):
        return None
    ended = max(r.end_time or r.update_timestamp.timestamp() for r in (failed, *attempts))
    if now < ended + options.delay_s * 3 ** len(attempts):
        return None
    if _runs_elsewhere(instance, writer(stream.name), failed, operation):
        return None
    return dg.RunRequest(
        run_key=f"{id}:{len(attempts)}",
        job_name=dagster_name(stream.name, RECOVER),
        run_config={"ops": {dagster_name(stream.name, RECOVER, "op"): {"config": {}}}},
        tags={**job_tags(stream, RECOVER), RECOVERS_TAG: id, ATTEMPT_TAG: str(len(attempts) + 1)},
    )


def _runs_elsewhere(
    instance: dg.DagsterInstance, newest: RunRecord | None, failed: dg.RunRecord, operation: str | None
) -> bool:
    """Whether the stream's newest run began after the failed one, elsewhere, and is in progress or has succeeded."""
    began = failed.start_time or failed.create_timestamp.timestamp()
    if newest is None or newest.started_at.timestamp() < began:
        return False
    if newest.ended_at is not None and not (newest.outcome == "done" and operation == RUN):
        return False
    ours = instance.get_run_by_id(newest.who.removeprefix(BY_DAGSTER)) if newest.who.startswith(BY_DAGSTER) else None
    return ours is None or not ours.is_failure_or_canceled


def _has_failed(record: dg.RunRecord) -> bool:
    return record.dagster_run.status is dg.DagsterRunStatus.FAILURE


def _stream_of(run: dg.DagsterRun) -> str | None:
    """Return the stream of a run: by the tag of our jobs, or by the assets of a run that the page launched."""
    keys = sorted(run.asset_selection or ())
    return run.tags.get(STREAM_TAG) or (keys[0].path[0] if keys else None)


def _operation_of(run: dg.DagsterRun) -> str | None:
    runs_stream = {CHECKPOINTS, *OF_OPERATORS}
    selected = {asset_of(key)[1] for key in run.asset_selection or ()}
    return run.tags.get(OPERATION_TAG) or (RUN if selected & runs_stream else ",".join(sorted(selected)))


def _is_recoverable(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a recovery may solve a run's failure, by its exit code; True if its process died without one."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        failure = entry.dagster_event.step_failure_data.user_failure_data if entry.dagster_event else None
        code = (failure.metadata or {}).get("exit_code") if failure else None
        if code is not None and code.value in NOT_RECOVERABLE:
            return False
    return True


def sweep_sensor(
    stream: Stream, recovery: dg.JobDefinition, sweep: dg.JobDefinition, settings: Settings
) -> dg.SensorDefinition:
    """Make the sensor that sweeps a stream after a recovery."""

    @dg.run_status_sensor(
        name=dagster_name(stream.name, "sweep_recovered"),
        run_status=dg.DagsterRunStatus.SUCCESS,
        monitored_jobs=[recovery],
        request_job=sweep,
        minimum_interval_seconds=settings.ui.sensors_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Sweeps `{stream.name}` after it was recovered.",
    )
    def sweep_recovered(context: dg.RunStatusSensorContext) -> dg.RunRequest | dg.SkipReason:
        run = context.dagster_run
        if active := find_unfinished(context.instance, stream, SWEEP):
            return dg.SkipReason(f"sweep {active} is not done yet")
        return dg.RunRequest(
            run_key=run.run_id,
            job_name=dagster_name(stream.name, SWEEP),
            tags={**job_tags(stream, SWEEP), FOLLOWS_TAG: run.run_id},
        )

    return sweep_recovered
