"""Take over a stream between two runs, to change it by a step of its own (`StepKind.CHANGE`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, SiltstoneError, StateError, Unreachable, UsageError
from siltstone.run.definition import check_definition, check_run, definition_of, recorded_options
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.spark.cluster import check_cluster
from siltstone.spark.failures import explain
from siltstone.spark.operations.holding import EpochListener, RunRequest, writer_epoch
from siltstone.spark.runner import StreamRunner
from siltstone.stream import Stream


def check_changeable(catalog: Catalog, stream: Stream, parallelism: int) -> Mapping[str, str]:
    """Check that a stream has a checkpoint and can be taken over; return the source options it was started with.

    Raises:
        UnknownStream, UnknownCheckpoint: it has never run here, or has completed no checkpoint.
        SchemaConflict: its definition does not fit the recorded state.
        UsageError: the parallelism exceeds the number of key groups, or logged steps must be run again first.
    """
    record = catalog.streams.get(stream.name)
    options = recorded_options(stream, record.definition)
    check_run(stream, options, parallelism)
    check_definition(stream.name, record.definition, definition_of(stream, options))
    catalog.checkpoints.get_latest(stream.name)
    _check_log(catalog, stream.name)
    return options


def _check_log(catalog: Catalog, stream: str) -> None:
    """Check that no logged steps must be run again first, or sinks would get rows twice (`catalog.rollbacks`)."""
    logged = len(catalog.input_log.list_logged(stream))
    if logged:
        raise UsageError(
            f"stream {stream} was rolled back, and {logged} logged steps must be run again first: "
            f"run it (siltstone run {stream}), then repeat this"
        )


class _ChangeListener(EpochListener):
    @contextmanager
    def explain_errors(self, region: ConsistentRegion) -> Iterator[None]:
        """Whatever failed, a newer writer is the cause, if there is one: it may have deleted what the step reads."""
        try:
            yield
        except (SiltstoneError, PySparkException, Py4JError) as error:
            if not isinstance(error, Fenced):
                with suppress(Unreachable):
                    region.check_fence()
            if isinstance(error, SiltstoneError):
                raise
            message = f"stream {region.stream.name}: step {region.step} failed, nothing was changed: {explain(error)}"
            raise StateError(message, advice="do it again") from error


@contextmanager
def hold_epoch_for_change(
    settings: Settings, stream: Stream, warehouse: OpenWarehouse, spark: SparkSession, options: Mapping[str, str]
) -> Iterator[StreamRunner]:
    """Hold a writer epoch for such steps (`writer_epoch`), and say why one failed.

    Raises:
        SiltstoneError: see `ConsistentRegion.open`; or a step failed, of which nothing is visible.
    """
    if isinstance(spark, SparkSession):
        check_cluster(spark, stream, warehouse)
    with writer_epoch(settings, stream, warehouse, spark, RunRequest(options=options), _ChangeListener()) as runner:
        _check_log(warehouse.catalog, stream.name)
        yield runner
