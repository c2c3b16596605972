"""Tag the Spark jobs of one run's steps, so that a reset can cancel what is left of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession

from siltstone.spark.session import use_session
from siltstone.store.open import Warehouse


class TaggedJobs:
    """The jobs of one epoch of a stream. In a session of Spark Connect, which runs no stream, it does nothing."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse, stream: str, epoch: int) -> None:
        # Other warehouses, whose runs share the Spark application, may have a stream of that name.
        self._spark, self._tag = spark, f"siltstone-{warehouse.identity}-{stream}-{epoch}"

    @contextmanager
    def tag(self) -> Iterator[None]:
        """Tag the jobs that this thread starts."""
        if not isinstance(self._spark, SparkSession):
            yield
            return
        self._spark.sparkContext.addJobTag(self._tag)
        try:
            yield
        finally:
            with suppress(Py4JError, OSError):  # the JVM has ended
                self._spark.sparkContext.removeJobTag(self._tag)

    def in_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap what another thread of the run does, in the run's session, with its jobs tagged."""

        def run() -> None:
            use_session(self._spark)
            with self.tag():
                work()

        return inheritable_thread_target(self._spark)(run) if isinstance(self._spark, SparkSession) else run

    def cancel(self) -> None:
        """Cancel those that run. Tasks that go on nevertheless change nothing that counts."""
        if isinstance(self._spark, SparkSession):
            with suppress(Py4JError, OSError):
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
