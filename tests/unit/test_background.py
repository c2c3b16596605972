"""Materialization that starts by itself, without Spark: triggers, failures, stalls, and how a run ends it."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains import inspect
from siltstone.chains.background import Background, BackgroundOptions, MaterializationEvent
from siltstone.chains.chain_rules import add_chains
from siltstone.chains.due import OperatorHealth, chain_facts, materialization_health
from siltstone.chains.materialization_rules import Health, MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.chains.metrics import health_metrics
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.upload_metrics import UploadStatistics, openmetrics
from siltstone.errors import UnknownStream, Unreachable
from siltstone.model import StoredObject
from siltstone.report import report_data, summary_table
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.settings import Settings
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.store.filesystem import FilesystemStore
from tests.catalog_cases import beginnings
from tests.clock import Clock
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, in_order
from tests.region_run import RegionRun
from tests.stored import stream_objects

NAME = SMALL.name
OPERATORS = [operator.name for operator in SMALL.operators]
UNBOUND = PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None)
LONG = policy_by_name("adjust-d", UNBOUND)
EVERY = MaterializationOptions(interval_s=100)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def epoch_of(place: OpenWarehouse) -> int:
    return place.catalog.streams.get(NAME).epoch


def background(
    place: OpenWarehouse, options: BackgroundOptions | None = None, run=in_order, cancel=lambda: None
) -> Background:
    return Background(
        place, NAME, epoch_of(place), options or BackgroundOptions(EVERY, UNBOUND, parallelism=2), run, cancel
    )


def run_some(place: OpenWarehouse, count: int = 4) -> tuple[RegionRun, Iterator]:
    run, rows = RegionRun(place, SMALL, LONG, parallelism=2), iter(purchases())
    for _ in range(count):
        run.step(next(rows))
    return run, rows


def health(place: OpenWarehouse, options: MaterializationOptions = EVERY) -> dict[str, OperatorHealth]:
    return dict(materialization_health(place.catalog, NAME, options, UNBOUND))


def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to hold")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the store refuses the manifests of materializations: the last of the list."""
    refuses, put = [True], FilesystemStore.put

    def refuse(self: FilesystemStore, name: str, data: bytes) -> StoredObject:
        if refuses[-1] and name.endswith(".materialized.arrow"):
            raise Unreachable(f"cannot write object {name}: the test says so")
        return put(self, name, data)

    monkeypatch.setattr(FilesystemStore, "put", refuse)
    yield refuses


@pytest.mark.slow
def test_a_chain_is_materialized_when_its_interval_has_passed(place: OpenWarehouse, clock: Clock) -> None:
    run, rows = run_some(place)
    worker = background(place)
    clock.move(seconds=99)
    assert worker.look() and place.catalog.materializations.list(NAME) == []
    assert {h.trigger for h in health(place).values()} == {None}
    clock.move(seconds=1)
    assert all("the interval is 100 s" in str(h.trigger and h.trigger.reason) for h in health(place).values())
    assert worker.look()
    assert beginnings(place.catalog, NAME, 4) == dict.fromkeys(OPERATORS, 4)
    assert {f.deltas for f in chain_facts(place.catalog, NAME)} == {0}
    # The stream has not noticed yet; what it recorded is of the old chain, and yet the facts are right.
    for deltas in (1, 2, 3):
        completed = run.step(next(rows))
        assert completed is not None
        for facts in chain_facts(place.catalog, NAME):
            state = add_chains(run.region.chains.policies[facts.operator].values())
            assert (facts.deltas, facts.checkpoint) == (deltas, 4 + deltas) and state.deltas == deltas
            assert facts.chain_bytes == round(state.base_bytes + state.deltas_bytes + state.index_bytes)
            assert facts.since == clock.time and facts.succeeded_at == clock.time
    assert not failures(place, NAME)


