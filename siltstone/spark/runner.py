"""The stream runner: makes each micro-batch of a Structured Streaming query a step of the consistent region.

In the user's own query:

    runner = StreamRunner(spark, region)
    runner.follow_log(rows)
    query = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location).start()
    query.awaitTermination()
    runner.finish()

or, for a stream definition with sources of its own, `sources.open_input` and `running_query.run_stream`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from siltstone.catalog.records.steps import Step, StepKind, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, UsageError
from siltstone.log import bind_fields, get_logger
from siltstone.operator import SOURCE
from siltstone.run import callbacks
from siltstone.run.behind import CheckpointsBehind
from siltstone.run.consistency import ConsistencyRequests
from siltstone.run.progress import RunProgress
from siltstone.run.region import Completed, ConsistentRegion
from siltstone.run.task import StepTask
from siltstone.run.working_state import remove_older_epochs
from siltstone.sinks.resolve import resolve_sinks
from siltstone.spark.batches import BatchBounds
from siltstone.spark.delivery import check_frames, deliverers
from siltstone.spark.jobs import TaggedJobs
from siltstone.spark.logged import rerun_batch
from siltstone.spark.placement import placement_of
from siltstone.spark.queries import (
    analyzed_plan,
    check_query,
    check_source,
    read_backlog,
    read_files,
    read_progress,
    source_log,
    source_names,
    start_offsets,
)
from siltstone.spark.source_log import span
from siltstone.spark.sources import Input, shape_of
from siltstone.spark.step import StepRun, own_session, run_step
from siltstone.spark.stopping import StopRequest
from siltstone.spark.unreadable_files import UnreadableFiles

STOP_POLL_S = 0.2
TICK_S = 1.0
"""how long after a step one without rows is taken because something is due"""
AWAITED_WITHIN_S = 10.0
"""how soon after its query begins a run with timers must be waited for by `StreamRunner.await_query`"""
_LOG = get_logger(__name__)


class StreamRunner:
    """Runs the steps of one region; pass it to `foreachBatch`.

    Args:
        spark: the session whose query calls it.
        region: the run's consistent region, open.
        max_steps: the most steps to run; then `enough` is set.
        finishes: whether `finish` fires all that waits for event time.
        on_checkpoint: called with each completed checkpoint.
        placement: whether each subtask stays on the executor that has its state; None for all masters but local ones.
        progress: counts the steps; checkpoints are counted by `on_checkpoint`.
        requests: those for a checkpoint at once; they are looked at before each step, and by `await_query`.
        source: what the query will read, if it is known; always for a stream that names its sources.
    """

    def __init__(
        self,
        spark: SparkSession,
        region: ConsistentRegion,
        *,
        max_steps: int | None = None,
        finishes: bool = False,
        on_checkpoint: Callable[[Completed], None] = lambda _: None,
        placement: bool | None = None,
        progress: RunProgress | None = None,
        requests: ConsistencyRequests | None = None,
        source: Input | None = None,
    ) -> None:
        self.spark, self._own_session = spark, own_session(spark)
        self.region = region
        self.unreadable: UnreadableFiles | None = None
        """the files that a step may be run without; None if it may not"""
        self._is_reduced = False
        """whether the query has to begin again, with its newest batch without files that cannot be read"""
        self.enough = threading.Event()
        self.failure: BaseException | None = None
        self.stopped: str | None = None
        """why the run ended before its input did, such as the name of a signal; None if it did not"""
        self._stopping = threading.Event()
        self._turn = threading.Condition(threading.Lock())
        """held by a step, and by a commit between two steps"""
        self._context = copy_context()
        """the fields that log events carry where the run began; Spark calls the runner in a thread of its own"""
        self._steps_left, self._finishes = max_steps, finishes
        self._awaited = threading.Event()
        """whether somebody waits by `await_query`, and so has timers fire while no input comes"""
        self._stepped_s = 0.0
        """when the newest step ended"""
        if max_steps is not None and max_steps <= 0:
            self.enough.set()
        self._on_checkpoint = on_checkpoint
        self._progress = progress or RunProgress(region.stream.name)
        self._requests = requests or ConsistencyRequests()
        self._placement = placement_of(spark, region.warehouse, region.stream.name, placement)
        self.jobs = TaggedJobs(spark, region.warehouse, region.stream.name, region.epoch)
        """the Spark jobs of this run's steps"""
        self._behind = CheckpointsBehind(region, self._turn, self._complete, self._fail, self.jobs.in_thread)
        stream = region.stream
        local, self._source = region.warehouse.local, source
        self._names, self._schema = (None, None) if source is None else (source.names, source.rows.schema)
        self._log = source_log(spark, local.spark_log(stream.name, region.epoch), local.root, self._names)
        self._sources_checked = False
        self._bounds = BatchBounds(stream.operators)
        position = region.input_position()
        self._log.prepare(position)
        self._next_batch = position.next_batch
        self._before = position.newest[-1] if position.newest else position.beginning
        """the newest step with a batch, or where the sources begin"""
        self._begins = position.beginning is None and not position.newest
        self._new_sources = self._log.find_new(position)
        self._to_follow = region.logged_steps()
        warehouse = region.warehouse
        self._begin_to_deliver()
        remove_older_epochs(warehouse.local, stream.name, region.oldest_epoch or region.epoch)

    def _begin_to_deliver(self) -> None:
        """Deliver what an earlier run left, and check that this one's outputs can be delivered."""
        region, warehouse = self.region, self.region.warehouse
        sinks = resolve_sinks(region.stream, OpenWarehouse(warehouse, region.catalog))
        self._sinks = deliverers(self.spark, sinks, warehouse.store_url)
        self._deliver_left()
        check_frames(self.spark, region.stream, sinks)

    @property
    def next_batch(self) -> int:
        """The next micro-batch of the input."""
        return self._next_batch

    @property
    def checkpoint_location(self) -> str:
        """The query's `checkpointLocation`, a `file:` URL: Spark's record of the query, as of the last checkpoint."""
        return self._log.url

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Run one micro-batch as a step of every operator and, if one is due, complete a checkpoint, or prepare it.

        Raises:
            SiltstoneError: the step failed; nothing of it is visible, and a new run resumes at the last checkpoint.
            UsageError: logged steps must be run first (`follow_log`); nothing was done.
            StateError: a sink failed; the checkpoint is complete, and the next run delivers it first.
        """
        self._check_not_failed()
        with ExitStack() as stack:
            with self._progress.count_wait():
                stack.enter_context(self._turn)
                self._turn.wait_for(self._may_step)
            self._check_not_failed()
            if not self.enough.is_set():
                self._check_awaited()
                self._reduce(self._log.batch(batch))
                with self._note_failure():
                    self._context.run(self._step, rows, self._log.batch(batch))
                return
        self._stopping.wait()

    def _reduce(self, batch: int) -> None:
        """Stop the query if its batch has files that cannot be read: it begins again without them (`begins_again`).

        The error keeps Spark from committing the batch.
        """
        known = self.unreadable
        if known is not None and not known.is_empty and self._log.reduce(batch, known.reason):
            self._is_reduced = True
            raise StateError(f"batch {batch} has files that cannot be read", advice="run it again without them")

    def begins_again(self) -> bool:
        """Whether the query, which has ended, has to begin again, without files that it cannot read."""
        if not self._is_reduced or self.stopped is not None:
            return False
        self._log.write_reduced()
        self._is_reduced = False
        return True

    def _may_step(self) -> bool:
        """Whether the next step need not wait for checkpoints that are on their way (back-pressure)."""
        return self._behind.has_room or not self._ends_next or self.failure is not None or self.enough.is_set()

    @property
    def _is_enough(self) -> bool:
        """Whether as many micro-batches were run as were asked for."""
        return self._steps_left is not None and self._steps_left <= 0

    @property
    def _ends_next(self) -> bool:
        return self.region.ends_next or self._steps_left == 1 or self._requests.is_waiting

    @contextmanager
    def _note_failure(self) -> Iterator[None]:
        """Note an error of a step or checkpoint: the region takes no further one, and the run must begin anew."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = self.region.fail(error)

    def await_query(self, query: StreamingQuery, stop: StopRequest | None = None) -> None:
        """Wait until the query has ended, `enough` is set or `stop` is, and then stop it (`stop`).

        Meanwhile, complete the checkpoint of an interval that is overdue because no input comes, or that was asked for,
        and take steps without rows in which timers fire.

        Raises:
            StreamingQueryException: the query failed.
            Exception: a step or a checkpoint failed.
        """
        self._awaited.set()
        try:
            while not self.enough.is_set() and self.failure is None:
                if stop is not None and stop.is_set():
                    self.stopped = stop.reason
                    break
                self._complete_overdue()
                self._fire_due(query)
                self._progress.refresh_query(partial(read_progress, query, self._names))
                self._progress.lag.refresh(partial(read_backlog, query))
                if query.awaitTermination(STOP_POLL_S):  # pyright: ignore[reportArgumentType]
                    break
        except StreamingQueryException:
            if not self._is_reduced:
                raise
        finally:
            if self._is_reduced and self.stopped is None:
                query.stop()
            else:
                self.stop(query)
        if self.failure is not None:
            raise self.failure  # its query was stopped before it told so by itself

    def _complete_overdue(self) -> None:
        """End the interval by a step without rows if it is overdue or its checkpoint was asked for, no step is in
        progress, and one more checkpoint may be on its way."""
        if not (self.region.is_overdue or self._requests.is_waiting) or not self._turn.acquire(blocking=False):
            return
        try:
            if self.failure is not None:
                return
            if self.region.has_steps and self._behind.has_room:
                with self._note_failure():
                    self._take(None, self._without_rows(), ends=True)
            elif not self.region.has_steps and self._behind.is_empty:
                self._requests.note_caught_up()
        finally:
            self._turn.release()

    def _fire_due(self, query: StreamingQuery) -> None:
        """Take a step without rows if something is due, the source has no more rows, and no step was just taken.

        Rows that are there already come first, so that they are not late because the machine was slow.
        """
        waited = time.monotonic() - self._stepped_s >= TICK_S and self.region.stream.is_timed
        if not waited or query.status["isDataAvailable"] or not self._turn.acquire(blocking=False):
            return
        try:
            room = self._behind.has_room or not self._ends_next
            if room and self.failure is None and not self._to_follow and self.region.clock.is_due():
                with self._note_failure():
                    self._take(None, self._without_rows(), ends=self._ends_next)
        finally:
            self._turn.release()

    def _check_awaited(self) -> None:
        """Check that timers fire while no input comes.

        Raises:
            UsageError: nobody sees to it.
        """
        if self.region.stream.is_timed and not self._awaited.wait(AWAITED_WITHIN_S):
            raise UsageError(
                f"stream {self.region.stream.name} has timers, which fire only while somebody waits for the query by "
                "runner.await_query(query): call it instead of query.awaitTermination()"
            )

    def _without_rows(self, kind: StepKind = StepKind.EMPTY) -> Step:
        return Step.without_rows(self.region.step + 1, kind)

    def stop(self, query: StreamingQuery) -> None:
        """Stop the query once the step in progress, if any, is done; no further one begins."""
        self.enough.set()
        with self._turn:
            self._stopping.set()
            self._turn.notify_all()
        query.stop()

    def _step(self, rows: DataFrame, batch: int) -> None:
        region = self.region
        if batch < self._next_batch:
            self._log.check(batch)
            return
        if self._to_follow:
            # Other boundaries would bring sinks other rows under ids that they already have.
            raise UsageError(
                f"stream {region.stream.name} was rolled back, and {len(self._to_follow)} logged steps must be run "
                "again first: call runner.follow_log(rows), with the streaming DataFrame, before the query starts"
            )
        if batch != self._next_batch:
            raise StateError(
                f"micro-batch {batch} of {region.stream.name} came where {self._next_batch} was due",
                advice="start the query with .option('checkpointLocation', runner.checkpoint_location)",
            )
        if not self._sources_checked:
            self._note_sources(rows)
            self._check_sources(rows.sparkSession, batch)
            self._bounds.begin(rows.sparkSession, analyzed_plan(rows.sparkSession, self._log.query_id))
        last = self._steps_left == 1
        # A checkpoint may have become due only now; it has to wait while too many are pending.
        ends = self._ends_next and self._behind.has_room
        self._take(
            rows, self._log.read(batch, region.step + 1, partial(self._read_sizes, rows.sparkSession)), ends=ends
        )
        if last:
            self.enough.set()

    def _read_sizes(self, spark: SparkSession) -> dict[str, int]:
        files = read_files(spark, self._log.query_id)
        return {url: file.size for url, file in files.items() if file.size is not None}

    def _note_sources(self, rows: DataFrame) -> None:
        """Check what operators read of the sources, and have it recorded."""
        stream = self.region.stream
        shapes = {SOURCE: shape_of(stream, rows)} if self._source is None else self._source.shapes
        self.region.note_sources(shapes)

    def _check_sources(self, spark: SparkSession, batch: int) -> None:
        """Check the sources in the query's first batch, and record where they begin if nobody has."""
        self._log.check(batch)
        check_query(spark, self._log.query_id)
        names = source_names(spark, self._log.query_id)
        if self._before is not None:
            self._log.check_names(names, self._before)
        if self._begins or self._new_sources:
            # Before the batch is used: a source that starts at "latest" starts at a later offset next time.
            only = None if self._names is None else self._new_sources
            starts = start_offsets(spark, self._log.query_id)
            beginning = self._log.read_beginning(starts, names, batch=batch, only=only)
            self.region.record_beginning(beginning)
            self._before = self._before or beginning
            self._begins, self._new_sources = False, set()
        self._sources_checked = True

    def _take(self, rows: DataFrame | None, step: Step, ends: bool | None, *, finishes: bool = False) -> None:
        """Run one step over the rows of a micro-batch, or without rows.

        Args:
            ends: whether it ends in a checkpoint; None lets the region decide.
            finishes: whether the sources have ended.
        """
        region = self.region
        with self._trace_step():
            unread = self._log.unread_of(step)
            offsets = span(self._before, step)
            tasks = region.begin_step(step, ends=ends, offsets=offsets, unread=unread, finishes=finishes)
            if step.batch_id is not None:
                self._next_batch, self._before = step.batch_id + 1, step
            try:
                self._schema = self._schema or (None if rows is None else rows.schema)
                with self._bounds.lifted(rows):
                    done = run_step(self._own_session, rows, tasks, self._placement, self._schema)
            except Exception as error:
                if self.unreadable is not None and not self._to_follow:
                    self.unreadable.note(error, self._log.files_of(step))
                raise
            done.unpersist()
            self._acknowledge(done)
            requested = any(a.wants_checkpoint for received in done.received.values() for a in received)
            if region.checkpoint_due:
                self._end_interval()
        if requested and region.has_steps and not self._to_follow:  # the log knows where intervals ended
            if self._behind.has_room:
                self._take(None, self._without_rows(), ends=True)
            else:
                self._requests.add()
        if self._steps_left is not None and rows is not None:
            self._steps_left -= 1
        self._stepped_s = time.monotonic()

    def _end_interval(self) -> None:
        """Complete the checkpoint that the newest step ends in, or have it completed behind the stream."""
        with self._progress.count_wait():
            self._prepare()
            if self.region.options.max_pending and not self._to_follow:
                self._behind.add()
            else:
                self._complete_now()

    def _acknowledge(self, done: StepRun) -> None:
        for name, received in done.received.items():
            self.region.acknowledge(name, received)
            self._bounds.note(received)
        self._progress.add_step(done.received, self._placement.take_moves() if self._placement else 0)

    def follow_log(self, source: DataFrame, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Run the logged steps of rolled-back checkpoints again, with the same boundaries.

        The same checkpoints are completed again. Call it before the query starts; it does nothing if no steps are
        logged. It ends early only at a checkpoint, after `max_steps` or when `interrupted`, and then sets `enough`.

        Args:
            source: the streaming DataFrame that the query will read.
            interrupted: whether to end early.

        Raises:
            UsageError: the source destroys what it has read.
            Exception: a step failed, or Spark did.
        """
        region, way = self.region, self._to_follow
        check_source(source)
        with self._note_failure():
            self._note_sources(source)
            for step, ends in with_ends(way):
                if region.step == region.completed_step and (self._is_enough or interrupted()):
                    self.enough.set()
                    return
                take = partial(self._take, step=step, ends=ends)
                if step.batch_id is None:
                    take(None)
                else:
                    rerun_batch(source, self._log, step, take)
        self._to_follow = []
        if way:
            self._log.prepare(region.input_position())
            if self._is_enough:
                self.enough.set()

    def change(
        self,
        run: Callable[[SparkSession, Mapping[str, StepTask]], StepRun] | None = None,
        changed: Callable[[StepRun], Mapping[str, Any]] = lambda _: {},
    ) -> Completed:
        """Change the stream between two runs, by a step that reads nothing and ends in a checkpoint.

        Args:
            run: runs the tasks of its operators; None gives them no rows.
            changed: called with their acknowledgements before the checkpoint is committed. Its result is recorded with
                the checkpoint (see `ConsistentRegion.complete`); if it raises, there is no checkpoint.
        """
        run = run or (lambda _, tasks: run_step(self._own_session, None, tasks, self._placement))
        with self._trace_step():
            done = run(self.spark, self.region.begin_step(self._without_rows(StepKind.CHANGE), ends=True))
            self._acknowledge(done)
            self._prepare(**changed(done))
            return self._complete_now()

    @contextmanager
    def _trace_step(self) -> Iterator[None]:
        """Bind the next step's number and its checkpoint to log events."""
        region, step, began = self.region, self.region.step + 1, time.perf_counter()
        fields = {"stream": region.stream.name, "epoch": region.epoch, "checkpoint": region.checkpoint, "step": step}
        with bind_fields(**fields), self.jobs.tag():
            yield
            _LOG.debug("step processed", seconds=round(time.perf_counter() - began, 3))

    def _prepare(self, **changes: Any) -> None:
        checkpoint = self.region.checkpoint
        self.region.prepare(**changes)
        self._requests.note_prepared(checkpoint)

    def _complete_now(self) -> Completed:
        self.region.store()
        completed = self.region.commit()
        self._complete(completed)
        return completed

    def _complete(self, completed: Completed) -> None:
        """Deliver the outputs of a complete checkpoint, and say that it exists."""
        self._bounds.note_checkpoint()
        _LOG.debug("checkpoint completed", bytes=completed.bytes, seconds=round(completed.seconds, 3))
        self._deliver(checked=True)
        callbacks.region_checkpointed(self.region.stream.operators, completed.id, self.region.options.upload)
        self._on_checkpoint(completed)
        self._requests.note_completed(completed.id)

    def _deliver_left(self) -> None:
        """Deliver what earlier epochs left, and call `region_checkpointed` for their checkpoints, as those epochs could
        not."""
        region = self.region
        self._deliver()
        for id in region.outbox.left:
            callbacks.region_checkpointed(region.stream.operators, id, region.options.upload)

    def _deliver(self, *, checked: bool = False) -> None:
        if isinstance(self.spark, SparkSession):  # a Spark Connect server is elsewhere: the next run delivers
            self.region.deliver(self._sinks, checked=checked)

    def finish(self) -> None:
        """Complete the checkpoints on their way, and that of an unfinished interval, and fire what is due; call it once
        the query has ended well.

        If the query is still running, the step in progress ends first and no further step begins.

        Raises:
            SiltstoneError: as `__call__`, or the run has failed before.
        """
        self.enough.set()
        with self._turn:
            self._stopping.set()
            self._turn.wait_for(lambda: self._behind.has_room or self.failure is not None)
            self._check_not_failed()
            # What the log still holds comes before any other step.
            done = self.stopped is not None or bool(self._to_follow) or self._is_enough
            finishes, due = self._finishes and not done, not done and self.region.clock.is_due()
            if self.region.has_steps or finishes or due:
                with self._note_failure():
                    self._take(None, self._without_rows(), ends=True, finishes=finishes)
            self._turn.wait_for(lambda: self._behind.is_empty or self.failure is not None)
            self._check_not_failed()

    def close(self) -> None:
        """Wait until nothing is stored or delivered any more: what is not complete by then never will be."""
        self._behind.close()
        self._requests.note_failed()

    def _check_not_failed(self) -> None:
        """Refuse to go on after a failure: only a new run can tell what the failed step left behind."""
        if self.failure is not None:
            raise StateError(
                f"this run of {self.region.stream.name} has failed", advice="open the region again to resume"
            )
