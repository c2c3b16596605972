"""The stream's runner while checkpoints are pending, without Spark: its threads are real, and so is all they call."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from siltstone.catalog.records.commits import Commits
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, Unreachable
from siltstone.run.consistency import ConsistencyRequests, DrainResult
from siltstone.run.definition import SourceShape
from siltstone.run.pending import Completed, PendingCheckpoint
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.run.task import StepTask
from siltstone.spark import runner as runner_module
from siltstone.spark.runner import StreamRunner
from siltstone.spark.running_query import run_stream
from siltstone.spark.step import StepRun
from siltstone.spark.stopping import StopRequest
from tests.outbox_run import NAME, POLICY, SINK, STREAM, Heard, Outboxed, Tallies, batch, inputs, outstanding
from tests.proofs import failures
from tests.rebuild_cases import BEGINNING
from tests.region_run import run_tasks, shuffled

WAIT_S = 20.0
BATCHES = 4
NO_SPARK: Any = None


class Log:
    """Spark's record of the query."""

    query_id, url = "q", "file:///q"

    def batch(self, batch: int) -> int:
        """Its own numbers are those of the stream."""
        return batch

    def read(self, batch: int, step: int, _: object) -> Step:
        """What a micro-batch has read."""
        return Step(step, batch, "v1\n{}\n")

    def unread_of(self, _: Step) -> list[LoggedFile]:
        """It was run with all of its files."""
        return []

    def check_names(self, *_: object) -> None:
        pass

    def find_new(self, _: object) -> set[str]:
        """Its source has no name."""
        return set()

    def read_beginning(self, *_: object, **__: object) -> Step:
        """Where the source begins."""
        return BEGINNING

    def check(self, _: object) -> None:
        """All is well."""

    prepare = check


class Query:
    """A streaming query, and the DataFrame that it is of: hands one micro-batch after the other to the runner."""

    sparkSession = lastProgress = None

    def __init__(self, first: int) -> None:
        self.first, self.error, self.stopped = first, None, threading.Event()
        self.writeStream = self
        self.ended = threading.Event()

    def foreachBatch(self, function: Callable[[Any, int], None]) -> "Query":
        """Take the runner."""
        self.function = function
        return self

    def option(self, *_: object) -> "Query":
        """Take an option."""
        return self

    def trigger(self, **_: object) -> "Query":
        """Take the trigger."""
        return self

    def start(self) -> "Query":
        """Begin."""
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            for n in range(self.first, BATCHES):
                if self.stopped.is_set():
                    break
                rows: Any = batch(n + 1)
                self.function(Rows(rows), n)
        except Exception as error:
            self.error = error
        self.ended.set()

    def awaitTermination(self, seconds: float) -> bool:
        """Wait."""
        ended = self.ended.wait(seconds)
        if ended and isinstance(self.error, BaseException):
            raise self.error
        return ended

    def stop(self) -> None:
        """Take no further micro-batch, and wait for the one in progress."""
        self.stopped.set()
        assert self.ended.wait(WAIT_S)


class Rows:
    """The rows of a micro-batch."""

    sparkSession = schema = None

    def __init__(self, table: pa.Table) -> None:
        self.table = table


def run_step(_: object, rows: Rows | None, tasks: Mapping[str, StepTask], *__: object) -> StepRun:
    """Each task in this process; the stream has one operator."""
    done = StepRun()
    for name, task in tasks.items():
        parts = {} if rows is None else shuffled(task, rows.table)
        done.received[name] = list(run_tasks(replace(task, hands_on=True), parts)[1])
    return done


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = {"run_step": run_step, "SparkSession": object, "STOP_POLL_S": 0.01}
    replaced["source_log"] = lambda *_: Log()
    replaced["shape_of"] = lambda *_: SourceShape({}, {}, reads_all=False)
    nothing = dict.fromkeys(
        ("check_query", "check_source", "source_names", "start_offsets", "analyzed_plan"), lambda *_: None
    )
    for name, value in (replaced | nothing).items():
        monkeypatch.setattr(runner_module, name, value)
    monkeypatch.setattr(runner_module.BatchBounds, "begin", lambda *_: None)
    monkeypatch.setattr("siltstone.spark.jobs.use_session", lambda _: None)


