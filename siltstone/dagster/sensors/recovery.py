"""Recover streams after failed runs, in a few attempts with growing delays, and sweep them after a recovery.

One look at an instance takes the runs that failed since the last one, of all jobs, and keeps the newest failure of each
stream until it is dealt with. If Dagster retries a run itself (`run_retries`), the retry's own failure counts. If the
catalog has a later run that is in progress or done, no recovery is needed. A recovery from here never accepts a loss
(`change.rollback_rules`); a person decides that.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Literal

import dagster as dg

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.jobs import BUSY, RECOVER, SWEEP, operation_jobs
from siltstone.dagster.names import Keys, dagster_name, location_name, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.runs import RUN, StreamRuns, op_config
from siltstone.errors import SiltstoneError
from siltstone.pipes.parts import BY_DAGSTER
from siltstone.settings import RecoveryOptions, Settings, load_settings

LOOK_BACK_S = 86_400.0
"""how old a failure may be that a look finds"""
OVERLAP_S = 60.0
"""how far a look goes back behind the last one, for runs whose end was written late"""
RECOVERS_TAG = "siltstone/recovers"
ATTEMPT_TAG = "siltstone/attempt"
FOLLOWS_TAG = "siltstone/follows"
"""tag of a sweep with the recovery that it follows. A failed sweep is not recovered, or the two could repeat forever"""
NOT_RECOVERABLE = {2, 4}
"""exit codes of errors that a recovery does not solve: bad input, and being fenced by a newer run"""
RETRIES_TAG, WILL_RETRY_TAG = "dagster/max_retries", "dagster/will_retry"
"""Dagster's: how often it may retry a run itself, and whether it is going to"""
FAILURE, SUCCESS = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
Writer = Callable[[str], RunRecord | None]


@dataclass
class Looked:
    """What the last look leaves to the next.

    Attributes:
        at: when it was, in seconds since 1970; 0 if there was none.
        open: stream -> the ids of its failed runs that are not dealt with.
        streams: those that the code location had.
    """

    at: float = 0.0
    open: dict[str, list[str]] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, cursor: str | None) -> "Looked":
        """Read a cursor; one that another version has left counts as none."""
        try:
            return cls(**json.loads(cursor or "{}"))
        except (TypeError, ValueError):
            return cls()


