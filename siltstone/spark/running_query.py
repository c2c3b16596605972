"""Run a streaming DataFrame through a stream runner until its query ends."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from siltstone.errors import Fenced, SiltstoneError, StateError, Unreachable, UsageError
from siltstone.spark.failures import KEEP_INPUT, explain, is_input_gone
from siltstone.spark.runner import StreamRunner
from siltstone.spark.stopping import StopRequest

UNTIL_PROCESSED: Mapping[str, Any] = {"availableNow": True}
"""trigger of a query that processes the available input and ends"""
ON_AND_ON: Mapping[str, Any] = {"processingTime": "0 seconds"}
"""trigger of a query that runs until it is stopped; without an interval, which would delay a stream that is behind"""


def check_trigger(trigger: Mapping[str, Any]) -> None:
    """Make sure that a stream can have this trigger.

    Raises:
        UsageError: it is not one of micro-batches, or more than one.
    """
    interval = trigger.get("processingTime")
    ends = any(trigger.get(name) is True for name in ("availableNow", "once"))
    fits = ends or (isinstance(interval, str) and interval)
    if len(trigger) != 1 or not fits:
        raise UsageError(
            f"a stream cannot have the trigger {dict(trigger)}: its steps are micro-batches: give one of "
            '{"processingTime": "10 seconds"}, {"availableNow": True}, {"once": True}'
        )


def ends_by_itself(trigger: Mapping[str, Any]) -> bool:
    """Whether a query with this trigger ends once it has processed its input."""
    return bool(trigger.get("availableNow") or trigger.get("once"))


def run_stream(
    runner: StreamRunner,
    rows: DataFrame,
    trigger: Mapping[str, Any] = UNTIL_PROCESSED,
    stop: StopRequest | None = None,
    on_start: Callable[[StreamingQuery], None] = lambda _: None,
) -> None:
    """Run a streaming DataFrame through `runner` until its query ends.

    Args:
        rows: those of the stream's `Input`, or the user's own streaming DataFrame.
        trigger: arguments of Spark's `DataStreamWriter.trigger`.
        stop: once set, the run ends after the step in progress, with a checkpoint; `runner.stopped` holds the reason.
        on_start: called with the query once it has started.

    Raises:
        SiltstoneError: the stream stopped; the message says why.
    """
    stop = stop or StopRequest()
    writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
    writer = writer.trigger(**trigger)
    try:
        runner.follow_log(rows, stop.is_set)
        if stop.is_set():
            runner.stopped = stop.reason
        elif not runner.enough.is_set():
            while True:
                query = writer.start()
                on_start(query)
                runner.await_query(query, stop)
                if not runner.begins_again():
                    break
        if runner.failure is None:
            runner.finish()
    except BaseException as error:
        if error is not runner.failure and not isinstance(error, Exception):
            raise
        if runner.failure is None and not isinstance(error, SiltstoneError | PySparkException | Py4JError | OSError):
            raise
        _raise_reason(runner, error)
    if runner.failure is not None:
        _raise_reason(runner, runner.failure)


def _raise_reason(runner: StreamRunner, error: BaseException) -> NoReturn:
    reason = _reason(runner, error)
    raise reason from (None if reason is error else error)


def _reason(runner: StreamRunner, error: BaseException) -> BaseException:
    """The error that stopped the stream, as a SiltstoneError of one line."""
    cause = runner.failure or error
    if not isinstance(cause, Fenced):
        with suppress(Unreachable):
            # A newer writer takes over working state and deletes the rest; whatever failed, that is the cause.
            runner.region.check_fence()
    if isinstance(cause, SiltstoneError | KeyboardInterrupt):
        return cause
    region = runner.region
    step = max(region.step, region.completed_step + 1)
    advice = KEEP_INPUT if is_input_gone(cause) else ""
    return StateError(f"stream {region.stream.name} stopped in step {step}: {explain(cause)}", advice=advice)
