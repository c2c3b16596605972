"""Recover streams after failed runs, in a few attempts with growing delays, and sweep them after a recovery.

One look at an instance takes the runs that failed since the last one, of all jobs, and keeps the newest failure of each
stream until it is dealt with. If Dagster retries a run itself (`run_retries`), the retry's own failure counts. If the
catalog has a later run that is in progress or done, no recovery is needed. A recovery from here never accepts a loss
(`change.rollback_rules`); a person decides that.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Literal

import dagster as dg

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import BY_DAGSTER
from siltstone.dagster.jobs import RECOVER, SWEEP, operation_jobs
from siltstone.dagster.names import OPERATION_TAG, location_name, run_tags
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.runs import RUN, find_unfinished, list_runs, operation_of, stream_of, streams_of
from siltstone.errors import SiltstoneError
from siltstone.settings import RecoveryOptions, Settings

LOOK_BACK_S = 86_400.0
"""how old a failure may be that the first look finds"""
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
        at: when it was, in seconds since 1970.
        open: stream -> the id of its failed run that is not dealt with.
    """

    at: float
    open: dict[str, str] = field(default_factory=dict)


@cache
def recovery_sensor(every_s: int) -> dg.SensorDefinition:
    """Make the sensor that starts a recovery when a run of a stream's jobs or assets has failed, if it may help, and a
    sweep when one has succeeded."""
    jobs = {job.name: job for job in operation_jobs()}

    @dg.sensor(
        name=location_name("recover_failed"),
        jobs=[jobs[location_name(RECOVER)], jobs[location_name(SWEEP)]],
        minimum_interval_seconds=every_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Recovers a stream after a failed run, in a few attempts with growing delays, and sweeps it then; "
        "not after bad input.",
    )
    def recover_failed(
        context: dg.SensorEvaluationContext, siltstone_warehouse: WarehouseResource, siltstone_spark: SparkResource
    ) -> dg.SensorResult:
        now, settings = time.time(), siltstone_warehouse.settings(siltstone_spark)
        looked = Looked(**json.loads(context.cursor)) if context.cursor else Looked(now - LOOK_BACK_S)
        streams = streams_of(context.repository_def)
        location = context.code_location_origin.location_name if context.code_location_origin else None
        look = Look(context.instance, streams, settings.recovery, now, partial(newest_run, settings), location)
        requests = look.request(looked)
        return dg.SensorResult(run_requests=requests, cursor=json.dumps(asdict(looked)))

    return recover_failed


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
        streams: those of this code location.
        now: seconds since 1970.
        writer: returns a stream's newest run in the catalog (`newest_run`).
        location: the name of this code location; None for any. Others may have streams of the same names.
    """

    instance: dg.DagsterInstance
    streams: Collection[str]
    options: RecoveryOptions
    now: float
    writer: Writer
    location: str | None = None

    def request(self, looked: Looked) -> list[dg.RunRequest]:
        """Request the recoveries and sweeps that are due, and note what the next look needs."""
        since = datetime.fromtimestamp(looked.at - OVERLAP_S, UTC)
        newest = {
            **{name: self.instance.get_run_record_by_id(id) for name, id in looked.open.items()},
            **self._by_stream(list_runs(self.instance, FAILURE, updated_after=since)),
        }
        requests = self._sweeps(since)
        looked.at, looked.open = self.now, {}
        for name, failed in newest.items():
            decision = self._decide(name, failed) if failed is not None and name in self.streams else None
            if failed is not None and decision is not None:
                looked.open[name] = failed.dagster_run.run_id
                requests += [decision] if isinstance(decision, dg.RunRequest) else []
        return requests

    def _by_stream(self, records: Iterable[dg.RunRecord]) -> dict[str, dg.RunRecord]:
        """Map each stream to its newest run among these that is no recovery, nor a sweep after one."""
        found: dict[str, dg.RunRecord] = {}
        for record in records:  # newest first
            run = record.dagster_run
            name = self._stream_of_ours(run)
            if name and operation_of(run) != RECOVER and FOLLOWS_TAG not in run.tags:
                found.setdefault(name, record)
        return found

    def _stream_of_ours(self, run: dg.DagsterRun) -> str | None:
        """Return the stream of a run; None if it is not one of this code location."""
        origin = run.remote_job_origin
        if self.location and origin and origin.location_name != self.location:
            return None
        name = stream_of(run)
        return name if name in self.streams else None

    def _sweeps(self, since: datetime) -> list[dg.RunRequest]:
        """Request a sweep after each recovery that succeeded, unless one is waiting or at work."""
        recovered = [
            (name, record.dagster_run.run_id)
            for record in list_runs(self.instance, SUCCESS, tags={OPERATION_TAG: RECOVER}, updated_after=since)
            if (name := self._stream_of_ours(record.dagster_run))
        ]
        unfinished = find_unfinished(self.instance, SWEEP) if recovered else {}
        return [
            _request(SWEEP, name, f"{id}:{SWEEP}", {FOLLOWS_TAG: id})
            for name, id in recovered
            if name not in unfinished
        ]

    def _decide(self, stream: str, failed: dg.RunRecord) -> dg.RunRequest | Literal["wait"] | None:
        """Request the next attempt to recover after a failure, or wait, or return None if the failure is dealt with."""
        run, operation = failed.dagster_run, operation_of(failed.dagster_run)
        attempts = self.instance.get_run_records(dg.RunsFilter(tags={RECOVERS_TAG: run.run_id}))
        ended = max(r.end_time or r.update_timestamp.timestamp() for r in (failed, *attempts))
        if run.status is not FAILURE or self.now > ended + LOOK_BACK_S:
            return None
        if any(not record.dagster_run.is_finished for record in attempts):
            return "wait"
        if len(attempts) >= self.options.attempts or not all(_has_failed(record) for record in attempts):
            return None
        if not all(_is_recoverable(self.instance, record.dagster_run.run_id) for record in (failed, *attempts)):
            return None
        if self.now < ended + self.options.delay_s * 3 ** len(attempts) or run.tags.get(WILL_RETRY_TAG) == "true":
            return "wait"
        if stream in find_unfinished(self.instance, RUN):
            return "wait"
        if self._has_succeeded_since(stream, failed, operation) or self._runs_elsewhere(stream, failed, operation):
            return None
        tags = {RECOVERS_TAG: run.run_id, ATTEMPT_TAG: str(len(attempts) + 1)}
        return _request(RECOVER, stream, f"{run.run_id}:{len(attempts)}", tags)

    def _has_succeeded_since(self, stream: str, failed: dg.RunRecord, operation: str | None) -> bool:
        """Whether the same operation on the stream succeeded in a later run."""
        later = list_runs(self.instance, SUCCESS, created_after=failed.create_timestamp)
        runs = (record.dagster_run for record in later)
        return any(self._stream_of_ours(run) == stream and operation_of(run) == operation for run in runs)

    def _runs_elsewhere(self, stream: str, failed: dg.RunRecord, operation: str | None) -> bool:
        """Whether the stream's newest run began after the failed one, and is in progress or has succeeded."""
        newest = self.writer(stream)
        began = failed.start_time or failed.create_timestamp.timestamp()
        if newest is None or newest.started_at.timestamp() < began:
            return False
        if newest.ended_at is not None and not (newest.outcome == "done" and operation == RUN):
            return False
        by_dagster = newest.who.startswith(BY_DAGSTER)
        ours = self.instance.get_run_by_id(newest.who.removeprefix(BY_DAGSTER)) if by_dagster else None
        return ours is None or not ours.is_failure_or_canceled


def _request(operation: str, stream: str, key: str, tags: dict[str, str]) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=key,
        job_name=location_name(operation),
        run_config={"ops": {location_name(operation, "op"): {"config": {"stream": stream}}}},
        tags={**run_tags(stream, operation), **tags, RETRIES_TAG: "0"},
    )


def _has_failed(record: dg.RunRecord) -> bool:
    return record.dagster_run.status is FAILURE


def _is_recoverable(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a recovery may solve a run's failure, by its exit code; True if its process died without one."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        failure = entry.dagster_event.step_failure_data.user_failure_data if entry.dagster_event else None
        code = (failure.metadata or {}).get("exit_code") if failure else None
        if code is not None and code.value in NOT_RECOVERABLE:
            return False
    return True
