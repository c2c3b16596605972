"""Which recovery follows which runs, decided over an instance in memory: nothing is launched."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.run import BY_DAGSTER
from siltstone.dagster.failures import report_errors
from siltstone.dagster.jobs import RecoverConfig, job_tags
from siltstone.dagster.sensors.recovery import (
    ATTEMPT_TAG,
    FOLLOWS_TAG,
    LOOK_BACK_S,
    RECOVERS_TAG,
    due_recovery,
    newest_run,
)
from siltstone.errors import CorruptObject, Fenced, SiltstoneError, UsageError
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
    given = {**job_tags(SMALL, operation), **{name.replace("__", "/"): value for name, value in tags.items()}}
    run = create_run_for_test(instance, job_name=f"small__{operation}", tags=given, status=STARTED)
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


def due(
    instance: dg.DagsterInstance,
    after_s: float,
    options: RecoveryOptions = OPTIONS,
    writer: RunRecord | None = None,
) -> list[dg.RunRequest]:
    request = due_recovery(instance, SMALL, options, time.time() + after_s, lambda _: writer)
    return [] if request is None else [request]


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

    @dg.job(tags=job_tags(SMALL, operation))
    def job() -> None:
        fails()

    return job.execute_in_process(instance=instance, raise_on_error=False).run_id


def test_a_failed_run_is_recovered_once_its_delay_is_over(instance: dg.DagsterInstance) -> None:
    run = ran(instance)
    assert due(instance, 9) == []
    (request,) = due(instance, 11)
    assert request.job_name == "small__recover"
    assert request.tags == {**job_tags(SMALL, "recover"), RECOVERS_TAG: run.run_id, ATTEMPT_TAG: "1"}
    assert request.run_config == {"ops": {"small__recover__op": {"config": {}}}}
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
        assert request.run_config == {"ops": {"small__recover__op": {"config": {}}}}
    assert set(RecoverConfig.model_fields) == {"dry_run"}


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
        assert request.run_config["ops"]["small__recover__op"]["config"] == {}


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
