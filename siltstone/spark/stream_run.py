"""The handle of a stream's run: it owns the query and the thread that runs the stream."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from siltstone.change.recover import Recovery
from siltstone.result import Result
from siltstone.run.consistency import ConsistencyRequests, DrainResult
from siltstone.run.region import Completed
from siltstone.spark.jobs import use_session
from siltstone.spark.queries import read_progress
from siltstone.spark.stopping import StopRequest, stop_on_signals
from siltstone.spark.versions import inherit_properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


@dataclass(frozen=True)
class RunResult(Result):
    """The outcome of one run.

    Attributes:
        checkpoints: ids of the checkpoints it completed.
        digest: digest of the newest checkpoint, hex.
        uploads: see `UploadStatistics.summary`.
        dead_letters: operator -> number of rows it could not process, or that were late and sent there.
        late: operator -> number of its late rows.
        recovered: the recovery before the run could continue; None if nothing was damaged.
        resets: how often the run went back to its newest checkpoint by itself, after a failure that passed.
        stopped: the signal that ended a run with `follow`; None if it ended by itself.
        waited_s: seconds that its steps waited for checkpoints, before the last one.
        autonomous: the outcomes of the autonomous operators' runs.
    """

    stream: str
    checkpoints: list[int]
    digest: str | None
    rows: int
    bytes: int
    seconds: float
    uploads: Mapping[str, float]
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)
    recovered: Recovery | None = None
    resets: int = 0
    stopped: str | None = None
    waited_s: float = 0.0
    autonomous: "Sequence[RunResult]" = ()


class StreamRun:
    """A run of a stream. It owns the query, and a thread that recovers a damaged stream and takes the last checkpoint.

    As a context manager it stops the run at the end of the block.

    Attributes:
        stream: name of the stream.
        metrics_url: where Prometheus finds the run's metrics; None unless the option `metrics_port` is given.
        last_checkpoint: the newest checkpoint that this run has completed; None before the first.
        result: the outcome, once the run has succeeded; else None.
        exception: the error, once the run has failed; else None.
        requests: for a checkpoint at once (`make_consistent`).
    """

    def __init__(
        self,
        stream: str,
        spark: "SparkSession",
        stop: StopRequest,
        work: "Callable[[StreamRun], RunResult]",
        metrics_url: str | None = None,
    ) -> None:
        self.stream: str = stream
        self.metrics_url: str | None = metrics_url
        self.last_checkpoint: Completed | None = None
        self.result: RunResult | None = None
        self.exception: BaseException | None = None
        self.requests: ConsistencyRequests = ConsistencyRequests()
        self._spark, self._stop = spark, stop
        # The thread inherits the caller's thread-local properties of Spark and its context variables.
        self._work = inherit_properties(spark, partial(copy_context().run, work))
        self._query: StreamingQuery | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        # A daemon thread: a driver that ends without waiting ends its run like a crash, which loses nothing.
        threading.Thread(target=self._follow, name=f"siltstone-run-{stream}", daemon=True).start()

    @property
    def is_active(self) -> bool:
        """Whether the run has not ended."""
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        """Spark's status of the query (`message`, `isDataAvailable` and others); without a query, only a `message`.

        `reported` has the numbers that each source reports, such as Kafka's `maxOffsetsBehindLatest`: source -> name ->
        number, where sources are numbered from 0.
        """
        query = self._query
        if not self.is_active or query is None:
            return {"message": "starting" if self.is_active else "failed" if self.exception else "ended"}
        reported = dict[str, dict[str, float]]()
        for (source, name), number in read_progress(query).items():
            if source:
                reported.setdefault(source, {})[name] = number
        return {**query.status, "reported": reported}

    def await_start(self) -> None:
        """Wait until the query has begun. After a rollback, the logged steps are run again before that.

        Raises:
            SiltstoneError: the run has failed.
        """
        self._begun.wait()
        self._raise()

    def await_termination(self, timeout_s: float | None = None, *, on_signals: bool = False) -> bool:
        """Wait until the run has ended; return whether it has.

        Args:
            timeout_s: most seconds to wait; None for no limit.
            on_signals: while waiting in the main thread, let SIGTERM and Ctrl-C end the run after the step in progress,
                with a checkpoint. Otherwise signals are not handled.

        Raises:
            SiltstoneError: the run has failed. Nothing of its last step is visible, and a new run resumes at the last
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
            wait: wait until it has ended. Pass False in `on_checkpoint` and in sinks, because the run waits for them.

        Raises:
            SiltstoneError: the run has failed.
        """
        self._stop.ask("stop")
        if wait:
            self.await_termination()

    def make_consistent(self, timeout_s: float | None = None) -> bool:
        """Complete a checkpoint with all that the run has processed so far, and wait for it.

        Not to be called in `on_checkpoint` or in a sink: the checkpoint waits for these.

        Args:
            timeout_s: most seconds to wait; None for no limit.

        Returns:
            Whether it is complete and its outputs are delivered; False if the run has ended or was reset before that,
            or the time was not enough.
        """
        return self.requests.add().wait(until_complete=True, timeout_s=timeout_s) is DrainResult.COMPLETED

    def make_consistent_nonblocking(self, timeout_s: float | None = None) -> DrainResult:
        """Begin a checkpoint with all that the run has processed so far, and wait only until it is prepared.

        Args:
            timeout_s: most seconds to wait; None for no limit.

        Returns:
            CHECKPOINT_PENDING, or COMPLETED if it is complete already or nothing was new; FAILED if the run has ended
            or was reset, or the time was not enough.
        """
        return self.requests.add().wait(until_complete=False, timeout_s=timeout_s) or DrainResult.FAILED

    def __enter__(self) -> Self:
        return self

    def await_end(self) -> None:
        """Wait until the run has ended, whether or not it has failed."""
        self._ended.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.ask("stop")
        self.await_end()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._ended.is_set() and self.exception is not None:
            raise self.exception

    def set_query(self, query: "StreamingQuery | None") -> None:
        """Record, from the run's thread, that its query has begun; None: that it ended and another one will begin."""
        self._query = query
        if query is not None:
            self._begun.set()

    def _follow(self) -> None:
        try:
            use_session(self._spark)
            self.result = self._work(self)
        except BaseException as error:
            self.exception = error
        finally:
            self.requests.note_failed(ended=True)
            self._ended.set()
            self._begun.set()
