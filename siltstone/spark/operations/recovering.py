"""Makes a stream ready again after something of it was damaged: on demand, or as a run finds out."""

from collections.abc import Callable
from functools import partial

from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change import recover as recovery
from siltstone.change.recover import Recovery
from siltstone.errors import CorruptObject, ProofFailed, StateError
from siltstone.log import get_logger
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import needs_spark, spark_session

_LOG = get_logger(__name__)
DAMAGED = (CorruptObject, ProofFailed)
"""what a run may fail with that going back to another checkpoint helps against"""


@needs_spark
def recover(
    settings: Settings,
    stream: str,
    *,
    dry_run: bool = False,
    accept_loss: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> Recovery:
    """Leave a stream ready to run on from its newest checkpoint that restores; see `change.recover`.

    Args:
        dry_run: only look; nothing changes.
        accept_loss: give up whatever has to be; only for people who said so.
        on_step: told what is done and found, line by line.

    Raises:
        UnknownStream, UnknownCheckpoint: no such stream has run here, or it has no checkpoint yet.
        LossRefused: more would be given up than may be without `accept_loss`; nothing was.
        Fenced: a run has taken the stream over meanwhile; nothing was given up.
        Unreachable: the store or the catalog failed; nothing was given up.
    """
    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as warehouse:
        recovery.check_recoverable(warehouse.catalog, stream)
        spark = spark_session(settings.master, settings.spark)
        proofs = partial(spark_map, spark)
        return recovery.recover(warehouse, stream, run=proofs, dry_run=dry_run, accept_loss=accept_loss, tell=on_step)


class SelfRecovery:
    """Lets one run recover its stream by itself, once.

    Attributes:
        done: what it did; None as long as it was not needed.
    """

    def __init__(self, settings: Settings, warehouse: OpenWarehouse, stream: str, spark: SparkSession) -> None:
        self.done: Recovery | None = None
        self._allowed = settings.recovery.automatic
        self._warehouse, self._stream, self._spark = warehouse, stream, spark

    def attempt(self, error: StateError) -> None:
        """Recover, since the run has failed with `error` before it completed a checkpoint; it may begin again then.

        Raises:
            StateError: `error` itself: it has recovered before, or is not allowed to.
            LossRefused: more would be given up than may be without being asked; nothing was.
            Fenced, Unreachable: as `recover`.
        """
        if self.done is not None or not self._allowed:
            raise error
        _LOG.warning("stream is damaged and recovers by itself", stream=self._stream, error=str(error))
        self.done = recovery.recover(self._warehouse, self._stream, run=partial(spark_map, self._spark))
        done = self.done
        _LOG.warning(
            "stream has recovered",
            stream=self._stream,
            checkpoint=done.checkpoint,
            given_up=len(done.given_up),
            swept_objects=done.swept_objects,
            swept_bytes=done.swept_bytes,
            summary=done.summary,
        )
