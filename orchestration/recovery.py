"""What follows a failed run: the recovery of its stream, a few times, each later than the one before; then a sweep."""

import time
from collections.abc import Iterator, Mapping

import dagster as dg

from assets.names import dagster_name
from orchestration.operations import OPERATION_TAG, RECOVER, RUN, STREAM_TAG, SWEEP, job_tags
from orchestration.schedules import unfinished
from siltstone.stream import Stream

ATTEMPTS = 3
DELAY_S = 10.0
"""before the first attempt; each further one waits three times as long"""
EVERY_S = 10
LOOK_BACK_S = 86_400.0
MENDS_TAG = "siltstone/recovers"
ATTEMPT_TAG = "siltstone/attempt"
NOT_MENDED = {2, 4}
"""exit codes of errors that a recovery does not mend: bad input, and being fenced by a newer run"""


def recovery_sensor(streams: Mapping[str, Stream], recoveries: list[dg.JobDefinition]) -> dg.SensorDefinition:
    """Starts the recovery of a stream when a run of any of its jobs has failed, unless that could not help."""

    @dg.sensor(
        name="recover_failed",
        jobs=recoveries,
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Recovers a stream after a failed run: at most {ATTEMPTS} attempts, each later than the one "
        "before, and none after bad input.",
    )
    def recover_failed(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        requested = False
        for stream in streams.values():
            request = _next_attempt(context.instance, stream, time.time())
            if request is not None:
                requested = True
                yield request
        if not requested:
            yield dg.SkipReason("no failed run needs a recovery now")

    return recover_failed


def _next_attempt(instance: dg.DagsterInstance, stream: Stream, now: float) -> dg.RunRequest | None:
    """The recovery that is due for a stream's newest failure, if any."""
    records = instance.get_run_records(dg.RunsFilter(tags={STREAM_TAG: stream.name}), limit=100)
    runs = [r for r in records if r.update_timestamp.timestamp() > now - LOOK_BACK_S]
    others = [r for r in runs if r.dagster_run.tags.get(OPERATION_TAG) != RECOVER]
    failed = next((r for r in others if r.dagster_run.status is dg.DagsterRunStatus.FAILURE), None)
    if failed is None or not _mendable(instance, failed.dagster_run.run_id):
        return None
    id, operation = failed.dagster_run.run_id, failed.dagster_run.tags.get(OPERATION_TAG)
    later = others[: others.index(failed)]
    if any(r.dagster_run.is_success and r.dagster_run.tags.get(OPERATION_TAG) == operation for r in later):
        return None  # somebody has done it again already
    attempts = [r for r in runs if r.dagster_run.tags.get(MENDS_TAG) == id]
    if len(attempts) >= ATTEMPTS or any(r.dagster_run.status is not dg.DagsterRunStatus.FAILURE for r in attempts):
        return None
    ended = max(r.end_time or now for r in (failed, *attempts))
    if now < ended + DELAY_S * 3 ** len(attempts):
        return None
    config = {} if operation == RUN else {"if_damaged": True}
    return dg.RunRequest(
        run_key=f"{id}:{len(attempts)}",
        job_name=dagster_name(stream.name, RECOVER),
        run_config={"ops": {dagster_name(stream.name, RECOVER, "op"): {"config": config}}},
        tags={**job_tags(stream, RECOVER), MENDS_TAG: id, ATTEMPT_TAG: str(len(attempts) + 1)},
    )


def _mendable(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether what a run failed with is worth a recovery; a process that died says nothing, and is."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        said = entry.dagster_event.step_failure_data.user_failure_data if entry.dagster_event else None
        code = (said.metadata or {}).get("exit_code") if said else None
        if code is not None and code.value in NOT_MENDED:
            return False
    return True


def sweep_sensor(
    streams: Mapping[str, Stream], recoveries: list[dg.JobDefinition], sweeps: list[dg.JobDefinition]
) -> dg.SensorDefinition:
    """Sweeps a stream's orphans after a recovery that a failed run had started."""

    @dg.run_status_sensor(
        name="sweep_recovered",
        run_status=dg.DagsterRunStatus.SUCCESS,
        monitored_jobs=recoveries,
        request_jobs=sweeps,
        minimum_interval_seconds=EVERY_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sweeps a stream after it was recovered.",
    )
    def sweep_recovered(context: dg.RunStatusSensorContext) -> dg.RunRequest | dg.SkipReason:
        run = context.dagster_run
        stream = streams.get(run.tags.get(STREAM_TAG, ""))
        if stream is None:
            return dg.SkipReason("not a stream of this code location")
        if going := unfinished(context.instance, stream, SWEEP):
            return dg.SkipReason(f"sweep {going} is not done yet")
        return dg.RunRequest(
            run_key=run.run_id, job_name=dagster_name(stream.name, SWEEP), tags=job_tags(stream, SWEEP)
        )

    return sweep_recovered
