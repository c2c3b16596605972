"""Which recovery follows which runs, decided over an instance in memory: nothing is launched."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan.objects import StepFailureData
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.test_utils import create_run_for_test
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.failures import report_errors
from siltstone.dagster.jobs import RecoverConfig, StreamBusy
from siltstone.dagster.names import Keys, run_tags
from siltstone.dagster.runs import StreamRuns
from siltstone.dagster.sensors.recovery import (
    ATTEMPT_TAG,
    FOLLOWS_TAG,
    LOOK_BACK_S,
    RECOVERS_TAG,
    RETRIES_TAG,
    WILL_RETRY_TAG,
    Look,
    Looked,
    newest_run,
    sweep_sensor,
)
from siltstone.errors import CorruptObject, Fenced, SiltstoneError, UsageError
from siltstone.pipes.parts import BY_DAGSTER
from siltstone.settings import RecoveryOptions, load_settings
from tests.fault.small_stream import SMALL

OPTIONS = RecoveryOptions(attempts=3, delay_s=10)
FAILED, SUCCESS, STARTED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.STARTED
CANCELED = dg.DagsterRunStatus.CANCELED


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def ran(
    instance: dg.DagsterInstance, operation: str = "run", status: dg.DagsterRunStatus = FAILED, **tags: str
) -> dg.DagsterRun:
    """A run that has ended so, or goes on."""
    given = {**run_tags(SMALL.name, operation), **{name.replace("__", "/"): value for name, value in tags.items()}}
    run = create_run_for_test(
        instance, job_name="small" if operation == "run" else f"siltstone__{operation}", tags=given, status=STARTED
    )
    if status is FAILED:
        instance.report_run_failed(run)
    elif status is CANCELED:
        instance.report_run_canceled(run)
    elif status is SUCCESS:
        event = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name)
        instance.report_dagster_event(event, run.run_id)
    return run


def recovered(instance: dg.DagsterInstance, of: dg.DagsterRun, status: dg.DagsterRunStatus = FAILED) -> dg.DagsterRun:
    return ran(instance, "recover", status, siltstone__recovers=of.run_id)


def keys_of(*streams: str) -> Keys:
    """The keys of the assets of some streams, under their own names."""
    keys = [dg.AssetKey([name, asset]) for name in streams for asset in ("checkpoints", "restored_state")]
    return Keys(zip(keys, keys, strict=True))


def look(
    instance: dg.DagsterInstance,
    after_s: float,
    looked: Looked | None = None,
    options: RecoveryOptions = OPTIONS,
    writer: RunRecord | None = None,
    location: str | None = None,
    streams: Sequence[str] = (SMALL.name,),
    keys: Keys | None = None,
) -> list[dg.RunRequest]:
    """One look so long after now, the first one unless `looked` is what the one before left."""
    runs = StreamRuns(instance, keys_of(*streams) if keys is None else keys, location)
    given = Look(runs, options, time.time() + after_s, lambda _: writer)
    return given.request(Looked() if looked is None else looked)


def due(
    instance: dg.DagsterInstance,
    after_s: float,
    options: RecoveryOptions = OPTIONS,
    writer: RunRecord | None = None,
) -> list[dg.RunRequest]:
    """What the first look requests."""
    return look(instance, after_s, options=options, writer=writer)


def wrote(who: str, after_s: float, outcome: str | None = None) -> RunRecord:
    """A run of the stream that was started then, from now, and goes on or has ended so."""
    started = datetime.now(UTC) + timedelta(seconds=after_s)
    return RunRecord(SMALL.name, 7, 1, who, started, started if outcome else None, outcome)


def failing(instance: dg.DagsterInstance, error: SiltstoneError, operation: str = "run") -> str:
    """A real run that fails with an error of the engine, as ours do."""

    @dg.op
    def fails() -> None:
        with report_errors():
            raise error

    @dg.job(tags=run_tags(SMALL.name, operation))
    def job() -> None:
        fails()

    return job.execute_in_process(instance=instance, raise_on_error=False).run_id


def test_a_failed_run_is_recovered_once_its_delay_is_over(instance: dg.DagsterInstance) -> None:
    run = ran(instance)
    assert due(instance, 9) == []
    (request,) = due(instance, 11)
    assert request.job_name == "siltstone__recover"
    ours = {RECOVERS_TAG: run.run_id, ATTEMPT_TAG: "1", RETRIES_TAG: "0"}
    assert request.tags == {**run_tags(SMALL.name, "recover"), **ours}
    assert request.run_config == {"ops": {"siltstone__recover__op": {"config": {"stream": "small"}}}}
    assert due(instance, 12)[0].run_key == request.run_key, "two looks must not start two runs"


def test_attempts_are_bounded_and_each_waits_three_times_as_long(instance: dg.DagsterInstance) -> None:
    run = ran(instance)
    keys = set()
    for attempt, delay_s in enumerate((10, 30, 90), start=1):
        assert due(instance, delay_s - 1) == []
        (request,) = due(instance, delay_s + 1)
        assert request.tags[ATTEMPT_TAG] == str(attempt)
        keys.add(request.run_key)
        recovered(instance, run)
    assert len(keys) == 3
    assert due(instance, 10_000) == []
    assert due(instance, 1, RecoveryOptions(attempts=0, delay_s=0)) == []


@pytest.mark.parametrize("status", [STARTED, SUCCESS, CANCELED])
def test_nothing_follows_while_a_recovery_goes_on_or_after_one_that_did_not_fail(
    instance: dg.DagsterInstance, status: dg.DagsterRunStatus
) -> None:
    recovered(instance, ran(instance), status)
    assert due(instance, 1000) == []


@pytest.mark.parametrize("status", [STARTED, SUCCESS, CANCELED])
def test_only_failures_are_recovered(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> None:
    ran(instance, status=status)
    assert due(instance, 1000) == []


@pytest.mark.parametrize("error", [UsageError("bad"), Fenced("a newer run has the stream")])
def test_nothing_follows_what_a_recovery_cannot_mend(instance: dg.DagsterInstance, error: SiltstoneError) -> None:
    failing(instance, error)
    assert due(instance, 1000) == []


def test_damage_is_recovered(instance: dg.DagsterInstance) -> None:
    failed = failing(instance, CorruptObject("a segment does not match its checksum"))
    (request,) = due(instance, 11)
    assert request.tags[RECOVERS_TAG] == failed


def test_a_recovery_that_could_not_be_mended_ends_the_attempts(instance: dg.DagsterInstance) -> None:
    run = ran(instance)
    attempt = failing(instance, UsageError("no such stream"), "recover")
    instance.add_run_tags(attempt, {RECOVERS_TAG: run.run_id})
    assert due(instance, 1000) == []


def test_nothing_follows_once_the_same_has_succeeded(instance: dg.DagsterInstance) -> None:
    ran(instance)
    ran(instance, "verify", SUCCESS)
    assert len(due(instance, 11)) == 1
    ran(instance, "run", SUCCESS)
    assert due(instance, 11) == []


def test_a_newer_failure_has_attempts_of_its_own(instance: dg.DagsterInstance) -> None:
    old = ran(instance)
    for _ in range(3):
        recovered(instance, old)
    new = ran(instance)
    (request,) = due(instance, 11)
    assert (request.tags[RECOVERS_TAG], request.tags[ATTEMPT_TAG]) == (new.run_id, "1")


def test_a_run_that_others_started_after_the_failed_one_is_not_fenced(instance: dg.DagsterInstance) -> None:
    """A healthy `run --follow` elsewhere."""
    ran(instance)
    assert due(instance, 11, writer=wrote("elsewhere:4711", 1)) == []
    assert due(instance, 11, writer=wrote("elsewhere:4711", 1, "done")) == []
    for other in (
        wrote("elsewhere:4711", 1, "failed"),
        wrote("elsewhere:4711", -60),
        wrote("elsewhere:1", -60, "done"),
    ):
        assert len(due(instance, 11, writer=other)) == 1


def test_a_run_of_ours_that_died_does_not_count_as_going_on(instance: dg.DagsterInstance) -> None:
    failed = ran(instance)
    assert len(due(instance, 11, writer=wrote(f"{BY_DAGSTER}{failed.run_id}", 1))) == 1
    goes_on = ran(instance, status=STARTED)
    assert due(instance, 11, writer=wrote(f"{BY_DAGSTER}{goes_on.run_id}", 1)) == []


def test_a_run_after_a_failed_check_mends_nothing(instance: dg.DagsterInstance) -> None:
    ran(instance, "verify")
    assert len(due(instance, 11, writer=wrote("elsewhere:4711", 1, "done"))) == 1
    assert due(instance, 11, writer=wrote("elsewhere:4711", 1)) == []


def test_no_sensor_accepts_a_loss(instance: dg.DagsterInstance) -> None:
    for operation in ("run", "verify", "sweep"):
        ran(instance, operation)
        (request,) = due(instance, 11)
        assert request.run_config["ops"]["siltstone__recover__op"]["config"] == {"stream": "small"}
    assert set(RecoverConfig.model_fields) == {"stream", "dry_run"}


def test_who_wrote_last_is_read_from_the_catalog(tmp_path: Path) -> None:
    settings = load_settings(warehouse=str(tmp_path / "w"))
    assert newest_run(settings, SMALL.name) is None
    with OpenWarehouse.open_writable(settings.warehouse) as place:
        assert newest_run(settings, SMALL.name) is None
        place.catalog.streams.register(SMALL.name, 8, {})
        for who in ("first", "second"):
            place.catalog.runs.begin(SMALL.name, who)
    newest = newest_run(settings, SMALL.name)
    assert newest is not None and (newest.who, newest.ended_at) == ("second", None)


def test_a_run_of_assets_from_the_page_counts_as_one_of_its_stream(instance: dg.DagsterInstance) -> None:
    for asset in ("restored_state", "checkpoints"):
        key = dg.AssetKey([SMALL.name, asset])
        run = create_run_for_test(instance, asset_selection=frozenset({key}), status=STARTED)
        instance.report_run_failed(run)
        (request,) = due(instance, 11)
        assert request.tags[RECOVERS_TAG] == run.run_id
        assert request.run_config["ops"]["siltstone__recover__op"]["config"] == {"stream": "small"}


def test_a_failed_sweep_after_a_recovery_starts_no_recovery(instance: dg.DagsterInstance) -> None:
    run = ran(instance, "sweep")
    instance.add_run_tags(run.run_id, {FOLLOWS_TAG: "a recovery"})
    assert due(instance, 1000) == []


def test_old_failures_and_other_streams_are_let_be(instance: dg.DagsterInstance) -> None:
    ran(instance)
    assert due(instance, LOOK_BACK_S + 60) == []
    with dg.DagsterInstance.ephemeral() as other:
        other.report_run_failed(create_run_for_test(other, tags={"siltstone/stream": "another"}, status=STARTED))
        assert due(other, 1000) == []


def test_a_failure_among_thousands_of_runs_of_others_is_recovered(instance: dg.DagsterInstance) -> None:
    """They begin and end at all times, before and after it, in a deployment that is not ours alone."""
    others = [
        dg.DagsterRun(job_name=f"foreign{n % 9}", status=(SUCCESS, FAILED, STARTED, CANCELED)[n % 4])
        for n in range(2000)
    ]
    for run in others[:1000]:
        instance.add_run(run)
    failed = ran(instance)
    for run in others[1000:]:
        instance.add_run(run)
    (request,) = due(instance, 11)
    assert request.tags[RECOVERS_TAG] == failed.run_id


def test_a_later_look_reads_what_ended_since_and_remembers_what_is_open(instance: dg.DagsterInstance) -> None:
    now = time.time()
    failed, looked = ran(instance), Looked()
    assert look(instance, 1, looked) == [], "its delay is not over"
    assert looked == Looked(pytest.approx(now + 1, abs=2), {SMALL.name: [failed.run_id]}, [SMALL.name])
    (request,) = look(instance, 200, looked)
    assert request.tags[RECOVERS_TAG] == failed.run_id, "it failed long before that look, and is not forgotten"
    recovered(instance, failed, SUCCESS)
    look(instance, 210, looked)
    assert looked.open == {}, "dealt with"


def test_a_run_that_dagster_retries_itself_is_left_to_it(instance: dg.DagsterInstance) -> None:
    failed, looked = ran(instance), Looked()
    instance.add_run_tags(failed.run_id, {WILL_RETRY_TAG: "true"})
    assert look(instance, 20, looked) == []
    retry = ran(instance, status=STARTED)
    assert look(instance, 21, looked) == []
    instance.report_run_failed(retry)
    (request,) = look(instance, 30, looked)
    assert request.tags[RECOVERS_TAG] == retry.run_id


def test_a_recovery_waits_while_a_run_of_the_stream_waits_or_is_at_work(instance: dg.DagsterInstance) -> None:
    failed, looked = ran(instance, "verify"), Looked()
    going = ran(instance, "run", STARTED)
    assert look(instance, 100, looked) == [] and looked.open == {SMALL.name: [failed.run_id]}
    instance.report_run_canceled(going)
    (request,) = look(instance, 200, looked)
    assert request.tags[RECOVERS_TAG] == failed.run_id


def test_a_recovery_that_succeeded_is_followed_by_a_sweep(instance: dg.DagsterInstance) -> None:
    run = recovered(instance, ran(instance), SUCCESS)
    record = instance.get_run_by_id(run.run_id)
    assert record is not None

    def follow() -> dg.RunRequest | dg.SkipReason:
        event = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, record.job_name)
        context = dg.build_run_status_sensor_context("sweep", event, instance, record)
        found = sweep_sensor()(context)
        assert isinstance(found, dg.RunRequest | dg.SkipReason)
        return found

    request = follow()
    assert isinstance(request, dg.RunRequest)
    assert (request.job_name, request.run_key) == ("siltstone__sweep", run.run_id)
    assert request.tags[FOLLOWS_TAG] == run.run_id and request.tags["siltstone/operation"] == "sweep"
    assert request.run_config["ops"]["siltstone__sweep__op"]["config"] == {"stream": "small"}
    ran(instance, "sweep", STARTED)
    assert isinstance(follow(), dg.SkipReason), "one is at work"


def test_an_operation_that_the_page_launched_is_of_the_stream_in_its_configuration(
    instance: dg.DagsterInstance,
) -> None:
    config = {"ops": {"siltstone__truncate__op": {"config": {"stream": "small"}}}}
    tags = {"siltstone/operation": "truncate"}
    run = create_run_for_test(instance, job_name="siltstone__truncate", run_config=config, tags=tags, status=STARTED)
    instance.report_run_failed(run)
    (request,) = due(instance, 11)
    assert request.tags[RECOVERS_TAG] == run.run_id


def test_streams_do_not_wait_for_each_other(instance: dg.DagsterInstance) -> None:
    ran(instance)
    other = create_run_for_test(instance, tags=run_tags("other", "run"), status=STARTED)
    instance.report_run_failed(other)
    found = look(instance, 11, streams=("small", "other"))
    assert {request.tags["siltstone/stream"] for request in found} == {"small", "other"}


def test_a_stream_of_the_same_name_elsewhere_is_another_one(instance: dg.DagsterInstance) -> None:
    """As of a deployment for trials beside the one for production, under one instance."""
    code = LoadableTargetOrigin(module_name="orchestration.definitions")
    trials = RemoteRepositoryOrigin(InProcessCodeLocationOrigin(code, location_name="trials"), "__repository__")
    run = dg.DagsterRun(job_name="small", status=FAILED, tags=run_tags(SMALL.name, "run"))
    instance.add_run(run.with_job_origin(RemoteJobOrigin(trials, "small")))
    assert look(instance, 11, location="production") == []
    assert len(look(instance, 11, location="trials")) == 1


def test_runs_of_others_are_not_ours_whatever_their_configuration(instance: dg.DagsterInstance) -> None:
    for config in (5, "small", ["small"], {"stream": "small"}, {"stream": ["small"]}):
        given = {"ops": {"load": {"config": config}, "siltstone__sweep__op": {"config": config}}}
        for status in (FAILED, SUCCESS):
            run = create_run_for_test(instance, job_name="kafka_loader", run_config=given, status=STARTED)
            if status is FAILED:
                instance.report_run_failed(run)
    assert due(instance, 11) == []


def test_a_run_of_the_shared_jobs_is_of_what_was_selected_or_of_all(instance: dg.DagsterInstance) -> None:
    def fails(**given: Any) -> None:
        tags = {"siltstone/operation": "verify"}
        run = create_run_for_test(instance, job_name="siltstone__verify", tags=tags, status=STARTED, **given)
        instance.report_run_failed(run)

    def recovered_now() -> set[str]:
        found = look(instance, 11, streams=("a", "small"))
        return {request.tags["siltstone/stream"] for request in found}

    fails(asset_check_selection=frozenset({dg.AssetCheckKey(dg.AssetKey(["a", "checkpoints"]), "digest")}))
    assert recovered_now() == {"a"}
    fails()
    assert recovered_now() == {"a", "small"}


def test_of_a_run_of_several_streams_those_that_failed_are_recovered(instance: dg.DagsterInstance) -> None:
    keys = {dg.AssetKey([name, "checkpoints"]) for name in ("a", "small")}
    run = create_run_for_test(instance, job_name="__ASSET_JOB", asset_selection=frozenset(keys), status=STARTED)
    assert look(instance, 11, streams=("a", "small")) == []
    runs = StreamRuns(instance, keys_of("a", "small"))
    assert runs.find_unfinished("run") == {"a": run.run_id, "small": run.run_id}
    data = StepFailureData(error=None, user_failure_data=None)
    event = dg.DagsterEvent("STEP_FAILURE", "__ASSET_JOB", step_key="small__run", event_specific_data=data)
    instance.report_dagster_event(event, run.run_id)
    instance.report_run_failed(run)
    (request,) = look(instance, 11, streams=("a", "small"))
    assert request.tags["siltstone/stream"] == "small"


def test_assets_under_other_keys_are_the_streams(instance: dg.DagsterInstance) -> None:
    key = dg.AssetKey(["lake", "tables", "sales"])
    run = create_run_for_test(instance, asset_selection=frozenset({key}), status=STARTED)
    instance.report_run_failed(run)
    keys = Keys({dg.AssetKey(["small", "restored_state"]): key})
    (request,) = look(instance, 11, keys=keys)
    assert request.tags[RECOVERS_TAG] == run.run_id


def test_an_older_run_that_ends_later_does_not_hide_an_open_failure(instance: dg.DagsterInstance) -> None:
    older, looked = ran(instance, "sweep", STARTED), Looked()
    failed = ran(instance)
    options = RecoveryOptions(attempts=3, delay_s=50)
    assert look(instance, 1, looked, options) == []
    instance.report_run_failed(older)
    (request,) = look(instance, 55, looked, options)
    assert request.tags[RECOVERS_TAG] == failed.run_id


def test_a_failure_of_a_stream_that_was_away_is_found_when_it_is_back(instance: dg.DagsterInstance) -> None:
    looked, _ = Looked(), ran(instance)
    assert look(instance, 1, looked) == []
    for after_s in (5, 90):
        assert look(instance, after_s, looked, streams=("other",)) == []
    assert len(look(instance, 200, looked, streams=("other", "small"))) == 1


def test_a_stream_of_the_same_name_elsewhere_holds_nothing_up(instance: dg.DagsterInstance) -> None:
    ran(instance)
    code = LoadableTargetOrigin(module_name="orchestration.definitions")
    trials = RemoteRepositoryOrigin(InProcessCodeLocationOrigin(code, location_name="trials"), "__repository__")
    run = dg.DagsterRun(job_name="small", status=STARTED, tags=run_tags(SMALL.name, "run"))
    instance.add_run(run.with_job_origin(RemoteJobOrigin(trials, "small")))
    assert len(look(instance, 11, location="production")) == 1
    assert look(instance, 11) == [], "as a run of this location does"


def test_a_recovery_that_was_refused_is_no_attempt(instance: dg.DagsterInstance) -> None:
    failed = ran(instance)
    refused = failing(instance, StreamBusy("a run is at work"), "recover")
    instance.add_run_tags(refused, {RECOVERS_TAG: failed.run_id})
    assert due(instance, 5) == []
    (request,) = due(instance, 1000)
    assert (request.tags[ATTEMPT_TAG], request.run_key) == ("1", f"{failed.run_id}:small:1")


def test_a_cursor_of_another_version_is_none() -> None:
    for cursor in (None, "", "{", "[1]", '"a"', '{"seen": 1}'):
        assert Looked.of(cursor) == Looked()


def test_no_two_recoveries_of_a_stream_are_at_work(instance: dg.DagsterInstance) -> None:
    recovered(instance, ran(instance), STARTED)
    ran(instance)
    assert due(instance, 1000) == []


def test_a_daemon_that_was_away_for_long_reads_a_day(instance: dg.DagsterInstance) -> None:
    seen: list[datetime] = []

    class Watched(StreamRuns):
        def list(self, *statuses: dg.DagsterRunStatus, **more: Any) -> Iterator[dg.RunRecord]:
            seen.append(more["updated_after"])
            return super().list(*statuses, **more)

    for looked in (Looked(), Looked(1.0, {}, [SMALL.name])):
        Look(Watched(instance, keys_of(SMALL.name)), OPTIONS, 10 * LOOK_BACK_S, lambda _: None).request(looked)
    assert [at.timestamp() for at in seen] == [9 * LOOK_BACK_S] * 2
