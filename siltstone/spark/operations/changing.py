"""What people change of a stream apart from its input: a step that takes none, between two runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, SiltstoneError, StateError, Unreachable, UsageError
from siltstone.log import bound
from siltstone.run.definition import check_definition, check_run, definition_of, recorded_options
from siltstone.settings import Settings
from siltstone.spark.cluster import check_cluster
from siltstone.spark.failures import explained
from siltstone.spark.operations.running import open_region
from siltstone.spark.runner import StreamRunner
from siltstone.spark.session import cores
from siltstone.stream import Stream


def check_changeable(catalog: Catalog, stream: Stream, parallelism: int) -> Mapping[str, str]:
    """The source options that the stream was started with, if it has a checkpoint and can be taken over.

    Raises:
        UnknownStream, UnknownCheckpoint: it has never run here, or completed nothing.
        SchemaConflict: its definition no longer fits the recorded state.
        UsageError: more parallelism than key groups, or logged steps are to be run again first.
    """
    record = catalog.streams.get(stream.name)
    options = recorded_options(stream, record.definition)
    check_run(stream, options, parallelism)
    check_definition(stream.name, record.definition, definition_of(stream, options))
    catalog.checkpoints.latest(stream.name)
    _check_log(catalog, stream.name)
    return options


def _check_log(catalog: Catalog, stream: str) -> None:
    """What comes next has to be what was logged, or sinks would get rows twice (`catalog.rollbacks`)."""
    logged = len(catalog.input_log.list_logged(stream))
    if logged:
        raise UsageError(
            f"stream {stream} was taken back, and {logged} logged steps are to be run again first: "
            f"run it (siltstone run {stream}), then do this"
        )


@contextmanager
def taken_over(
    settings: Settings, stream: Stream, warehouse: OpenWarehouse, spark: SparkSession, options: Mapping[str, str]
) -> Iterator[StreamRunner]:
    """One writer epoch without input: a run at work is fenced. How it ended is noted in the catalog.

    Raises:
        SiltstoneError: see `ConsistentRegion.open`; or a step failed, and nothing of it is visible.
    """
    if isinstance(spark, SparkSession):
        check_cluster(spark, stream, warehouse)
    region = open_region(settings, stream, warehouse, options, cores(spark))
    outcome = "failed"
    try:
        _check_log(warehouse.catalog, stream.name)
        with bound(stream=stream.name, epoch=region.epoch):
            yield StreamRunner(spark, region)
        outcome = "done"
    except Fenced:
        outcome = "fenced"
        raise
    except (KeyboardInterrupt, SystemExit):
        outcome = "interrupted"
        raise
    except (PySparkException, Py4JError) as error:
        with suppress(Unreachable):
            region.check_fence()  # then that is why
        said = explained(error, "do it again")
        raise StateError(f"stream {stream.name}: step {region.step} failed, nothing was changed: {said}") from error
    except SiltstoneError:
        raise
    finally:
        with suppress(Unreachable):
            region.close(outcome)
