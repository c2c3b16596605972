"""Runs a stream: what its source has, or a query of the user's own."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.policies import policy_by_name
from siltstone.change.recover import Recovery
from siltstone.errors import Fenced, Stopped, Unreachable
from siltstone.log import bound
from siltstone.retention.leases import this_process
from siltstone.run.definition import check_recorded, check_run
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.settings import Settings
from siltstone.spark.background import SparkUnits
from siltstone.spark.cluster import check_cluster
from siltstone.spark.operations.recovering import DAMAGED, SelfRecovery
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.runner import StreamRunner, open_source, run_stream
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.spark.stopping import StopRequest, stop_on_signals
from siltstone.stream import Stream


@dataclass(frozen=True)
class RunResult:
    """What one run did. `digest` is that of the newest checkpoint, hex; `uploads` is `UploadStatistics.summary`;
    `dead_letters` counts by operator the rows that it could not take.

    `recovered` says what it gave up to be able to go on; None where nothing was damaged. `stopped` is the signal that
    ended a run with `follow`; None where its batches did.
    """

    stream: str
    checkpoints: list[int]
    digest: str | None
    rows: int
    bytes: int
    seconds: float
    uploads: Mapping[str, float]
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    recovered: Recovery | None = None
    stopped: str | None = None


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

    SIGTERM or Ctrl-C ends it behind the step in progress, with a checkpoint (`siltstone.spark.stopping`).

    Raises:
        Stopped: such a signal ended it before its input did; not with `follow`, which ends no other way.
        SiltstoneError: see `ConsistentRegion.open`, `open_source` and `run_stream`.
    """
    start = time.perf_counter()
    done: list[Completed] = []

    def completed(checkpoint: Completed) -> None:
        done.append(checkpoint)
        on_checkpoint(checkpoint)

    policy_by_name(settings.policy, settings.policy_options)
    check_run(stream, request.options, settings.parallelism or 1)
    metrics = RunMetrics(settings, stream.name)
    with _writable(settings) as place:
        check_recorded(place.catalog, stream, request.options, request.drop)
        spark = spark_session(settings.master, settings.spark, steps=True)
        check_cluster(spark, stream, place)
        # Before the stream is taken over: a source that cannot be had changes nothing.
        rows = open_source(spark, stream, place.warehouse, request.options)
        recovery = SelfRecovery(settings, place, stream.name, spark)

        def run_once(stop: StopRequest) -> StreamRunner:
            with _running(settings, stream, place, spark, request, metrics, completed) as runner:
                run_stream(runner, rows, follow=request.follow, stop=stop)
            return runner

        with stop_on_signals(spark) as stop:
            try:
                runner = run_once(stop)
            except DAMAGED as error:
                if done:
                    raise
                recovery.attempt(error)
                runner = run_once(stop)
    if runner.stopped and not request.follow:
        raise Stopped(stream.name, runner.stopped, runner.region.completed)
    return RunResult(
        stream=stream.name,
        checkpoints=[c.id for c in done],
        digest=runner.region.digest,
        rows=sum(c.rows_in for c in done),
        bytes=sum(c.bytes for c in done),
        seconds=round(time.perf_counter() - start, 3),
        uploads=metrics.uploads.summary(),
        dead_letters=metrics.dead_letters,
        recovered=recovery.done,
        stopped=runner.stopped,
    )


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
    with _writable(settings) as place, ExitStack() as stack:
        check_cluster(spark, stream, place)
        try:
            runner = stack.enter_context(_running(settings, stream, place, spark, RunRequest(), metrics))
        except DAMAGED as error:
            SelfRecovery(settings, place, stream.name, spark).attempt(error)
            runner = stack.enter_context(_running(settings, stream, place, spark, RunRequest(), metrics))
        yield runner
        if runner.failure is None:
            runner.finish()


def _writable(settings: Settings) -> OpenWarehouse:
    return OpenWarehouse.writable(settings.warehouse, settings.catalog, settings.catalog_timeout_s)


@contextmanager
def _running(
    settings: Settings,
    stream: Stream,
    place: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> Iterator[StreamRunner]:
    """One writer epoch: taken at the start, and how it ended noted in the catalog; with its background."""
    region = open_region(settings, stream, place, request.options, cores(spark), who=request.who, drop=request.drop)
    with bound(stream=stream.name, epoch=region.epoch):
        yield from _run_in(region, settings, place, spark, request, metrics, on_checkpoint)


def _run_in(
    region: ConsistentRegion,
    settings: Settings,
    place: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    metrics: RunMetrics,
    on_checkpoint: Callable[[Completed], None],
) -> Iterator[StreamRunner]:
    background = _background(settings, place, spark, region, metrics)

    def completed(checkpoint: Completed) -> None:
        background.completed(checkpoint.restores_from)
        metrics.completed(place.catalog, checkpoint)
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
        place.catalog.runs.check_epoch(region.stream.name, region.epoch)
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
    settings: Settings, place: OpenWarehouse, spark: SparkSession, region: ConsistentRegion, metrics: RunMetrics
) -> Background:
    stream, units = region.stream.name, SparkUnits(spark, region.stream.name)
    options = BackgroundOptions(
        settings.materialization, settings.policy_options, settings.retention, region.options.parallelism
    )
    return Background(
        place, stream, region.epoch, options, units, units.cancel, lambda u: metrics.uploaded(place.catalog, u)
    )


def open_region(
    settings: Settings,
    stream: Stream,
    place: OpenWarehouse,
    options: Mapping[str, str],
    default_parallelism: int,
    *,
    who: str | None = None,
    drop: Sequence[str] = (),
) -> ConsistentRegion:
    """Take a stream over, as the settings say.

    The parallelism is the settings', else what a `rescale` recorded, else `default_parallelism`.
    """
    recorded = next((s.parallelism for s in place.catalog.streams.list() if s.name == stream.name), None)
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
    return ConsistentRegion.open(stream, place.warehouse, place.catalog, policy, region_options, who or this_process())