@pytest.mark.slow
def test_what_a_materialization_stores_is_counted_with_the_runs_uploads(
    place: OpenWarehouse, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bases and manifests; those of one that does not complete were stored all the same."""
    run_some(place)
    metrics = RunMetrics(Settings(openmetrics=tmp_path / "{stream}.prom"), NAME)
    options = BackgroundOptions(EVERY, UNBOUND, parallelism=2)

    def uploaded(uploads: UploadStatistics) -> None:
        metrics.add_uploads(place.catalog, uploads)

    events = Counter[MaterializationEvent]()

    def counted_event(operator: str, event: MaterializationEvent, seconds: float) -> None:
        assert operator in {op.name for op in SMALL.operators} and seconds >= 0
        events[event] += 1

    worker = Background(place, NAME, epoch_of(place), options, in_order, uploaded=uploaded, counted=counted_event)
    clock.move(seconds=100)
    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.materializations), "complete", lambda *_, **__: 1 / 0)
        assert worker.look()
    clock.move(seconds=100)
    assert worker.look() and {f.deltas for f in chain_facts(place.catalog, NAME)} == {0}
    there = [(name, size) for name, size in stream_objects(place.warehouse.store) if ".materialized." in name]
    assert len(there) == 2 * len(
        {name for name, _ in there if name in {o.name for o in place.catalog.objects.list(NAME)}}
    )
    failed, done = events[MaterializationEvent.FAILED], events[MaterializationEvent.COMPLETED]
    assert (
        failed
        and done
        and events
        == {
            MaterializationEvent.STARTED: failed + done,
            MaterializationEvent.FAILED: failed,
            MaterializationEvent.COMPLETED: done,
        }
    )
    counted = metrics.uploads
    assert (counted.requests, counted.objects, counted.bytes) == (
        len(there),
        len(there),
        sum(size for _, size in there),
    )
    assert counted.latency_s.count == counted.attempts - counted.hedges_sent == len(there)
    told = (tmp_path / f"{NAME}.prom").read_text()
    assert f'siltstone_upload_objects_total{{stream="{NAME}"}} {float(len(there))}' in told


@pytest.mark.slow
def test_facts_between_a_materialization_and_the_streams_next_checkpoint_count_what_came_meanwhile(
    place: OpenWarehouse, clock: Clock
) -> None:
    run, rows = run_some(place)

    def meanwhile(function, tasks):
        parts = in_order(function, tasks)
        run.step(next(rows))
        run.step(next(rows))
        return parts

    before = {f.operator: f for f in chain_facts(place.catalog, NAME)}
    materialize(place, NAME, OPERATORS[0], 4, id="m1", parallelism=2, run=meanwhile)
    [found, *others] = chain_facts(place.catalog, NAME)
    assert found.operator == OPERATORS[0] and (found.deltas, found.checkpoint) == (2, 6)
    assert found.deltas_bytes < before[OPERATORS[0]].deltas_bytes
    assert {f.deltas for f in others} == {5}
    run.step(next(rows))
    again = chain_facts(place.catalog, NAME)[0]
    assert again.deltas == 3 and again.deltas_bytes > found.deltas_bytes
    state = add_chains(run.region.chains.policies[OPERATORS[0]].values())
    assert again.chain_bytes == round(state.base_bytes + state.deltas_bytes + state.index_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "policy", "why"),
    [
        (MaterializationOptions(interval_s=0, chain_bytes=1), UNBOUND, "its deltas take"),
        (MaterializationOptions(interval_s=None), PolicyOptions(space_amplification_max=1.01), "times its live state"),
    ],
)
def test_bytes_and_amplification_make_a_chain_due_too(place, options, policy, why) -> None:
    run_some(place)
    found = materialization_health(place.catalog, NAME, options, policy)
    due = [operator for operator, h in found.items() if h.trigger is not None and why in h.trigger.reason]
    assert due and due == [operator for operator, h in found.items() if h.trigger is not None]
    assert background(place, BackgroundOptions(options, policy)).look()
    assert sorted(m.operator for m in place.catalog.materializations.list(NAME)) == sorted(due)
    assert {h.trigger for h in materialization_health(place.catalog, NAME, options, policy).values()} == {None}


@pytest.mark.slow
def test_a_restore_predicted_over_its_budget_makes_it_due_where_a_base_mends_it(place: OpenWarehouse) -> None:
    run = RegionRun(place, SMALL, LONG)
    for _ in range(6):
        run.step(purchases()[0])  # the same keys again and again
    [facts] = [f for f in chain_facts(place.catalog, NAME) if f.operator == "daily"]
    assert facts.restore_s > facts.base_restore_s > 0
    off = MaterializationOptions(interval_s=0, early=0.5)

    def due_at(budget_s: float) -> bool:
        policy = PolicyOptions(restore_budget_s=budget_s, space_amplification_max=None)
        trigger = materialization_health(place.catalog, NAME, off, policy)[facts.operator].trigger
        return trigger is not None and "a restore is predicted to take" in trigger.reason

    assert due_at(2 * facts.restore_s) and due_at(facts.base_restore_s + facts.restore_s)
    assert not due_at(2.1 * facts.restore_s)
    assert not due_at(2 * facts.base_restore_s)  # nor can a materialization help


@pytest.mark.slow
def test_failures_are_counted_retried_ever_later_and_told_loudly(
    place: OpenWarehouse, clock: Clock, refusing: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    run, rows = run_some(place)
    options = MaterializationOptions(interval_s=100, max_failures_allowed=2)
    worker = background(place, BackgroundOptions(options, UNBOUND))
    clock.move(seconds=100)
    levels, failed = [], []
    for _ in range(12):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert worker.look()
            levels += [record.levelname for record in caplog.records if OPERATORS[0] in record.getMessage()]
        failed.append(health(place)[OPERATORS[0]].facts.failures)
        clock.move(seconds=10)
    # The delays are 10, 20, 40, 80 seconds.
    assert failed == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert levels == ["WARNING", "ERROR", "ERROR", "ERROR"]
    found = health(place, options)[OPERATORS[0]]
    assert found.health is Health.FAILING and not found.fine
    assert "failing" in found.reason and "4 failures in a row" in found.reason and "the test says so" in found.reason
    assert found.to_dict()["last_success"] is None and found.to_dict()["failures"] == 4
    assert run.step(next(rows)) is not None  # the stream goes on
    clock.move(seconds=300)
    assert health(place, options)[OPERATORS[0]].health is Health.STALLED
    refusing.append(False)
    assert worker.look()
    assert {h.health for h in health(place, options).values()} == {Health.FINE}
    assert {h.facts.failures for h in health(place, options).values()} == {0}
    assert not failures(place, NAME)


@pytest.mark.slow
def test_a_base_ends_a_row_of_failures(place: OpenWarehouse, clock: Clock, refusing: list[bool]) -> None:
    short = policy_by_name("adjust-d", PolicyOptions(d0=2, d_max=2, size_ratio_max=None))
    run, rows = RegionRun(place, SMALL, short), iter(purchases())
    for _ in range(2):
        run.step(next(rows))
    clock.move(seconds=100)
    assert background(place).look()
    assert {h.facts.failures for h in health(place).values()} == {1}
    clock.move(seconds=1)
    for _ in range(2):
        run.step(next(rows))
    assert {(h.facts.failures, h.facts.deltas, h.health) for h in health(place).values()} == {(0, 0, Health.FINE)}


@pytest.mark.slow
def test_a_stall_shows_everywhere_and_a_stream_at_rest_does_not_stall(place: OpenWarehouse, clock: Clock) -> None:
    run, rows = run_some(place)
    clock.move(seconds=299)
    assert {h.health for h in health(place).values()} == {Health.FINE}
    clock.move(seconds=1)
    found = health(place)
    assert {h.health for h in found.values()} == {Health.STALLED}
    # In the list of checkpoints, in metrics, in the report.
    listed = inspect.list_materialization(found)
    assert {each["state"] for each in listed.values()} == {"stalled"} and list(listed) == OPERATORS
    text = openmetrics(UploadStatistics(), {"stream": NAME}, health_metrics(found, NAME))
    for operator in OPERATORS:
        labels = f'{{operator="{operator}",stream="{NAME}"}}'
        for name, value in (("stalled", "1.0"), ("failures", "0.0"), ("since_success_seconds", "300.0")):
            assert f"siltstone_materialization_{name}{labels} {value}" in text.splitlines(), text
    assert "siltstone_chain_amplification_ratio{" in text and text.endswith("# EOF\n")
    data = report_data(place.catalog, NAME, EVERY, UNBOUND)
    assert data.to_dict()["materialization"][OPERATORS[0]]["state"] == "stalled"
    newest = data.to_dict()["checkpoints"][-1]["operators"]
    assert {name: part["amplification"] for name, part in newest.items()} == {
        name: h.facts.amplification for name, h in found.items()
    }
    assert "stalled" in str(summary_table(data).caption)
    # The run ends: time stops at its newest checkpoint.
    run.region.close("done")
    assert {h.health for h in health(place).values()} == {Health.FINE}
    clock.move(seconds=10_000)
    assert {h.health for h in health(place).values()} == {Health.FINE}
    RegionRun(place, SMALL, LONG).step(next(rows))
    assert {h.health for h in health(place).values()} == {Health.STALLED}
    off = MaterializationOptions(interval_s=0)
    assert {h.health for h in health(place, off).values()} == {Health.FINE}


def test_a_stream_without_checkpoints_is_fine_and_an_unknown_one_is_not_there(place: OpenWarehouse) -> None:
    with pytest.raises(UnknownStream):
        health(place)
    RegionRun(place, SMALL, LONG)
    assert health(place) == {} and background(place).look()


@pytest.mark.slow
def test_the_thread_looks_after_a_checkpoint_and_ends_with_the_run(place: OpenWarehouse, clock: Clock) -> None:
    run, rows = run_some(place)
    worker = background(place)
    worker.start()
    clock.move(seconds=100)
    done = run.step(next(rows))
    assert done is not None
    worker.note_checkpoint()
    until(lambda: {f.since for f in chain_facts(place.catalog, NAME)} == {clock.time})
    assert min(beginnings(place.catalog, NAME, 5).values()) >= 4
    run.step(next(rows))
    clock.move(seconds=100)
    worker.finish(60)  # which looks a last time
    assert beginnings(place.catalog, NAME, 6) == dict.fromkeys(OPERATORS, 6)
    assert not any(thread.name.startswith("siltstone-materialize") for thread in threading.enumerate())
    assert place.catalog.leases.list_live(NAME) == []
    assert not failures(place, NAME)


@pytest.mark.slow
def test_what_is_under_way_when_a_run_fails_is_given_up_and_is_no_failure(place: OpenWarehouse, clock: Clock) -> None:
    run_some(place)
    begun, cancelled = threading.Event(), threading.Event()

    def hangs(function, tasks):
        parts = [function(tasks[0])]
        begun.set()
        assert cancelled.wait(30)
        raise RuntimeError(f"cancelled after {len(parts)}")

    worker = background(place, run=hangs, cancel=cancelled.set)
    clock.move(seconds=100)
    worker.start()
    assert begun.wait(30)
    worker.stop()
    assert cancelled.is_set() and place.catalog.materializations.list(NAME) == []
    assert place.catalog.leases.list_live(NAME) == []
    assert {(f.deltas, f.failures) for f in chain_facts(place.catalog, NAME)} == {(3, 0)}
    assert background(place).look()
    assert {f.deltas for f in chain_facts(place.catalog, NAME)} == {0}


@pytest.mark.slow
def test_another_process_at_it_is_no_failure_but_worth_waiting_for(place: OpenWarehouse, clock: Clock) -> None:
    run_some(place)
    place.catalog.leases.take(NAME, [4], id="other", who="another", lasts=timedelta(seconds=1000))
    place.catalog.materializations.begin(NAME, OPERATORS[0], 4, id="other", who="another")
    clock.move(seconds=100)
    assert not background(place).look()
    assert beginnings(place.catalog, NAME, 4) == {**dict.fromkeys(OPERATORS, 4), OPERATORS[0]: 1}
    assert {f.failures for f in chain_facts(place.catalog, NAME)} == {0}


@pytest.mark.slow
def test_a_catalog_that_is_away_does_not_end_it(place: OpenWarehouse, clock: Clock, monkeypatch, caplog) -> None:
    run_some(place)
    clock.move(seconds=100)

    def away(*_: object) -> None:
        raise Unreachable("cannot reach the catalog: the test says so")

    worker = background(place)
    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.materializations), "list_in_chain", away)
        assert not worker.look()
    told = "\n".join(caplog.messages)
    assert 'not materialized for now stream=small error="cannot reach the catalog' in told
    assert worker.look() and {f.deltas for f in chain_facts(place.catalog, NAME)} == {0}


@pytest.mark.slow
def test_retention_is_applied_after_a_success_once_no_step_needs_the_old_chain(
    place: OpenWarehouse, clock: Clock
) -> None:
    run, rows = run_some(place)
    keeps = RetentionOptions.model_validate({"keep_last": 1})
    worker = background(place, BackgroundOptions(EVERY, UNBOUND, keeps, parallelism=2))
    clock.move(seconds=100)
    assert worker.look() and worker.look()
    assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [1, 2, 3, 4]
    # A step that begins now may have been told of the old chain; when it has completed a checkpoint, none is.
    done = run.step(next(rows))
    assert done is not None
    worker.note_checkpoint()
    assert worker.look()
    assert [c.id for c in place.catalog.checkpoints.list(NAME, marked=True)] == [4, 5]
    outputs = {o.name for output in place.catalog.outbox.list(NAME) for o in output.objects}
    there = {name for name, _ in stream_objects(place.warehouse.store)}
    assert there == {o.name for o in place.catalog.objects.list(NAME)} | outputs and len(outputs) == 5, (
        "no sink has any yet"
    )
    run.step(next(rows))
    assert not failures(place, NAME)