class Run:
    """One epoch of a run, as `operations.run` has it."""

    def __init__(self, place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        self.stop, self.heard = StopRequest(), heard
        monkeypatch.setattr(runner_module, "deliverers", lambda *_: {SINK: self.give})
        options = RegionOptions(
            parallelism=2, max_pending=given.pop("max_pending", 2), checkpoint_steps=given.pop("checkpoint_steps", 1)
        )
        stream = given.pop("stream", STREAM)
        self.region = ConsistentRegion.open(stream, place.warehouse, place.catalog, POLICY, options, "a test")
        self.runner = StreamRunner(NO_SPARK, self.region, **given)
        self.query: Any = Query(self.runner.next_batch)

    def give(self, output: OutputRecord) -> None:
        """Deliver an output."""
        Outboxed.give(self, output)  # pyright: ignore[reportArgumentType]

    letters = Heard()

    def perform(self) -> None:
        """Run to the end, whatever that is."""
        try:
            run_stream(self.runner, self.query, stop=self.stop)
        finally:
            self.runner.close()
            self.region.close("done" if self.runner.failure is None else "failed")


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """That of a run in which nothing happens."""
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("undisturbed") / "w")) as place:
        run = Outboxed(place, Heard(), checkpoint_steps=BATCHES)
        for n in range(1, BATCHES + 1):
            run.step(batch(n))
        return run.region.digest


