"""Run a stream over its source, or over the user's own query."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import check_backend, policy_by_name
from siltstone.errors import SiltstoneError, StateError, Stopped, UsageError, summarize
from siltstone.log import get_logger
from siltstone.run.definition import check_recorded, check_run, check_source_shapes, is_named
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.spark.cluster import check_cluster
from siltstone.spark.operations.holding import RunListener, RunRequest, writer_epoch
from siltstone.spark.operations.recovering import DAMAGED, SelfRecovery
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.resets import Resets
from siltstone.spark.runner import StreamRunner
from siltstone.spark.running_query import ON_AND_ON, UNTIL_PROCESSED, check_trigger, ends_by_itself, run_stream
from siltstone.spark.session import needs_spark, spark_session
from siltstone.spark.sources import Input, make_input, open_input
from siltstone.spark.stopping import StopRequest, stop_on_signals
from siltstone.spark.stream_run import RunResult, StreamRun
from siltstone.spark.unreadable_files import UnreadableFiles
from siltstone.stream import Stream

_LOG = get_logger(__name__)


class _Work(RunListener):
    """The work of a run's thread: epoch after epoch, until the run has succeeded or no reset may follow."""

    _run: StreamRun
    _resets: Resets

    def __init__(
        self,
        settings: Settings,
        stream: Stream,
        warehouse: OpenWarehouse,
        source: Input,
        request: RunRequest,
        trigger: Mapping[str, Any],
        metrics: RunMetrics,
        metrics_url: str | None,
        on_checkpoint: Callable[[Completed], None],
    ) -> None:
        super().__init__(settings, warehouse, source.rows.sparkSession, metrics)
        self.stream, self.source, self.request, self.trigger = stream, source, request, trigger
        self.metrics_url, self.on_checkpoint = metrics_url, on_checkpoint
        self.stop = StopRequest()
        self.done: list[int] = []
        """the checkpoints that the run has completed"""
        self.rows_in = self.bytes = 0
        """the rows of the source in them, and the bytes that they wrote"""
        self.answered_late: list[CheckpointRecord] = []
        """those whose commit got no answer, and which a reset found in the catalog"""
        self.newest = 0
        """id of the stream's newest checkpoint"""
        self._unreadable = UnreadableFiles(stream.name) if stream.sorts_out_files else None
        self.current: StreamRunner | None = None
        """of the newest epoch; None while it begins"""
        self.first_batch: int | None = None
        """the micro-batch that the run began with; None before its first epoch"""
        self.first_completed = 0
        """the newest checkpoint then"""
        self.beside: list[_Work] = []
        """the work of the autonomous operators' runs, each in a thread of its own"""

    def __call__(self, run: StreamRun) -> RunResult:
        """Run the stream, and its autonomous operators beside it.

        If it is damaged, and no checkpoint was completed, recover it and run it again, once. After a failure that may
        pass, or of a file that it can go on without, reset it (`spark.resets`). If an autonomous operator fails for
        good, the stream goes on to its end.
        """
        try:
            with self._run_beside() as beside:
                result = self._perform(run)
            for each in beside:
                each.await_termination()
            return replace(result, autonomous=[each.result for each in beside if each.result])
        except BaseException as error:
            if self.stream.beside is not None:
                _LOG.error("an autonomous operator has stopped", stream=self.stream.name, error=str(error))
            raise
        finally:
            self.close()

    @contextmanager
    def _run_beside(self) -> Iterator[list[StreamRun]]:
        """Run the autonomous operators. They end with their input, or once the stream has failed or was stopped."""
        begun: list[StreamRun] = []
        if not self.beside:  # it may itself be beside another, which it must not stop
            yield begun
            return
        try:
            begun += map(_begin, self.beside)
            yield begun
        except BaseException:
            self.stop.ask("the stream has failed")
            raise
        finally:
            if not ends_by_itself(self.trigger):
                self.stop.ask("the stream has ended")
            for each in begun:
                each.await_end()

    def close(self) -> None:
        """Stop serving metrics, and close the catalogs; nobody may be at work any more."""
        for each in (self, *self.beside):
            each.metrics.close()
            each.warehouse.catalog.close()

    @needs_spark
    def _perform(self, run: StreamRun) -> RunResult:
        start = time.perf_counter()
        self._run, self.requests = run, run.requests
        recovery = SelfRecovery(self.settings, self.warehouse, run.stream, self.spark)
        resets = self._resets = Resets(run.stream, self.settings.recovery, self.stop)
        while True:
            try:
                runner = self._run_epoch()
                break
            except DAMAGED as error:
                if self.done:
                    raise
                recovery.attempt(error)
                self.tenure = Tenure()
            except Exception as error:
                if self.tenure.epoch is None or not self.is_reset(error):
                    raise
                run.set_query(None)
                self.metrics.progress.add_reset()
                resets.wait(error, is_news=self._is_news)
            run.set_query(None)
        late = self.answered_late
        return RunResult(
            stream=run.stream,
            checkpoints=sorted(self.done + [c.id for c in late]),
            digest=runner.region.digest,
            rows=self.rows_in + sum(c.statistics["rows_in"] for c in late),
            bytes=self.bytes + sum(c.bytes for c in late),
            seconds=round(time.perf_counter() - start, 3),
            uploads=self.metrics.uploads.summary(),
            dead_letters=dict(self.metrics.dead_letters),
            late=dict(self.metrics.late),
            recovered=recovery.done,
            resets=resets.count,
            stopped=runner.stopped,
            waited_s=round(self.metrics.progress.waited_s, 3),
        )

    def _cause(self, error: BaseException) -> BaseException:
        """Return what failed in the epoch that ended with `error`."""
        return (self.current and self.current.failure) or error

    def _run_epoch(self) -> StreamRunner:
        self.current = None
        if self._unreadable is not None:
            self._unreadable.has_news = False
        with writer_epoch(
            self.settings, self.stream, self.warehouse, self.spark, self._request(), self, self.source
        ) as runner:
            self.current, runner.unreadable = runner, self._unreadable
            self._note_position(runner)
            run_stream(runner, self.source.rows, self.trigger, self.stop, self._run.set_query)
        return runner

    def note_checkpoint(self, checkpoint: Completed) -> None:
        """Note what the checkpoint has, and tell the caller."""
        super().note_checkpoint(checkpoint)
        self.done.append(checkpoint.id)
        self.rows_in += checkpoint.rows_in
        self.bytes += checkpoint.bytes
        self.newest = checkpoint.id
        self._resets.note_checkpoint()
        self._run.last_checkpoint = checkpoint
        self._tell(checkpoint)

    def is_reset(self, error: Exception) -> bool:
        """Whether a reset may follow."""
        return self._resets.may_reset(error, self._cause(error), is_news=self._is_news)

    @property
    def _is_news(self) -> bool:
        """Whether the newest epoch has found a file that cannot be read."""
        return self._unreadable is not None and self._unreadable.has_news

    def _tell(self, checkpoint: Completed) -> None:
        try:
            self.on_checkpoint(checkpoint)
        except SiltstoneError:
            raise
        except Exception as error:  # the user's function may fail in any way
            raise StateError(
                f"stream {self.stream.name}: on_checkpoint failed at checkpoint {checkpoint.id}: "
                f"{summarize(error)}; the checkpoint is complete, and the next run goes on from it"
            ) from error

    def _request(self) -> RunRequest:
        """Return the request for the next epoch, without what a checkpoint of this run has done."""
        request, catalog, name = self.request, self.warehouse.catalog, self.stream.name
        if self.first_batch is None or (newest := catalog.checkpoints.last_id(name)) == self.first_completed:
            return request
        if request.batches is not None:
            done = catalog.input_log.get_position(name, newest).next_batch - self.first_batch
            request = replace(request, batches=request.batches - done)
        return replace(request, drop=())

    def _note_position(self, runner: StreamRunner) -> None:
        """Note where an epoch begins. A checkpoint that is new then is one whose commit got no answer."""
        if self.first_batch is None:
            self.first_batch, self.first_completed = runner.next_batch, runner.region.completed
        else:
            for id in range(self.newest + 1, runner.region.completed + 1):
                self.answered_late.append(self.warehouse.catalog.checkpoints.get(self.stream.name, id))
                self._resets.note_checkpoint()
        self.newest = runner.region.completed


