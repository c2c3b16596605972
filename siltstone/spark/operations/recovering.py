"""Recover a damaged stream: on demand, or automatically in a run."""

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
"""errors of a run that going back to an older checkpoint may solve"""


@needs_spark
def recover(
    settings: Settings,
    stream: str,
    *,
    dry_run: bool = False,
    accept_loss: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> Recovery:
    """Prove checkpoints in Spark tasks for `change.recover` (`StreamClient.recover`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        recovery.check_recoverable(warehouse.catalog, stream)
        spark = spark_session(settings.master, settings.spark)
        proofs = partial(spark_map, spark, on=warehouse.warehouse)
        return recovery.recover(warehouse, stream, run=proofs, dry_run=dry_run, accept_loss=accept_loss, tell=on_step)


class SelfRecovery:
    """Lets a run recover its stream automatically, once.

    Attributes:
        done: what the recovery did; None if there was none.
    """

    def __init__(self, settings: Settings, warehouse: OpenWarehouse, stream: str, spark: SparkSession) -> None:
        self.done: Recovery | None = None
        self._allowed = settings.recovery.automatic
        self._warehouse, self._stream, self._spark = warehouse, stream, spark

    def attempt(self, error: StateError) -> None:
        """Recover after the run has failed with `error` before it completed a checkpoint; then the run may begin again.

        Raises:
            StateError: `error` itself, if the run has recovered before or the settings forbid it.
            LossRefused: it would give up more than is allowed without consent; nothing was given up.
            Fenced, Unreachable: nothing was given up.
        """
        if self.done is not None or not self._allowed:
            raise error
        _LOG.warning("stream is damaged: recovering it", stream=self._stream, error=str(error))
        proofs = partial(spark_map, self._spark, on=self._warehouse.warehouse)
        self.done = recovery.recover(self._warehouse, self._stream, run=proofs)
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
