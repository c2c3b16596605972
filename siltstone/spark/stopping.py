"""Stop a run on request: SIGTERM and Ctrl-C end it after the step in progress, with a checkpoint.

A supervisor may signal one process (Docker, Kubernetes: process 1 of the container) or all of them at once (a
terminal's Ctrl-C, systemd's control group). All of them must live until the checkpoint is taken:

    this process        records the request; a second one, a little later, ends it
    Spark's JVM         would shut down on SIGTERM; it forwards the signal to this process instead. It ends with its
                        driver, however that ends, because its standard input closes
    Python workers      `siltstone.spark.daemon` blocks SIGTERM; they end with their JVM

Under `spark-submit` the JVM is the process that is signalled, and it forwards the signal to this one.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 2.0
"""signals within this time (seconds) are one request, because several processes of a group may forward it"""


class StopRequest:
    """A request to stop a run. `reason` is the name of a signal or the text given to `ask`; None without a request."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._at_s = 0.0

    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Ask the run to stop; only the first reason is kept."""
        if self.reason is None:
            self._at_s, self.reason = time.monotonic(), reason

    def receive(self, number: int) -> None:
        """Handle a signal: the first is a request, the second ends the process as the signal does by default."""
        if self.reason is None:
            self.ask(signal.Signals(number).name)
        elif time.monotonic() - self._at_s > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_on_signals(spark: SparkSession, request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Record SIGTERM and Ctrl-C in `request` until the block ends, instead of ending this process or Spark's JVM.

    The previous handlers are restored. Outside the main thread signals are not recorded, because Python delivers them
    only to the main thread.

    Args:
        request: None for a new one.
    """
    noted = request or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.signal(number, lambda number, _: noted.receive(number)) for number in SIGNALS}
    try:
        with _jvm_forwards(spark):
            yield noted
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Forward:
    """A `sun.misc.SignalHandler` of the JVM that passes a signal on to this process."""

    def handle(self, _: object) -> None:
        """Forward the signal; the JVM calls this in a thread of its own."""
        os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        """The Java interface that Py4J implements with this class."""

        implements = ("sun.misc.SignalHandler",)


@contextmanager
def _jvm_forwards(spark: SparkSession) -> Iterator[None]:
    """Let the JVM forward SIGTERM instead of shutting down, until the block ends."""
    context = spark.sparkContext
    ensure_callback_server_started(context._gateway)
    jvm: Any = context._jvm
    signals = jvm.sun.misc.Signal
    term = signals("TERM")
    before = signals.handle(term, _Forward())
    try:
        yield
    finally:
        with suppress(Py4JError, OSError):  # the JVM has ended
            signals.handle(term, before)
