"""Hold one writer epoch of a run: its region, its runner and its background thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.policies import policy_by_name
from siltstone.errors import Fenced, Unreachable
from siltstone.log import bind_fields
from siltstone.retention.leases import this_process
from siltstone.run.consistency import ConsistencyRequests
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.settings import Settings
from siltstone.sinks.resolve import check_tables, resolve_sinks, tables_of
from siltstone.spark.background import SparkUnits
from siltstone.spark.operations.recovering import DAMAGED
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.placement import stays_in_place
from siltstone.spark.runner import StreamRunner
from siltstone.spark.session import cores
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
        drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state to give up.
    """

    batches: int | None = None
    follow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    who: str | None = None
    drop: Sequence[str] = ()


@dataclass(frozen=True)
class Epoch:
    """What a run asks of one writer epoch.

    Attributes:
        on_checkpoint: called with each completed checkpoint.
        tenure: the run's hold on the stream; None for a run of one epoch.
        is_reset: whether the run goes on under a new epoch after an error.
        requests: those for a checkpoint at once; None if nobody may ask.
    """

    request: RunRequest = field(default_factory=RunRequest)
    on_checkpoint: Callable[[Completed], None] = lambda _: None
    tenure: Tenure | None = None
    is_reset: Callable[[Exception], bool] = lambda _: False
    requests: ConsistencyRequests | None = None


@contextmanager
def open_runner(
    settings: Settings,
    stream: Stream,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    metrics: RunMetrics,
    epoch: Epoch | None = None,
) -> Iterator[StreamRunner]:
    """Hold a writer epoch with its background thread, and record the outcome in the catalog.

    Raises:
        Fenced: another run has the stream since the newest epoch of the tenure.
        SiltstoneError: see `ConsistentRegion.open`.
    """
    epoch = epoch or Epoch()
    request = epoch.request
    region = open_region(
        settings,
        stream,
        warehouse,
        request.options,
        cores(spark),
        who=request.who,
        drop=request.drop,
        tenure=epoch.tenure,
        placed=stays_in_place(spark, warehouse.warehouse, stream.name, settings.placement),
    )
    with bind_fields(stream=stream.name, epoch=region.epoch):
        yield from _run_epoch(region, settings, warehouse, spark, metrics, epoch)


def _run_epoch(
    region: ConsistentRegion,
    settings: Settings,
    warehouse: OpenWarehouse,
    spark: SparkSession,
    metrics: RunMetrics,
    epoch: Epoch,
) -> Iterator[StreamRunner]:
    background = _background(settings, warehouse, spark, region, metrics)

    def note_checkpoint(checkpoint: Completed) -> None:
        background.completed()
        metrics.add_checkpoint(warehouse.catalog, checkpoint)
        epoch.on_checkpoint(checkpoint)

    outcome, runner = "failed", None
    try:
        runner = StreamRunner(
            spark,
            region,
            max_steps=epoch.request.batches,
            on_checkpoint=note_checkpoint,
            placement=settings.placement,
            progress=metrics.progress,
            requests=epoch.requests,
        )
        metrics.begin_epoch(warehouse.catalog, region.completed)
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
    except Exception as error:
        outcome = RESET if epoch.is_reset(error) else outcome
        raise
    except (KeyboardInterrupt, SystemExit):
        outcome = "interrupted"
        raise
    finally:
        background.stop()
        if runner is not None and runner.failure is not None:
            runner.jobs.cancel()
        if runner is not None:
            runner.close()
        # A catalog that is away must not hide the error that ended the run.
        with suppress(Unreachable):
            region.close(outcome)


def _background(
    settings: Settings, warehouse: OpenWarehouse, spark: SparkSession, region: ConsistentRegion, metrics: RunMetrics
) -> Background:
    stream, units = region.stream.name, SparkUnits(spark, region.stream.name)
    options = BackgroundOptions(
        settings.materialization,
        settings.policy_options,
        settings.retention,
        region.options.parallelism,
        settings.upload,
    )
    return Background(
        warehouse,
        stream,
        region.epoch,
        options,
        units,
        cancel=units.cancel,
        uploaded=partial(metrics.add_uploads, warehouse.catalog),
        postponed=region.chains.find_postponed,
        made=region.manifests.add,
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
    tenure: Tenure | None = None,
    placed: bool = True,
) -> ConsistentRegion:
    """Take over a stream with the options of the settings.

    The parallelism is that of the settings, else the one that a rescale recorded, else `default_parallelism`. `placed`
    is of `RegionOptions`.
    """
    state_backend(settings.backend)  # its package may be missing
    sinks = resolve_sinks(stream, warehouse)
    check_tables(stream, sinks)
    recorded = next((s.parallelism for s in warehouse.catalog.streams.list() if s.name == stream.name), None)
    region_options = RegionOptions(
        parallelism=settings.parallelism or recorded or min(default_parallelism, stream.max_parallelism),
        backend=settings.backend,
        checkpoint_steps=settings.checkpoint_steps,
        checkpoint_s=settings.checkpoint_s,
        checkpoint_idle_s=settings.checkpoint_idle_s,
        max_pending=settings.max_pending,
        postpones_bases=settings.max_pending > 0 and settings.materialization.enabled,
        options=options,
        upload=settings.upload,
        drop=drop,
        tables=tables_of(sinks),
        placed=placed,
    )
    policy = policy_by_name(settings.policy, settings.policy_options)
    return ConsistentRegion.open(
        stream, warehouse.warehouse, warehouse.catalog, policy, region_options, who or this_process(), tenure
    )
