"""Run a stream over its source, or over the user's own query."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.policies import policy_by_name
from siltstone.errors import Fenced, Stopped, Unreachable, UsageError
from siltstone.log import bind_fields
from siltstone.retention.leases import this_process
from siltstone.run.definition import check_recorded, check_run
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.settings import Settings
from siltstone.spark.background import SparkUnits
from siltstone.spark.cluster import check_cluster
from siltstone.spark.operations.recovering import DAMAGED, SelfRecovery
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.runner import ON_AND_ON, UNTIL_PROCESSED, StreamRunner, run_stream
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.spark.sources import check_rows, open_source
from siltstone.spark.stopping import StopRequest, stop_on_signals
from siltstone.spark.stream_run import RunResult, StreamRun
from siltstone.stream import Stream


@dataclass(frozen=True)
class RunRequest:
    """Options of one run.

    Attributes:
        batches: most micro-batches to process; None for all.
        follow: wait for more input until a signal ends the run.
        options: source options of the stream.
        who: the owner of the run that the catalog shows; None for this process.
        drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state to give up.
    """

    batches: int | None = None
    follow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    who: str | None = None
    drop: Sequence[str] = ()


@dataclass
class _Work:
    """The work of a run's thread.

    Attributes:
        done: the checkpoints that the run has completed.
        completed: id of the stream's newest checkpoint, set when the run has succeeded.
    """

    settings: Settings
    stream: Stream
    warehouse: OpenWarehouse
    rows: DataFrame
    request: RunRequest
    trigger: Mapping[str, Any]
    metrics: RunMetrics
    on_checkpoint: Callable[[Completed], None]
    stop: StopRequest = field(default_factory=StopRequest)
    done: list[Completed] = field(default_factory=list)
    completed: int = 0

    def __call__(self, run: StreamRun) -> RunResult:
        """Run the stream. If it is damaged, and no checkpoint was completed, recover it and run it again, once."""
        try:
            return self._run(run)
        finally:
            self.warehouse.catalog.close()

    @needs_spark
    def _run(self, run: StreamRun) -> RunResult:
        start, recovered = time.perf_counter(), None
        try:
            runner = self._run_once(run)
        except DAMAGED as error:
            if self.done:
                raise
            run.set_query(None)
            recovery = SelfRecovery(self.settings, self.warehouse, run.stream, self.rows.sparkSession)
            recovery.attempt(error)
            runner, recovered = self._run_once(run), recovery.done
        self.completed = runner.region.completed
        return RunResult(
            stream=run.stream,
            checkpoints=[c.id for c in self.done],
            digest=runner.region.digest,
            rows=sum(c.rows_in for c in self.done),
            bytes=sum(c.bytes for c in self.done),
            seconds=round(time.perf_counter() - start, 3),
            uploads=self.metrics.uploads.summary(),
            dead_letters=self.metrics.dead_letters,
            recovered=recovered,
            stopped=runner.stopped,
        )

    def _run_once(self, run: StreamRun) -> StreamRunner:
        def note_checkpoint(checkpoint: Completed) -> None:
            self.done.append(checkpoint)
            run.last_checkpoint = checkpoint
            self.on_checkpoint(checkpoint)

        spark = self.rows.sparkSession
        with _open_runner(
            self.settings, self.stream, self.warehouse, spark, self.request, self.metrics, note_checkpoint
        ) as runner:
            run_stream(runner, self.rows, self.trigger, self.stop, run.set_query)
        return runner


@needs_spark
def run(
    settings: Settings,
    stream: Stream,
    request: RunRequest,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> RunResult:
    """Process the input that the stream's source has, starting after the newest completed checkpoint.

    If the stream turns out to be damaged before the run has completed a checkpoint, it is recovered and the run begins
    again, once, unless the settings forbid it. SIGTERM or Ctrl-C ends the run after the step in progress, with a
    checkpoint (`siltstone.spark.stopping`).

    Raises:
        Stopped: a signal ended the run before the end of its input; not with `follow`, which only a signal ends.
        SiltstoneError: see `ConsistentRegion.open`, `open_source` and `run_stream`.
    """
    start = time.perf_counter()

    def source(warehouse: OpenWarehouse) -> DataFrame:
        spark = spark_session(settings.master, settings.spark, steps=True)
        check_cluster(spark, stream, warehouse)
        return open_source(spark, stream, warehouse.warehouse, request.options)

    trigger = ON_AND_ON if request.follow else UNTIL_PROCESSED
    work = _prepare(settings, stream, request, source, trigger, on_checkpoint)
    with work.warehouse, stop_on_signals(work.rows.sparkSession, work.stop):
        begun = _begin(work)
        _wait(begun, begun.await_termination)
    result = begun.result
    assert result is not None, "it has not failed"
    if result.stopped and not request.follow:
        raise Stopped(stream.name, result.stopped, work.completed)
    return replace(result, seconds=round(time.perf_counter() - start, 3))


@needs_spark
def write_stream(
    settings: Settings,
    stream: Stream,
    rows: DataFrame,
    request: RunRequest,
    trigger: Mapping[str, Any] = ON_AND_ON,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> StreamRun:
    """Run a stream over the user's streaming DataFrame instead of its source; return once its query has begun.

    Args:
        trigger: arguments of Spark's `DataStreamWriter.trigger`.

    Raises:
        UsageError: the stream cannot read these rows, or the session runs tasks on machines that cannot reach its sinks
            or catalog.
        SiltstoneError: see `ConsistentRegion.open` and `run_stream`.
    """
    if not isinstance(rows.sparkSession, SparkSession):
        raise UsageError("a stream runs in the driver, which Spark Connect has elsewhere: use a classic Spark session")

    def check_given(warehouse: OpenWarehouse) -> DataFrame:
        check_cluster(rows.sparkSession, stream, warehouse)
        check_rows(stream, rows)
        return rows

    begun = _begin(_prepare(settings, stream, request, check_given, trigger, on_checkpoint))
    _wait(begun, begun.await_start)
    return begun


def _begin(work: _Work) -> StreamRun:
    try:
        return StreamRun(work.stream.name, work.rows.sparkSession, work.stop, work)
    except BaseException:
        work.warehouse.catalog.close()
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
    source: Callable[[OpenWarehouse], DataFrame],
    trigger: Mapping[str, Any],
    on_checkpoint: Callable[[Completed], None],
) -> _Work:
    """Prepare a run, with every check that is possible before the stream is taken over."""
    policy_by_name(settings.policy, settings.policy_options)
    check_run(stream, request.options, settings.parallelism or 1)
    metrics = RunMetrics(settings, stream.name)
    with ExitStack() as stack:
        warehouse = stack.enter_context(_writable(settings))
        check_recorded(warehouse.catalog, stream, request.options, request.drop)
        # Before the stream is taken over, so that a source that fails changes nothing.
        rows = source(warehouse)
        stack.pop_all()  # the thread of the run closes the warehouse
        return _Work(settings, stream, warehouse, rows, request, trigger, metrics, on_checkpoint)


@contextmanager
def stream_runner(settings: Settings, stream: Stream, spark: SparkSession) -> Iterator[StreamRunner]:
    """Take over a stream for the user's own query: give the runner to `foreachBatch`.

    The stream's source is not used. Call `runner.follow_log` with the streaming DataFrame before its query starts:
    after a recovery it runs the logged steps again. Leave the block when the query has ended. If the newest
    checkpoint's manifest is damaged, the stream is recovered first, unless the settings forbid it.

    Signals are not handled. To end by SIGTERM and Ctrl-C with a checkpoint, as `siltstone run` does, open a block `with
    stop_on_signals(spark) as stop` inside this one, and wait for the query with `runner.await_query(query, stop)`.

    Raises:
        UsageError: the session runs tasks on machines that cannot reach the stream's sinks or catalog.
        SiltstoneError: see `ConsistentRegion.open`.
    """
    metrics = RunMetrics(settings, stream.name)
    with _writable(settings) as warehouse, ExitStack() as stack:
        check_cluster(spark, stream, warehouse)
        try:
            runner = stack.enter_context(_open_runner(settings, stream, warehouse, spark, RunRequest(), metrics))
        except DAMAGED as error:
            SelfRecovery(settings, warehouse, stream.name, spark).attempt(error)
            runner = stack.enter_context(_open_runner(settings, stream, warehouse, spark, RunRequest(), metrics))
        yield runner
        if runner.failure is None:
            runner.finish()


def _writable(settings: Settings) -> OpenWarehouse:
    return OpenWarehouse.writable(settings.warehouse, settings.catalog, settings.catalog_timeout_s)


@contextmanager
def _open_runner(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> Iterator[StreamRunner]:
    """Hold a writer epoch with its background thread, and record the outcome in the catalog."""
    region = open_region(settings, stream, warehouse, request.options, cores(spark), who=request.who, drop=request.drop)
    with bind_fields(stream=stream.name, epoch=region.epoch):
        yield from _run_epoch(region, settings, warehouse, spark, request, metrics, on_checkpoint)


def _run_epoch(
    region: ConsistentRegion,
    settings: Settings,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None],
) -> Iterator[StreamRunner]:
    background = _background(settings, warehouse, spark, region, metrics)

    def note_checkpoint(checkpoint: Completed) -> None:
        background.completed(checkpoint.restores_from)
        metrics.add_checkpoint(warehouse.catalog, checkpoint)
        on_checkpoint(checkpoint)

    outcome = "failed"
    try:
        runner = StreamRunner(
            spark,
            region,
            max_steps=request.batches,
            on_checkpoint=note_checkpoint,
            placement=settings.placement,
        )
        background.start()
        yield runner
        if runner.failure is None:
            outcome = "stopped" if runner.stopped else "done"
        if outcome == "done":
            background.finish()
    except Fenced:
        outcome = "fenced"
        raise
    except DAMAGED:
        # A newer writer may have deleted objects that this run reads. A recovery would fence that writer.
        warehouse.catalog.runs.check_epoch(region.stream.name, region.epoch)
        raise
    except (KeyboardInterrupt, SystemExit):
        outcome = "interrupted"
        raise
    finally:
        background.stop()
        # A catalog that is away must not hide the error that ended the run.
        with suppress(Unreachable):
            region.close(outcome)


def _background(
    settings: Settings, warehouse: OpenWarehouse, spark: SparkSession, region: ConsistentRegion, metrics: RunMetrics
) -> Background:
    stream, units = region.stream.name, SparkUnits(spark, region.stream.name)
    options = BackgroundOptions(
        settings.materialization, settings.policy_options, settings.retention, region.options.parallelism
    )
    add_uploads = partial(metrics.add_uploads, warehouse.catalog)
    return Background(warehouse, stream, region.epoch, options, units, units.cancel, add_uploads)


def open_region(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    options: Mapping[str, str],
    default_parallelism: int,
    *,
    who: str | None = None,
    drop: Sequence[str] = (),
) -> ConsistentRegion:
    """Take over a stream with the options of the settings.

    The parallelism is that of the settings, else the one that a rescale recorded, else `default_parallelism`.
    """
    recorded = next((s.parallelism for s in warehouse.catalog.streams.list() if s.name == stream.name), None)
    region_options = RegionOptions(
        parallelism=settings.parallelism or recorded or min(default_parallelism, stream.max_parallelism),
        backend=settings.backend,
        checkpoint_steps=settings.checkpoint_steps,
        checkpoint_s=settings.checkpoint_s,
        options=options,
        upload=settings.upload,
        drop=drop,
    )
    policy = policy_by_name(settings.policy, settings.policy_options)
    return ConsistentRegion.open(
        stream, warehouse.warehouse, warehouse.catalog, policy, region_options, who or this_process()
    )