@needs_spark
def run(
    settings: Settings,
    stream: Stream,
    request: RunRequest,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> RunResult:
    """Run the stream over its own source until it ends (`StreamClient.run`)."""
    start = time.perf_counter()

    def source(stream: Stream, warehouse: OpenWarehouse) -> Input:
        spark = spark_session(settings.master, settings.spark, steps=True)
        check_cluster(spark, stream, warehouse)
        return open_input(spark, stream, warehouse.warehouse, request.options)

    trigger = ON_AND_ON if request.follow else UNTIL_PROCESSED
    work = _prepare(settings, stream, request, source, trigger, on_checkpoint)
    with closing(work.metrics), work.warehouse, stop_on_signals(work.spark, work.stop):
        begun = _begin(work)
        _wait(begun, begun.await_termination)
    result = begun.result
    assert result is not None, "it has not failed"
    if result.stopped and not request.follow:
        raise Stopped(stream.name, result.stopped, work.newest)
    return replace(result, seconds=round(time.perf_counter() - start, 3))


@needs_spark
def write_stream(
    settings: Settings,
    stream: Stream,
    rows: DataFrame | Mapping[str, DataFrame],
    request: RunRequest,
    trigger: Mapping[str, Any] = ON_AND_ON,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> StreamRun:
    """Run the stream over these rows in a thread; return once its query has begun (`StreamClient.write_stream`)."""
    frames = rows.values() if isinstance(rows, Mapping) else [rows]
    if not all(isinstance(each.sparkSession, SparkSession) for each in frames):
        raise UsageError("a stream runs in the driver, which Spark Connect has elsewhere: use a classic Spark session")
    check_trigger(trigger)

    def check_given(stream: Stream, warehouse: OpenWarehouse) -> Input:
        read = rows
        if isinstance(rows, Mapping) and stream.beside is not None:  # it may read only some of them
            read = {name: rows[name] for name in stream.source_names if name in rows}
        source = make_input(stream, read)
        check_cluster(source.rows.sparkSession, stream, warehouse)
        return source

    begun = _begin(_prepare(settings, stream, request, check_given, trigger, on_checkpoint))
    _wait(begun, begun.await_start)
    return begun


def _begin(work: _Work) -> StreamRun:
    try:
        return StreamRun(work.stream.name, work.spark, work.stop, work, work.metrics_url)
    except BaseException:
        work.close()
        raise


def _wait(run: StreamRun, until: Callable[[], object]) -> None:
    """Wait. If the caller is interrupted meanwhile, stop the run, because nobody else has it."""
    try:
        until()
    except BaseException:
        with suppress(Exception):
            run.stop()
        raise


def _prepare(
    settings: Settings,
    stream: Stream,
    request: RunRequest,
    source: Callable[[Stream, OpenWarehouse], Input],
    trigger: Mapping[str, Any],
    on_checkpoint: Callable[[Completed], None],
) -> _Work:
    """Prepare a run, with every check that is possible before the stream, or an autonomous operator, is taken over."""
    check_backend(policy_by_name(settings.policy, settings.policy_options), settings.backend)
    autonomous = stream.autonomous_streams()
    for each in (stream, *autonomous):
        check_run(each, request.options, settings.parallelism or 1)
    metrics = RunMetrics(settings, stream.name)
    with ExitStack() as stack:
        url = stack.enter_context(closing(metrics)).serve()
        warehouse = stack.enter_context(_open_writable(settings))
        recorded = check_recorded(warehouse.catalog, stream, request.options, request.drop)
        # Before the stream is taken over, so that a source that fails changes nothing.
        opened = source(stream, warehouse)
        check_source_shapes(stream.name, recorded, opened.shapes)
        work = _Work(settings, stream, warehouse, opened, request, trigger, metrics, url, on_checkpoint)
        files = settings.openmetrics if "{stream}" in str(settings.openmetrics) else None
        for each, one in zip(autonomous, stream.autonomous, strict=True):
            own = settings.model_copy(update={**one.cadence, "metrics_port": None, "openmetrics": files})
            # Not as a run of Dagster, which reports only the stream's checkpoints.
            asked = replace(request, drop=(), who=None)
            beside = _prepare(own, each, asked, source, trigger, lambda _: None)
            stack.callback(beside.close)
            beside.stop = work.stop
            beside.metrics.progress.is_watched = metrics.progress.is_watched
            metrics.beside.append(beside.metrics)
            work.beside.append(beside)
        stack.pop_all()  # the threads of the runs close the warehouses and the metrics
        return work


@contextmanager
def stream_runner(settings: Settings, stream: Stream, spark: SparkSession) -> Iterator[StreamRunner]:
    """Take over a stream for the user's own query: give the runner to `foreachBatch`.

    The stream's source is not used. Call `runner.follow_log` with the streaming DataFrame before its query starts:
    after a recovery it runs the logged steps again. Leave the block when the query has ended. If the newest
    checkpoint's manifest is damaged, the stream is recovered first, unless the settings forbid it.

    The query is the caller's, so this run does not reset itself: if it fails, enter the block again. While the caller
    waits by `runner.await_query(query)`, an interval that no input ends is completed.

    Signals are not handled. To end by SIGTERM and Ctrl-C with a checkpoint, as `siltstone run` does, open a block `with
    stop_on_signals(spark) as stop` inside this one, and wait for the query with `runner.await_query(query, stop)`.

    Raises:
        UsageError: the session runs tasks on machines that cannot reach the stream's sinks or catalog, or the stream
            names its sources or has autonomous operators.
        SiltstoneError: see `ConsistentRegion.open`.
    """
    if is_named(stream):
        raise UsageError(
            f"stream {stream.name} names its sources, which a query of your own does not: run it by "
            "siltstone.write_stream({SOURCE: rows}, stream), or declare one source without a name (source=)"
        )
    if stream.autonomous:
        raise UsageError(
            f"stream {stream.name} has autonomous operators, which need a query of their own: run it by "
            "siltstone.write_stream(rows, stream), or take them out of its definition"
        )
    metrics = RunMetrics(settings, stream.name)
    with closing(metrics), _open_writable(settings) as warehouse, ExitStack() as stack:
        metrics.serve()
        check_cluster(spark, stream, warehouse)

        def take_over() -> StreamRunner:
            listener = RunListener(settings, warehouse, spark, metrics)
            return stack.enter_context(writer_epoch(settings, stream, warehouse, spark, RunRequest(), listener))

        try:
            runner = take_over()
        except DAMAGED as error:
            SelfRecovery(settings, warehouse, stream.name, spark).attempt(error)
            runner = take_over()
        yield runner
        if runner.failure is None:
            runner.finish()


def _open_writable(settings: Settings) -> OpenWarehouse:
    return OpenWarehouse.open_writable(settings.warehouse, settings.catalog, settings.catalog_timeout_s)
