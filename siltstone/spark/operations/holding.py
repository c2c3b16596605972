"""Hold a writer epoch of a stream: its region, its runner, and who hears of what happens under it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.policies import policy_by_name
from siltstone.errors import Fenced, InputChanged, Unreachable, UsageError
from siltstone.log import bind_fields
from siltstone.retention.leases import this_process
from siltstone.retention.retention_rules import retention_in_force
from siltstone.run.consistency import ConsistencyRequests
from siltstone.run.progress import RunProgress
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.run.step_digests import INPUT_CHANGED
from siltstone.run.stream_clock import check_time_of_day, time_us
from siltstone.settings import Settings
from siltstone.sinks.resolve import check_sinks, resolve_sinks, tables_of
from siltstone.spark.background import SparkUnits
from siltstone.spark.operations.recovering import DAMAGED
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.placement import stays_in_place
from siltstone.spark.runner import StreamRunner
from siltstone.spark.session import cores
from siltstone.spark.sources import Input
from siltstone.state.backends.named import backend as state_backend
from siltstone.stream import Stream

RESET = "reset"
"""outcome of an epoch after which the same run goes on under a new one"""


@dataclass(frozen=True)
class RunRequest:
    """Options of one run.

    Attributes:
        batches: most micro-batches to process; None for all.
        follow: wait for more input until a signal ends the run.
        options: source options of the stream.
        who: the owner of the run that the catalog shows; None for this process.
        drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state to give up, and
            sources (`source.NAME`) that it no longer has.
        finish: once all input is processed, fire everything that waits for event time: no further row is expected.
    """

    batches: int | None = None
    follow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    who: str | None = None
    drop: Sequence[str] = ()
    finish: bool = False


class EpochListener:
    """Hears of what happens under a writer epoch. This one does nothing: the stream is only changed by a step.

    Attributes:
        tenure: the hold on the stream.
        requests: those for a checkpoint at once.
        progress: counts the steps, if it is not None.
    """

    def __init__(self, progress: RunProgress | None = None) -> None:
        self.tenure, self.requests, self.progress = Tenure(), ConsistencyRequests(), progress

    def note_checkpoint(self, checkpoint: Completed) -> None:
        """Hear of a checkpoint that is complete, and whose outputs are delivered."""

    def is_reset(self, error: Exception) -> bool:
        """Whether a run goes on under a new epoch after an error that ends this one."""
        return False

    def explain_errors(self, region: ConsistentRegion) -> AbstractContextManager[None]:
        """Raise in place of an error under the epoch what is behind it, in a context."""
        return nullcontext()

    def work_beside(self, runner: StreamRunner) -> AbstractContextManager[None]:
        """Do what is done beside the steps, in a context."""
        return nullcontext()


class RunListener(EpochListener):
    """Counts what one run does, and has a thread beside each epoch materialize chains and keep the storage bounded."""

    def __init__(self, settings: Settings, warehouse: OpenWarehouse, spark: SparkSession, metrics: RunMetrics) -> None:
        super().__init__(metrics.progress)
        self.settings, self.warehouse, self.spark, self.metrics = settings, warehouse, spark, metrics
        self._background: Background | None = None

    def note_checkpoint(self, checkpoint: Completed) -> None:
        """Count the checkpoint, and wake the thread."""
        if self._background is not None:
            self._background.note_checkpoint()
        self.metrics.add_checkpoint(self.warehouse.catalog, checkpoint)

    @contextmanager
    def explain_errors(self, region: ConsistentRegion) -> Iterator[None]:
        """What seems damaged may have been deleted: by a newer writer, which a recovery would fence, or because another
        process has materialized it again."""
        try:
            yield
        except DAMAGED as error:
            region.check_fence()
            if not region.chains.is_current():
                raise Unreachable(
                    f"what stream {region.stream.name} was to be restored from was replaced meanwhile, by a "
                    "materialization of another process: run it again"
                ) from error
            raise

    @contextmanager
    def work_beside(self, runner: StreamRunner) -> Iterator[None]:
        """Have the thread work; it does a last round if all steps have succeeded."""
        settings, region = self.settings, runner.region
        units = SparkUnits(self.spark, region.stream.name, self.warehouse.warehouse)
        options = BackgroundOptions(
            settings.materialization,
            settings.policy_options,
            settings.retention,
            region.options.parallelism,
            settings.upload,
        )
        background = self._background = Background(
            self.warehouse,
            region.stream.name,
            region.epoch,
            options,
            units,
            cancel=units.cancel,
            uploaded=partial(self.metrics.add_uploads, self.warehouse.catalog),
            postponed=region.chains.find_postponed,
            made=region.manifests.add,
            counted=self.metrics.progress.add_materialization,
        )
        try:
            self.metrics.begin_epoch(self.warehouse.catalog, region.completed)
            background.start()
            yield
            if runner.failure is None and not runner.stopped:
                background.finish()
        finally:
            background.stop()


@contextmanager
def writer_epoch(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    request: RunRequest,
    listener: EpochListener,
    source: Input | None = None,
) -> Iterator[StreamRunner]:
    """Take a stream over for one writer epoch, and record its outcome in the catalog. A run in progress is fenced.

    Args:
        source: what the query of the epoch will read, if it is known (`StreamRunner`).

    Raises:
        Fenced: another run has the stream since the newest epoch of the listener's tenure.
        SiltstoneError: see `ConsistentRegion.open`.
    """
    region = open_region(
        settings,
        stream,
        warehouse,
        request.options,
        cores(spark),
        who=request.who,
        drop=request.drop,
        tenure=listener.tenure,
        placed=stays_in_place(spark, warehouse.warehouse, stream.name, settings.placement),
    )
    outcome, runner = "failed", None
    with bind_fields(stream=stream.name, epoch=region.epoch):
        try:
            with listener.explain_errors(region):
                runner = _make_runner(spark, region, settings, request, listener, source)
                with listener.work_beside(runner):
                    yield runner
            if runner.failure is None:
                outcome = "stopped" if runner.stopped else "done"
        except Fenced:
            outcome = "fenced"
            raise
        except DAMAGED:  # no reset helps
            raise
        except Exception as error:
            outcome = RESET if listener.is_reset(error) else _failed(runner)
            raise
        except (KeyboardInterrupt, SystemExit):
            outcome = "interrupted"
            raise
        finally:
            if runner is not None:
                if runner.failure is not None:
                    runner.jobs.cancel()
                runner.close()
            with suppress(Unreachable):  # a catalog that is away must not hide the error that ended the run
                region.close(outcome)


def _make_runner(
    spark: SparkSession,
    region: ConsistentRegion,
    settings: Settings,
    request: RunRequest,
    listener: EpochListener,
    source: Input | None,
) -> StreamRunner:
    return StreamRunner(
        spark,
        region,
        max_steps=request.batches,
        finishes=request.finish,
        on_checkpoint=listener.note_checkpoint,
        placement=settings.placement,
        progress=listener.progress,
        requests=listener.requests,
        source=source,
    )


def _failed(runner: StreamRunner | None) -> str:
    """The outcome of an epoch that an error has ended."""
    return INPUT_CHANGED if runner is not None and isinstance(runner.failure, InputChanged) else "failed"


def open_region(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    options: Mapping[str, str],
    default_parallelism: int,
    *,
    who: str | None = None,
    drop: Sequence[str] = (),
    tenure: Tenure | None = None,
    placed: bool = True,
) -> ConsistentRegion:
    """Take over a stream with the options of the settings.

    The parallelism is that of the settings, else the one that a rescale recorded, else `default_parallelism`. `placed`
    is of `RegionOptions`.
    """
    state_backend(settings.backend)  # its package may be missing
    if not (settings.log_steps or placed):
        raise UsageError(
            "log_steps is false, and nothing keeps a subtask on the executor that has its state",
            advice="set placement to true, or leave log_steps out",
        )
    if stream.is_timed:
        check_time_of_day(stream.name, time_us(), warehouse.catalog.now())
    sinks = resolve_sinks(stream, warehouse)
    check_sinks(stream, sinks)
    record = next((each for each in warehouse.catalog.streams.list() if each.name == stream.name), None)
    recorded = None if record is None else record.parallelism
    region_options = RegionOptions(
        parallelism=settings.parallelism or recorded or min(default_parallelism, stream.max_parallelism),
        backend=settings.backend,
        checkpoint_steps=settings.checkpoint_steps,
        checkpoint_s=settings.checkpoint_s,
        checkpoint_idle_s=settings.checkpoint_idle_s,
        max_pending=settings.max_pending,
        postpones_bases=settings.max_pending > 0 and settings.materialization.enabled,
        log_steps=settings.log_steps,
        options=options,
        upload=settings.upload,
        drop=drop,
        keep_outputs=retention_in_force(None if record is None else record.retention, settings.retention).outputs,
        tables=tables_of(sinks),
        placed=placed,
    )
    policy = policy_by_name(settings.policy, settings.policy_options)
    return ConsistentRegion.open(
        stream, warehouse.warehouse, warehouse.catalog, policy, region_options, who or this_process(), tenure
    )
