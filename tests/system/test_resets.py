"""Runs that go back to their newest checkpoint by themselves, and those that must not."""

import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.records.commits import Commits
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, StateError, Unreachable
from siltstone.operator import Rows, State
from siltstone.run.region import ConsistentRegion
from siltstone.settings import RecoveryOptions, Settings
from siltstone.spark.operations import RunRequest, run, write_stream
from siltstone.spark.resets import Resets
from siltstone.store.filesystem import FilesystemStore
from siltstone.stream import DIRECTORY, Stream
from tests.hooked_store import Failing
from tests.spark_runs import at, check_proven, digests
from tests.spark_streams import BREAKING, COUNTS, DIE, STEPS, source_of

pytestmark = pytest.mark.usefixtures("spark")
QUICK = RecoveryOptions(reset_delay_s=0.01)


class Dying(Aggregate):
    """Its worker is killed in the step that has the value `DIE`, as often as `marks` has files, one each time."""

    def __init__(self, marks: Path) -> None:
        super().__init__("keys", {"key": pa.int64()}, [Count("n"), Sum("sum", of="value")])
        self.marks = marks

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        output = super().process(rows, state)
        if DIE in rows.table.column("value").to_pylist() and (left := list(self.marks.glob("*"))):
            left[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return output


def stream_of(marks: Path, deaths: int, heard: list[tuple[int, int]]) -> Stream:
    """A stream whose worker dies, and what its sink gets."""
    marks.mkdir()
    for _ in range(deaths):
        (marks / uuid.uuid4().hex).touch()
    sinks = {"keys": lambda rows, id: heard.append((id, rows.count()))}
    return Stream("dying", source_of(STEPS), [Dying(marks)], sinks=sinks, max_parallelism=8)


def fail_puts(monkeypatch: pytest.MonkeyPatch, times: int = 1 << 30) -> None:
    """Let the store be away when a manifest is to be stored; only in this process, the driver."""
    failing, put = Failing(times, suffix="manifest.arrow"), FilesystemStore.put

    def failing_put(self: FilesystemStore, name: str, data: Any) -> Any:
        failing(name)
        return put(self, name, data)

    monkeypatch.setattr(FilesystemStore, "put", failing_put)


def fail_commits(monkeypatch: pytest.MonkeyPatch, fails: dict[int, str]) -> None:
    """Let the catalog be away once at the commit of some checkpoints: `before` it, or `after` it was done."""
    add: Callable[..., Any] = Commits.add

    def failing_add(self: Commits, stream: str, epoch: int, commit: Any, **named: Any) -> Any:
        fault = fails.pop(commit.id, None)
        if fault == "before":
            raise Unreachable("the catalog is away: the test says so")
        done = add(self, stream, epoch, commit, **named)
        if fault == "after":
            raise Unreachable("it is not known whether it was written: the test says so")
        return done

    monkeypatch.setattr(Commits, "add", failing_add)


def lose_working_state(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """Let the machine lose its working state once, before a step."""
    begin, waiting = ConsistentRegion.begin_step, [before]

    def losing(self: ConsistentRegion, *step: Any, **options: Any) -> Any:
        if self.step + 1 in waiting:
            waiting.clear()
            shutil.rmtree(self.warehouse.local.work(self.stream.name, self.epoch))
        return begin(self, *step, **options)

    monkeypatch.setattr(ConsistentRegion, "begin_step", losing)


def outcomes(settings: Settings, stream: str) -> list[str | None]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return [record.outcome for record in place.catalog.runs.list(stream)]


def test_whatever_fails_meanwhile_a_run_ends_as_if_nothing_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[tuple[int, int]] = []
    steady = at(tmp_path / "steady", checkpoint_steps=2)
    run(steady, stream_of(tmp_path / "none", 0, expected), RunRequest())
    heard: list[tuple[int, int]] = []
    settings = at(tmp_path / "w", checkpoint_steps=2, recovery=QUICK)
    with monkeypatch.context() as patch:
        lose_working_state(patch, before=2)
        fail_puts(patch, times=1)
        fail_commits(patch, {1: "after", 2: "before"})
        result = run(settings, stream_of(tmp_path / "marks", 2, heard), RunRequest(batches=4))
    # Working state that is lost costs no reset: it is rolled forward by the log.
    assert (result.resets, result.checkpoints, result.rows) == (1 + 1 + 2 + 1, [1, 2], sum(map(len, STEPS)))
    assert heard == expected, "the sink has each checkpoint once"
    assert digests(settings, "dying") == digests(steady, "dying")
    assert outcomes(settings, "dying") == ["reset"] * 5 + ["done"]
    check_proven(settings, "dying")


def test_a_store_that_stays_away_ends_the_run_after_some_resets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = at(tmp_path / "w", recovery=QUICK.model_copy(update={"resets": 2}))
    with monkeypatch.context() as patch:
        fail_puts(patch)
        with pytest.raises(Unreachable, match="cannot write object"):
            run(settings, COUNTS, RunRequest(batches=1))
    assert outcomes(settings, "counts") == ["reset", "reset", "failed"]
    assert run(settings, COUNTS, RunRequest(batches=1)).checkpoints == [1]


def test_an_error_of_the_users_code_resets_nothing(tmp_path: Path) -> None:
    settings = at(tmp_path / "w", recovery=QUICK)
    with pytest.raises(StateError, match="ZeroDivisionError: a value is negative"):
        run(settings, BREAKING, RunRequest())
    assert outcomes(settings, "breaking") == ["failed"]


def test_a_run_that_was_fenced_does_not_take_the_stream_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen host wakes up while the store is away: the run that took over meanwhile must keep the stream."""
    settings = at(tmp_path / "w", recovery=QUICK)

    def another_run(*_: object, **__: object) -> None:
        with OpenWarehouse.open_existing(settings.warehouse) as place:
            place.catalog.runs.begin("counts", "another")

    with monkeypatch.context() as patch:
        fail_puts(patch, times=1)
        patch.setattr(Resets, "wait", another_run)
        with pytest.raises(Fenced, match="epoch 1 of stream counts was fenced by epoch 2"):
            run(settings, replace(COUNTS), RunRequest())
    assert outcomes(settings, "counts") == ["reset", None]


def scrape(url: str) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but the stream's, in the order of their names) -> number."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {sample.labels.get("stream") for family in families for sample in family.samples} == {"counts"}
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k not in ("stream", "le"))): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_are_served_while_a_run_is_at_work_and_go_on_over_a_reset(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = at(tmp_path / "w", recovery=QUICK, metrics_port="0")
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})
    arrived, count = threading.Event(), len(STEPS)
    with monkeypatch.context() as patch:
        fail_commits(patch, {2: "before"})
        with write_stream(
            settings,
            replace(COUNTS, source=None),
            rows,
            RunRequest(),
            on_checkpoint=lambda c: arrived.set() if c.id == count else None,
        ) as begun:
            url = begun.metrics_url
            assert url is not None and arrived.wait(timeout=120)
            found = scrape(url)
            while ("siltstone_query_processed_rows_per_second",) not in found:  # read by the run's thread, now and then
                assert begun.is_active
                found = scrape(url)
    with pytest.raises(urllib.error.URLError):
        scrape(url)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest, stored = place.catalog.checkpoints.get_latest("counts"), place.catalog.objects.list("counts")
    assert found["siltstone_resets_total",] == 1
    assert found["siltstone_checkpoints_total",] == found["siltstone_checkpoint_id",] == count
    assert found["siltstone_steps_total",] == count + 1, "one was repeated"
    assert found["siltstone_input_rows_total", "counts"] == sum(map(len, STEPS)) + len(STEPS[1])
    assert found["siltstone_step_input_rows", "counts"] == len(STEPS[-1])
    assert found["siltstone_uncommitted_steps",] == found["siltstone_uncommitted_input_rows", "counts"] == 0
    assert found["siltstone_state_rows", "counts"] == newest.rows
    assert found["siltstone_checkpoint_bytes",] == newest.bytes and found["siltstone_checkpoint_seconds",] > 0
    assert found["siltstone_checkpoint_d", "counts"] == newest.d["counts"]
    assert found["siltstone_checkpoint_form", newest.forms["counts"].value, "counts"] == 1
    assert 0 <= found["siltstone_checkpoint_age_seconds",] <= found["siltstone_run_age_seconds",]
    assert found["siltstone_upload_objects_total",] == len(stored)
    assert found["siltstone_upload_attempts_total",] >= found["siltstone_upload_requests_total",] >= len(stored)
