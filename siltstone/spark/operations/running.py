"""Runs a stream: what its source has, or a query of the user's own."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.policies import policy_by_name
from siltstone.errors import Fenced, Stopped, Unreachable, UsageError
from siltstone.log import bound
from siltstone.retention.leases import this_process
from siltstone.run.definition import check_recorded, check_run
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.settings import Settings
from siltstone.spark.background import SparkUnits
from siltstone.spark.cluster import check_cluster
from siltstone.spark.operations.recovering import DAMAGED, SelfRecovery
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.runner import ON_AND_ON, UNTIL_PROCESSED, StreamRunner, check_rows, open_source, run_stream
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.spark.stopping import StopRequest, stop_on_signals
from siltstone.spark.stream_run import RunResult, StreamRun
from siltstone.stream import Stream


@dataclass(frozen=True)
class RunRequest:
    """How much to run: `batches` micro-batches at most, or, with `follow`, on and on; `options` go to the source.

    `who` is what the catalog tells people of whose the run is: this process, for None. `drop` names operators and
    variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state is given up.
    """

    batches: int | None = None
    follow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    who: str | None = None
    drop: Sequence[str] = ()


@dataclass
class _Work:
    """What the thread of a run does.

    Attributes:
        completed: the stream's newest checkpoint, of this run or an earlier one, once the run has ended well.
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
        """Run; once more where the stream is found to be damaged before a checkpoint was completed, and recovered."""
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
            run.begun(None)
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
        def completed(checkpoint: Completed) -> None:
            self.done.append(checkpoint)
            run.last_checkpoint = checkpoint
            self.on_checkpoint(checkpoint)

        spark = self.rows.sparkSession
        with _running(
            self.settings, self.stream, self.warehouse, spark, self.request, self.metrics, completed
        ) as runner:
            run_stream(runner, self.rows, self.trigger, self.stop, run.begun)
        return runner