def check_rest(
    place: OpenWarehouse, heard: Heard, digest: str | None, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> None:
    """The next run does the rest, and all is as if nothing had happened."""
    run = Run(place, heard, monkeypatch, **given)
    run.perform()
    assert heard.inputs == inputs(range(1, BATCHES + 1)) and outstanding(place) == [] and not failures(place, NAME)
    assert run.region.digest == digest


@contextmanager
def at(point: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch, heard: Heard) -> Iterator[None]:
    """Act once, in the thread that comes to a point for the second checkpoint."""
    acted = threading.Event()

    def act_once(id: int) -> None:
        if id == 2 and not acted.is_set():
            acted.set()
            act()

    prepare, store, add, take = ConsistentRegion.prepare, PendingCheckpoint.store, Commits.add, heard.take

    def prepared(self: ConsistentRegion, *args: Any, **named: Any) -> None:
        prepare(self, *args, **named)
        act_once(self.checkpoint - 1)

    def stored(self: PendingCheckpoint, *args: Any) -> None:
        act_once(self.id)
        store(self, *args)

    def added(self: Commits, stream: str, epoch: int, commit: Any) -> Any:
        act_once(commit.id)
        return add(self, stream, epoch, commit)

    def taken(id: int, rows: pa.Table) -> None:
        act_once(id)
        take(id, rows)

    with monkeypatch.context() as patch:
        if point == "prepare":
            patch.setattr(ConsistentRegion, "prepare", prepared)
        elif point == "store":
            patch.setattr(PendingCheckpoint, "store", stored)
        elif point == "commit":
            patch.setattr(Commits, "add", added)
        else:
            patch.setattr(heard, "take", taken)
        yield
    assert acted.is_set()


POINTS = ("prepare", "store", "commit", "deliver")


@pytest.mark.parametrize(("point", "max_pending"), [*((point, 2) for point in POINTS), ("store", 1)])
def test_a_signal_at_any_point_ends_a_run_with_all_that_it_has_processed(
    place: OpenWarehouse,
    heard: Heard,
    digest: str | None,
    point: str,
    max_pending: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(place, heard, monkeypatch, max_pending=max_pending)

    def receive() -> None:
        run.stop.receive(signal.SIGTERM)
        assert run.runner.enough.wait(WAIT_S)

    with at(point, receive, monkeypatch, heard):
        run.perform()
    taken = run.region.input_position().next_batch
    assert run.runner.stopped == "SIGTERM" and run.region.step == run.region.completed_step
    assert heard.inputs == inputs(range(1, taken + 1)) and outstanding(place) == []
    check_rest(place, heard, digest, monkeypatch)


@pytest.mark.parametrize("point", ["prepare", "deliver"])
def test_a_query_that_others_stop_ends_a_run_with_all_that_it_has_processed(
    place: OpenWarehouse, heard: Heard, digest: str | None, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(place, heard, monkeypatch, checkpoint_steps=2 if point == "deliver" else 1)

    def stop() -> None:
        run.query.stopped.set()
        if point == "prepare":  # Spark does not wait for the call of the runner that it interrupts
            run.query.ended.set()

    with at(point, stop, monkeypatch, heard):
        run.perform()
    assert run.region.step == run.region.completed_step and outstanding(place) == []
    check_rest(place, heard, digest, monkeypatch)


@pytest.mark.parametrize(("point", "max_pending"), [*((point, 2) for point in POINTS), ("deliver", 1)])
def test_a_failure_at_any_point_goes_back_to_the_newest_complete_checkpoint(
    place: OpenWarehouse,
    heard: Heard,
    digest: str | None,
    point: str,
    max_pending: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = Unreachable("the test says so")

    def fail() -> None:
        raise away

    run = Run(place, heard, monkeypatch, max_pending=max_pending)
    with at(point, fail, monkeypatch, heard), pytest.raises(Unreachable, match="the test says so"):
        run.perform()
    assert run.runner.failure is away
    assert place.catalog.checkpoints.last_id(NAME) >= POINTS.index(point) // 2
    check_rest(place, heard, digest, monkeypatch, max_pending=max_pending)


def test_a_sink_that_exits_stops_the_stream_as_any_error_does(
    place: OpenWarehouse, heard: Heard, digest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> None:
        sys.exit(0)

    def take_two(query: Query) -> None:
        for n in range(2):
            rows: Any = Rows(batch(n + 1))
            query.function(rows, n)
        query.stopped.wait(WAIT_S)  # for input: Spark raises what the sink did only with a next micro-batch
        query.ended.set()

    run = Run(place, heard, monkeypatch, max_pending=2)
    monkeypatch.setattr(run.query, "_run", partial(take_two, run.query))
    with at("deliver", leave, monkeypatch, heard), pytest.raises(StateError, match="stopped in step"):
        run.perform()
    check_rest(place, heard, digest, monkeypatch, max_pending=2)


class Telling(Tallies):
    """Fails once it hears of its second checkpoint."""

    def region_checkpointed(self, checkpoint: int) -> None:
        """Fail, perhaps."""
        assert checkpoint != 2, "nobody listens"


@pytest.mark.parametrize("max_pending", [0, 2])
@pytest.mark.parametrize("who", ["on_checkpoint", "region_checkpointed"])
def test_an_error_of_the_users_code_after_a_checkpoint_loses_nothing_of_it(
    place: OpenWarehouse,
    heard: Heard,
    digest: str | None,
    who: str,
    max_pending: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_checkpoint(completed: Completed) -> None:
        assert completed.id != 2, "nobody listens"

    given: dict[str, Any] = {"on_checkpoint": on_checkpoint}
    if who == "region_checkpointed":
        given = {"stream": replace(STREAM, operators=[Telling(name=SINK)])}
    run = Run(place, heard, monkeypatch, max_pending=max_pending, **given)
    with pytest.raises(StateError, match="nobody listens") as raised:
        run.perform()
    if who == "region_checkpointed":
        assert "operator by_key: AssertionError: nobody listens (test_pending_runner.py, line" in str(raised.value)
    assert raised.value.__cause__ is not None, "its line is to be found"
    assert heard.ids[:2] == [1, 2] and place.catalog.checkpoints.last_id(NAME) >= 2
    check_rest(place, heard, digest, monkeypatch, max_pending=max_pending)


class Noting(Tallies):
    """Notes of which checkpoints it hears, and which outputs are outstanding then."""

    heard: ClassVar[list[tuple[int, list[tuple[int, str]]]]] = []
    place: ClassVar[OpenWarehouse]

    def region_checkpointed(self, checkpoint: int) -> None:
        """Note it."""
        left = self.place.catalog.outbox.list(NAME, outstanding=True)
        self.heard.append((checkpoint, [(o.checkpoint, o.name) for o in left if o.checkpoint <= checkpoint]))


@pytest.mark.parametrize("max_pending", [0, 2])
def test_operators_hear_of_a_checkpoint_whose_outputs_only_the_next_run_delivers(
    place: OpenWarehouse, heard: Heard, digest: str | None, max_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "heard", [])
    monkeypatch.setattr(Noting, "place", place, raising=False)
    given: dict[str, Any] = {"stream": replace(STREAM, operators=[Noting(name=SINK)]), "max_pending": max_pending}
    away = Unreachable("the test says so")

    def fail() -> None:
        raise away

    run = Run(place, heard, monkeypatch, **given)
    with at("deliver", fail, monkeypatch, heard), pytest.raises(Unreachable, match="the test says so"):
        run.perform()
    assert [id for id, _ in Noting.heard] == [1] and place.catalog.checkpoints.last_id(NAME) >= 2
    check_rest(place, heard, digest, monkeypatch, **given)
    assert Noting.heard == [(id, []) for id in range(1, BATCHES + 1)], "each once, after its outputs"
    check_rest(place, heard, digest, monkeypatch, **given)
    assert len(Noting.heard) == BATCHES, "not again, without a reason"


def test_who_waits_for_a_query_of_ones_own_is_told_of_a_failure_that_the_query_has_not_told_yet(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(place, heard, monkeypatch)
    quiet: Any = Query(BATCHES)
    quiet.ended.set()
    rows: Any = Rows(batch(1))
    with pytest.raises(StateError, match=r"micro-batch 1 .* came where 0 was due"):
        run.runner(rows, 1)
    with pytest.raises(StateError, match=r"micro-batch 1 .* came where 0 was due"):
        run.runner.await_query(quiet)
    assert quiet.stopped.is_set()
    run.runner.close()
    run.region.close("failed")


def test_a_checkpoint_that_is_asked_for_while_no_input_comes_keeps_no_step_waiting(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, store, requests = threading.Event(), PendingCheckpoint.store, ConsistencyRequests()

    def store_late(self: PendingCheckpoint, *args: Any) -> None:
        assert stored.wait(WAIT_S)
        store(self, *args)

    monkeypatch.setattr(PendingCheckpoint, "store", store_late)
    run = Run(place, heard, monkeypatch, checkpoint_steps=BATCHES, requests=requests)
    idle: Any = Query(BATCHES)
    idle.stopped.set()
    waiting = threading.Thread(target=run.runner.await_query, args=[idle])
    rows: list[Any] = [Rows(batch(n)) for n in (1, 2)]
    run.runner(rows[0], 0)
    waiting.start()
    asked = requests.add()
    assert asked.wait(until_complete=False, timeout_s=WAIT_S) is DrainResult.CHECKPOINT_PENDING
    run.runner(rows[1], 1)
    assert run.region.step == 3 and run.region.completed == 0, "the step is taken while the checkpoint is on its way"
    stored.set()
    assert asked.wait(until_complete=True, timeout_s=WAIT_S) is DrainResult.COMPLETED and heard.ids == [1]
    idle.ended.set()
    waiting.join(WAIT_S)
    run.runner.finish()
    assert run.region.completed == 2 and heard.inputs == inputs([1, 2])
    run.runner.close()
    run.region.close("done")
