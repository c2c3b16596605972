"""A run of a stream at work, as its caller has it: a query, and the thread that follows it."""

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pyspark import inheritable_thread_target

from siltstone.change.recover import Recovery
from siltstone.result import Result
from siltstone.run.region import Completed
from siltstone.spark.stopping import StopRequest, stop_on_signals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


@dataclass(frozen=True)
class RunResult(Result):
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


class StreamRun:
    """A run of a stream at work: it owns the query, and a thread that follows it, recovers the stream where it is found
    damaged, and takes the last checkpoint.

    As a context manager it stops the run when the block ends.

    Attributes:
        stream: its name.
        last_checkpoint: the newest checkpoint that this run has completed; None before the first.
        result: what the run did, once it has ended well; else None.
        exception: why the run has failed; None while it has not.
    """

    def __init__(
        self, stream: str, spark: "SparkSession", stop: StopRequest, work: "Callable[[StreamRun], RunResult]"
    ) -> None:
        self.stream: str = stream
        self.last_checkpoint: Completed | None = None
        self.result: RunResult | None = None
        self.exception: BaseException | None = None
        self._spark, self._stop = spark, stop
        # The caller's thread-local properties of Spark and its context variables go on in the thread.
        self._work = inheritable_thread_target(spark)(partial(copy_context().run, work))
        self._query: StreamingQuery | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        # A daemon: a driver that ends without waiting ends its run as a crash does, and loses nothing.
        threading.Thread(target=self._follow, name=f"siltstone-run-{stream}", daemon=True).start()

    @property
    def is_active(self) -> bool:
        """Whether the run has not ended."""
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        """What Spark reports of its query: `message`, `isDataAvailable` and others; else only a `message`."""
        query = self._query
        if not self.is_active or query is None:
            return {"message": "starting" if self.is_active else "failed" if self.exception else "ended"}
        return dict(query.status)

    def await_start(self) -> None:
        """Wait until the query has begun. After a rollback that is only once the logged steps have run again.

        Raises:
            SiltstoneError: the run has failed.
        """
        self._begun.wait()
        self._raise()

    def await_termination(self, timeout_s: float | None = None, *, on_signals: bool = False) -> bool:
        """Wait until the run has ended; whether it has.

        Args:
            timeout_s: how long to wait; None without limit.
            on_signals: let SIGTERM and Ctrl-C end the run after the step in progress, with a checkpoint, until this
                returns; only in the main thread. Otherwise signals are left to the process.

        Raises:
            SiltstoneError: the run has failed: of its step nothing is visible, and a new run resumes at the last
                checkpoint.
        """
        with stop_on_signals(self._spark, self._stop) if on_signals else nullcontext():
            ended = self._ended.wait(timeout_s)
        if ended:
            self._raise()
        return ended

    def stop(self, *, wait: bool = True) -> None:
        """End the run after the step in progress, with a checkpoint.

        Args:
            wait: wait until it has ended. In `on_checkpoint` and in sinks, for which the run waits, pass False.

        Raises:
            SiltstoneError: the run has failed.
        """
        self._stop.ask("stop")
        if wait:
            self.await_termination()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.ask("stop")
        self._ended.wait()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._ended.is_set() and self.exception is not None:
            raise self.exception

    def begun(self, query: "StreamingQuery | None") -> None:
        """Called by the run's thread: its query has begun; None, that it is over and another one will begin."""
        self._query = query
        if query is not None:
            self._begun.set()

    def _follow(self) -> None:
        try:
            jvm: Any = self._spark._jvm
            # A sink may ask for it.
            jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(self._spark._jsparkSession)
            self.result = self._work(self)
        except BaseException as error:
            self.exception = error
        finally:
            self._ended.set()
            self._begun.set()
