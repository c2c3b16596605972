"""What follows a failed run: the recovery of its stream, a few times, each later than the one before; then a sweep.

Who writes now is looked up in the catalog: a run that was started elsewhere after the failed one, and goes on or is
done, needs no recovery. No recovery from here accepts a loss (`change.rollback_rules`): that is for people.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import dagster as dg

from siltstone.catalog.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import BY_DAGSTER
from siltstone.dagster.jobs import OPERATION_TAG, RECOVER, RUN, STREAM_TAG, SWEEP, job_tags
from siltstone.dagster.names import CHECKPOINTS, OF_OPERATORS, asset_of, dagster_name
from siltstone.dagster.schedules import unfinished
from siltstone.errors import SiltstoneError
from siltstone.settings import RecoveryOptions, Settings
from siltstone.stream import Stream

LOOK_BACK_S = 86_400.0
NEWEST = 500
"""how many runs one look takes in"""
MENDS_TAG = "siltstone/recovers"
ATTEMPT_TAG = "siltstone/attempt"
FOLLOWS_TAG = "siltstone/follows"
"""of a sweep: the recovery that it follows. No recovery follows it, else the two could go on for ever"""
NOT_MENDED = {2, 4}
"""exit codes of errors that a recovery does not mend: bad input, and being fenced by a newer run"""


def recovery_sensor(stream: Stream, settings: Settings) -> dg.SensorDefinition:
    """Starts the recovery of a stream when a run of any of its jobs or assets has failed, unless it could not help."""
    options = settings.recovery

    @dg.sensor(
        name=dagster_name(stream.name, "recover_failed"),
        job_name=dagster_name(stream.name, RECOVER),
        minimum_interval_seconds=settings.ui.sensors_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Recovers `{stream.name}` after a failed run: at most {options.attempts} attempts, each later "
        "than the one before, and none after bad input.",
    )
    def recover_failed(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        request = due_recovery(context.instance, stream, options, time.time(), partial(newest_run, settings))
        return request or dg.SkipReason("no failed run needs a recovery now")

    return recover_failed


def newest_run(settings: Settings, stream: str) -> RunRecord | None:
    """Who wrote to a stream last, by the catalog; None where that cannot be told."""
    try:
        with OpenWarehouse.existing(settings.warehouse, settings.catalog) as warehouse:
            return next(reversed(warehouse.catalog.runs.list(stream)), None)
    except SiltstoneError:  # the recovery says what is wrong
        return None


def due_recovery(
    instance: dg.DagsterInstance,
    stream: Stream,
    options: RecoveryOptions,
    now: float,
    writer: Callable[[str], RunRecord | None],
) -> dg.RunRequest | None:
    """The recovery that is due for the newest failure of the stream's runs; None if none is.

    Args:
        now: in seconds since 1970.
        writer: who wrote to a stream last, as `newest_run`.
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
    """`runs` are those of the stream, newest first."""
    others = [r for r in runs if _operation_of(r.dagster_run) != RECOVER and FOLLOWS_TAG not in r.dagster_run.tags]
    failed = next((r for r in others if _has_failed(r)), None)
    if failed is None:
        return None
    id, operation = failed.dagster_run.run_id, _operation_of(failed.dagster_run)
    later = others[: others.index(failed)]
    if any(r.dagster_run.is_success and _operation_of(r.dagster_run) == operation for r in later):
        return None  # somebody has done it again already
    attempts = [r for r in runs if r.dagster_run.tags.get(MENDS_TAG) == id]
    if len(attempts) >= options.attempts or not all(_has_failed(r) for r in attempts):
        return None
    if not all(_mendable(instance, r.dagster_run.run_id) for r in (failed, *attempts)):
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
        tags={**job_tags(stream, RECOVER), MENDS_TAG: id, ATTEMPT_TAG: str(len(attempts) + 1)},
    )


def _runs_elsewhere(
    instance: dg.DagsterInstance, newest: RunRecord | None, failed: dg.RunRecord, operation: str | None
) -> bool:
    """Whether others started the stream's newest run after the failed one, and it goes on, or has done the same."""
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
    """Our jobs say it in a tag; a run of some assets, as the page starts it, has only their names."""
    keys = sorted(run.asset_selection or ())
    return run.tags.get(STREAM_TAG) or (keys[0].path[0] if keys else None)


def _operation_of(run: dg.DagsterRun) -> str | None:
    runs_stream = {CHECKPOINTS, *OF_OPERATORS}
    selected = {asset_of(key)[1] for key in run.asset_selection or ()}
    return run.tags.get(OPERATION_TAG) or (RUN if selected & runs_stream else ",".join(sorted(selected)))


def _mendable(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether what a run failed with is worth a recovery; a process that died says nothing, and is."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        said = entry.dagster_event.step_failure_data.user_failure_data if entry.dagster_event else None
        code = (said.metadata or {}).get("exit_code") if said else None
        if code is not None and code.value in NOT_MENDED:
            return False
    return True


def sweep_sensor(
    stream: Stream, recovery: dg.JobDefinition, sweep: dg.JobDefinition, settings: Settings
) -> dg.SensorDefinition:
    """Sweeps a stream's orphans after a recovery."""

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
        if going := unfinished(context.instance, stream, SWEEP):
            return dg.SkipReason(f"sweep {going} is not done yet")
        return dg.RunRequest(
            run_key=run.run_id,
            job_name=dagster_name(stream.name, SWEEP),
            tags={**job_tags(stream, SWEEP), FOLLOWS_TAG: run.run_id},
        )

    return sweep_recovered