@cache
def recovery_sensor() -> dg.SensorDefinition:
    """Make the sensor that starts a recovery when a run of a stream's jobs or assets has failed, if it may help."""

    @dg.sensor(
        name=location_name("recover_failed"),
        job_name=location_name(RECOVER),
        minimum_interval_seconds=load_settings().ui.sensors_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Recovers a stream after a failed run, in a few attempts with growing delays; not after bad input.",
    )
    def recover_failed(
        context: dg.SensorEvaluationContext, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> dg.SensorResult:
        settings = siltstone_warehouse.settings(siltstone_spark)
        looked, writer = Looked.of(context.cursor), partial(newest_run, settings)
        look = Look(StreamRuns.of(context), settings.recovery, time.time(), writer)
        requests = look.request(looked)
        return dg.SensorResult(run_requests=requests, cursor=json.dumps(asdict(looked)))

    return recover_failed


@cache
def sweep_sensor() -> dg.SensorDefinition:
    """Make the sensor that sweeps a stream after a recovery."""
    jobs = {job.name: job for job in operation_jobs()}

    @dg.run_status_sensor(
        name=location_name("sweep_recovered"),
        run_status=SUCCESS,
        monitored_jobs=[jobs[location_name(RECOVER)]],
        request_job=jobs[location_name(SWEEP)],
        minimum_interval_seconds=load_settings().ui.sensors_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sweeps a stream after it was recovered.",
    )
    def sweep_recovered(context: dg.RunStatusSensorContext) -> dg.RunRequest | dg.SkipReason:
        run, origin = context.dagster_run, context.dagster_run.remote_job_origin
        runs = StreamRuns(context.instance, Keys(), origin.location_name if origin else None)
        streams = runs.streams_of(run)
        if not streams:
            return dg.SkipReason(f"run {run.run_id} names no stream")
        (stream,) = streams
        if active := runs.find_unfinished(SWEEP).get(stream):
            return dg.SkipReason(f"sweep {active} is not done yet")
        return _request(SWEEP, stream, run.run_id, {FOLLOWS_TAG: run.run_id})

    return sweep_recovered


def newest_run(settings: Settings, stream: str) -> RunRecord | None:
    """Read a stream's newest run from the catalog; None if that fails."""
    try:
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
            return warehouse.catalog.runs.get_newest(stream)
    except SiltstoneError:  # the recovery reports the error
        return None


@dataclass(frozen=True)
class Look:
    """One look at the runs of an instance.

    Attributes:
        runs: those of the instance, seen from this code location.
        now: seconds since 1970.
        writer: returns a stream's newest run in the catalog (`newest_run`).
    """

    runs: StreamRuns
    options: RecoveryOptions
    now: float
    writer: Writer

    def request(self, looked: Looked) -> list[dg.RunRequest]:
        """Request the recoveries that are due, and note what the next look needs."""
        # One whose stream was not here, such as one whose module did not load, was not looked at.
        is_new = not self.runs.streams <= set(looked.streams)
        oldest = self.now - LOOK_BACK_S
        since = oldest if is_new else max(oldest, looked.at - OVERLAP_S)
        failures = self._failures(looked, datetime.fromtimestamp(since, UTC))
        looked.at, looked.open, looked.streams = self.now, {}, sorted(self.runs.streams)
        requests: list[dg.RunRequest] = []
        for name, records in failures.items():
            decisions = {record.dagster_run.run_id: self._decide(name, record) for record in records}
            if left := [id for id, decision in decisions.items() if decision]:
                looked.open[name] = left
            # Of several, the newest that is not dealt with.
            newest = next((decision for decision in decisions.values() if decision), None)
            requests += [newest] if isinstance(newest, dg.RunRequest) else []
        return requests

    def _failures(self, looked: Looked, since: datetime) -> Mapping[str, list[dg.RunRecord]]:
        """Map each stream to its failed runs that are open or ended since then, the one that began last first."""
        known = [id for name, ids in looked.open.items() if name in self.runs.streams for id in ids]
        records = list(self.runs.list(FAILURE, run_ids=known)) if known else []
        records += self.runs.list(FAILURE, updated_after=since)
        found: dict[str, dict[str, dg.RunRecord]] = {}
        for record in sorted(records, key=lambda record: -record.storage_id):
            run = record.dagster_run
            if self.runs.operation_of(run) != RECOVER and FOLLOWS_TAG not in run.tags:
                for name in self._failed_streams(run) & self.runs.streams:
                    found.setdefault(name, {})[run.run_id] = record
        return {name: list(of_stream.values()) for name, of_stream in found.items()}

    def _failed_streams(self, run: dg.DagsterRun) -> set[str]:
        """Return the streams of a failed run; if they are several, those whose steps failed, where it got so far."""
        streams = self.runs.streams_of(run)
        if len(streams) < 2:
            return streams
        steps = {event.step_key or "" for event in self._step_failures(run.run_id)}
        failed = {name for name in streams if any(step.startswith(dagster_name(name, "")) for step in steps)}
        return failed or streams

    def _step_failures(self, run_id: str) -> Iterable[dg.DagsterEvent]:
        logged = self.runs.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        return [entry.dagster_event for entry in logged if entry.dagster_event]

    def _decide(self, stream: str, failed: dg.RunRecord) -> dg.RunRequest | Literal["wait"] | None:
        """Request the next attempt to recover after a failure, or wait, or return None if the failure is dealt with."""
        run, operation = failed.dagster_run, self.runs.operation_of(failed.dagster_run)
        all_attempts = self.runs.instance.get_run_records(dg.RunsFilter(tags={RECOVERS_TAG: run.run_id}))
        attempts = [record for record in all_attempts if stream in self.runs.streams_of(record.dagster_run)]
        ended = max(r.end_time or r.update_timestamp.timestamp() for r in (failed, *attempts))
        if run.status is not FAILURE or self.now > ended + LOOK_BACK_S:
            return None
        if any(not record.dagster_run.is_finished for record in attempts):
            return "wait"
        tried = [record for record in attempts if not self._was_refused(record)]
        if len(tried) >= self.options.attempts or not all(_has_failed(record) for record in tried):
            return None
        if not all(self._is_recoverable(record.dagster_run.run_id) for record in (failed, *tried)):
            return None
        if self.now < ended + self.options.delay_s * 3 ** len(tried) or run.tags.get(WILL_RETRY_TAG) == "true":
            return "wait"
        if any(stream in self.runs.find_unfinished(operation) for operation in (RUN, RECOVER)):
            return "wait"
        if self._has_succeeded_since(stream, failed, operation) or self._runs_elsewhere(stream, failed, operation):
            return None
        if self._was_recovered_since(stream, failed):
            return None
        tags = {RECOVERS_TAG: run.run_id, ATTEMPT_TAG: str(len(tried) + 1)}
        return _request(RECOVER, stream, f"{run.run_id}:{stream}:{len(attempts)}", tags)

    def _has_succeeded_since(self, stream: str, failed: dg.RunRecord, operation: str | None) -> bool:
        """Whether the same operation on the stream succeeded in a later run."""
        later = self.runs.list(SUCCESS, created_after=failed.create_timestamp)
        runs = (record.dagster_run for record in later)
        return any(stream in self.runs.streams_of(run) and self.runs.operation_of(run) == operation for run in runs)

    def _was_recovered_since(self, stream: str, failed: dg.RunRecord) -> bool:
        """Whether a recovery for another failure, or by hand, came after this one."""
        ended = datetime.fromtimestamp(failed.end_time or failed.update_timestamp.timestamp(), UTC)
        later = self.runs.list(FAILURE, SUCCESS, tags=run_tags(stream, RECOVER), created_after=ended)
        others = (r for r in later if r.dagster_run.tags.get(RECOVERS_TAG) != failed.dagster_run.run_id)
        return any(self.runs.is_here(r.dagster_run) and not self._was_refused(r) for r in others)

    def _is_recoverable(self, run_id: str) -> bool:
        """Whether a recovery may solve a run's failure, by its exit code; True if its process died without one."""
        return not any(_fact(event, "exit_code") in NOT_RECOVERABLE for event in self._step_failures(run_id))

    def _was_refused(self, attempt: dg.RunRecord) -> bool:
        """Whether an attempt did nothing because a run of the stream was at work."""
        return any(_fact(event, "error") == BUSY for event in self._step_failures(attempt.dagster_run.run_id))

    def _runs_elsewhere(self, stream: str, failed: dg.RunRecord, operation: str | None) -> bool:
        """Whether the stream's newest run began after the failed one, and is in progress or has succeeded."""
        newest = self.writer(stream)
        began = failed.start_time or failed.create_timestamp.timestamp()
        if newest is None or newest.started_at.timestamp() < began:
            return False
        if newest.ended_at is not None and not (newest.outcome == "done" and operation == RUN):
            return False
        by_dagster = newest.who.startswith(BY_DAGSTER)
        ours = self.runs.instance.get_run_by_id(newest.who.removeprefix(BY_DAGSTER)) if by_dagster else None
        return ours is None or not ours.is_failure_or_canceled


def _request(operation: str, stream: str, key: str, tags: dict[str, str]) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=key,
        job_name=location_name(operation),
        run_config=op_config(operation, stream),
        tags={**run_tags(stream, operation), **tags, RETRIES_TAG: "0"},
    )


def _has_failed(record: dg.RunRecord) -> bool:
    return record.dagster_run.status is FAILURE


def _fact(event: dg.DagsterEvent, name: str) -> Any:
    """Return what `failures.report_errors` said with the failure of a step."""
    failure = event.step_failure_data.user_failure_data
    value = (failure.metadata or {}).get(name) if failure else None
    return None if value is None else value.value
