"""The Spark jobs of a thread: their session, and tags by which a reset cancels what is left of a run's."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from siltstone.spark.versions import inherit_properties
from siltstone.store.open import Warehouse


def use_session(spark: SparkSession) -> None:
    """Make a session the active one of this thread's thread in the JVM: a sink may use that."""
    session: Any = spark._jsparkSession
    session.setActiveSession(session)


@contextmanager
def tag_jobs(spark: SparkSession, tags: Iterable[str]) -> Iterator[None]:
    """Tag the jobs that this thread starts in this block."""
    if isinstance(spark, SparkSession):
        add, remove = spark.sparkContext.addJobTag, spark.sparkContext.removeJobTag
    else:
        connected: Any = spark
        add, remove = connected.addTag, connected.removeTag
    for tag in tags:
        add(tag)
    try:
        yield
    finally:
        with suppress(Py4JError, OSError):  # the JVM has ended
            for tag in tags:
                remove(tag)


class TaggedJobs:
    """The jobs of one epoch of a stream. In a session of Spark Connect, which runs no stream, it does nothing."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse, stream: str, epoch: int) -> None:
        # Other warehouses, whose runs share the Spark application, may have a stream of that name.
        self._spark, self._tag = spark, f"siltstone-{warehouse.identity}-{stream}-{epoch}"

    def tag(self) -> AbstractContextManager[None]:
        """Tag the jobs that this thread starts, as `tag_jobs`."""
        return tag_jobs(self._spark, [self._tag]) if isinstance(self._spark, SparkSession) else nullcontext()

    def in_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap what another thread of the run does, in the run's session, with its jobs tagged."""

        def run() -> None:
            use_session(self._spark)
            with self.tag():
                work()

        return inherit_properties(self._spark, run) if isinstance(self._spark, SparkSession) else run

    def cancel(self) -> None:
        """Cancel those that run. Tasks that go on nevertheless change nothing that counts."""
        if isinstance(self._spark, SparkSession):
            with suppress(Py4JError, OSError):
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