@needs_spark
def run(
    settings: Settings,
    stream: Stream,
    request: RunRequest,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> RunResult:
    """Process what the stream's source has, from the newest completed checkpoint on.

    Where that is found to be damaged before a checkpoint was completed, the stream is recovered, and the run goes on;
    once, and unless the settings say otherwise.

    SIGTERM or Ctrl-C ends it after the step in progress, with a checkpoint (`siltstone.spark.stopping`).

    Raises:
        Stopped: such a signal ended it before its input did; not with `follow`, which ends no other way.
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
    """Run a stream over a streaming DataFrame of the user's own, instead of its source, and return once that has begun.

    Args:
        trigger: arguments of Spark's `DataStreamWriter.trigger`.

    Raises:
        UsageError: the stream cannot read these rows, or the session runs tasks where its sinks or catalog are not.
        SiltstoneError: see `ConsistentRegion.open` and `run_stream`.
    """
    if not isinstance(rows.sparkSession, SparkSession):
        raise UsageError("a stream runs in the driver, and Spark Connect has it elsewhere: use a classic Spark session")

    def given(warehouse: OpenWarehouse) -> DataFrame:
        check_cluster(rows.sparkSession, stream, warehouse)
        check_rows(stream, rows)
        return rows

    begun = _begin(_prepare(settings, stream, request, given, trigger, on_checkpoint))
    _wait(begun, begun.await_start)
    return begun


def _begin(work: _Work) -> StreamRun:
    try:
        return StreamRun(work.stream.name, work.rows.sparkSession, work.stop, work)
    except BaseException:
        work.warehouse.catalog.close()
        raise


def _wait(run: StreamRun, until: Callable[[], object]) -> None:
    """Wait; a caller that is interrupted meanwhile, and so has nothing to stop the run by, ends it."""
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
    """Make every check that can be made before the stream is taken over."""
    policy_by_name(settings.policy, settings.policy_options)
    check_run(stream, request.options, settings.parallelism or 1)
    metrics = RunMetrics(settings, stream.name)
    with ExitStack() as stack:
        warehouse = stack.enter_context(_writable(settings))
        check_recorded(warehouse.catalog, stream, request.options, request.drop)
        # Before the stream is taken over: a source that cannot be had changes nothing.
        rows = source(warehouse)
        stack.pop_all()  # the thread of the run closes the warehouse
        return _Work(settings, stream, warehouse, rows, request, trigger, metrics, on_checkpoint)


@contextmanager
def stream_runner(settings: Settings, stream: Stream, spark: SparkSession) -> Iterator[StreamRunner]:
    """Take a stream over for a query of the user's own: give the runner to `foreachBatch`.

    The stream's source is not used. Call `runner.follow_log` with the streaming DataFrame before its query starts:
    after a recovery, what was taken back comes again first. Leave the block when the query has ended. Where the newest
    checkpoint's manifest is damaged, the stream is recovered first, unless the settings say otherwise.

    Signals are left to the process. To end by SIGTERM and Ctrl-C as `siltstone run` does, with a checkpoint, wait for
    the query with `runner.await_query(query, stop)`, `stop` being that of a block `with stop_on_signals(spark) as stop`
    inside this one.

    Raises:
        UsageError: the session's master runs tasks elsewhere, where the stream's sinks or catalog are not.
        SiltstoneError: see `ConsistentRegion.open`.
    """
    metrics = RunMetrics(settings, stream.name)
    with _writable(settings) as warehouse, ExitStack() as stack:
        check_cluster(spark, stream, warehouse)
        try:
            runner = stack.enter_context(_running(settings, stream, warehouse, spark, RunRequest(), metrics))
        except DAMAGED as error:
            SelfRecovery(settings, warehouse, stream.name, spark).attempt(error)
            runner = stack.enter_context(_running(settings, stream, warehouse, spark, RunRequest(), metrics))
        yield runner
        if runner.failure is None:
            runner.finish()


def _writable(settings: Settings) -> OpenWarehouse:
    return OpenWarehouse.writable(settings.warehouse, settings.catalog, settings.catalog_timeout_s)


@contextmanager
def _running(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> Iterator[StreamRunner]:
    """One writer epoch: taken at the start, and how it ended noted in the catalog; with its background."""
    region = open_region(settings, stream, warehouse, request.options, cores(spark), who=request.who, drop=request.drop)
    with bound(stream=stream.name, epoch=region.epoch):
        yield from _run_in(region, settings, warehouse, spark, request, metrics, on_checkpoint)


def _run_in(
    region: ConsistentRegion,
    settings: Settings,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None],
) -> Iterator[StreamRunner]:
    background = _background(settings, warehouse, spark, region, metrics)

    def completed(checkpoint: Completed) -> None:
        background.completed(checkpoint.restores_from)
        metrics.completed(warehouse.catalog, checkpoint)
        on_checkpoint(checkpoint)

    outcome = "failed"
    try:
        runner = StreamRunner(spark, region, max_steps=request.batches, on_checkpoint=completed)
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
        # A newer writer may have retired what this run reads. That is not damage: a recovery would fence the newer one.
        warehouse.catalog.runs.check_epoch(region.stream.name, region.epoch)
        raise
    except (KeyboardInterrupt, SystemExit):
        outcome = "interrupted"
        raise
    finally:
        background.stop()
        # How it ended is a note for people; what ended it must not be hidden by a catalog that is away.
        with suppress(Unreachable):
            region.close(outcome)


def _background(
    settings: Settings, warehouse: OpenWarehouse, spark: SparkSession, region: ConsistentRegion, metrics: RunMetrics
) -> Background:
    stream, units = region.stream.name, SparkUnits(spark, region.stream.name)
    options = BackgroundOptions(
        settings.materialization, settings.policy_options, settings.retention, region.options.parallelism
    )
    return Background(
        warehouse, stream, region.epoch, options, units, units.cancel, lambda u: metrics.uploaded(warehouse.catalog, u)
    )


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
    """Take a stream over, as the settings say.

    The parallelism is the settings', else what a `rescale` recorded, else `default_parallelism`.
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
