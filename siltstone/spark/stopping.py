"""Stops a run on request: SIGTERM and Ctrl-C end it behind the step in progress, with a checkpoint.

A supervisor may signal one process (Docker, Kubernetes: process 1 of the container) or all of them at once (a
terminal's Ctrl-C, systemd's control group). All of them have to live until the checkpoint is taken:

    this process        notes the request; a second one, a little later, ends it
    Spark's JVM         would shut down on SIGTERM: it forwards the signal to this process instead. It ends with its
                        driver, killed or not, when its standard input closes
    Python workers      `siltstone.spark.daemon` keeps SIGTERM from them; they end with their JVM

Under `spark-submit` the JVM is the process that is signalled, and this one learns of it by what the JVM forwards.
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
"""signals that come within this time are one request: of a group of processes, several pass it on"""


class StopRequest:
    """Whether a run was asked to stop, and by what: the name of a signal, or the text given to `ask`."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._at_s = 0.0

    def is_set(self) -> bool:
        """Whether it was asked to stop."""
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Ask the run to stop; the first reason counts."""
        if self.reason is None:
            self._at_s, self.reason = time.monotonic(), reason

    def receive(self, number: int) -> None:
        """Note a signal; the second one ends the process, as the signal does by default."""
        if self.reason is None:
            self.ask(signal.Signals(number).name)
        elif time.monotonic() - self._at_s > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_on_signals(spark: SparkSession, request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Note SIGTERM and Ctrl-C in `request` (a new one, if none is given) instead of ending by them, in this process and
    in Spark's JVM, until the block ends.

    The handlers that were there are put back. In another thread than the main one nothing is noted: Python hands
    signals to the main thread only.
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
            # None: installed by something other than Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Forward:
    """A `sun.misc.SignalHandler` of the JVM that passes a signal on to this process."""

    def handle(self, _: object) -> None:
        """Called by the JVM, in a thread of its own."""
        os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        """What Py4J shows the JVM."""

        implements = ("sun.misc.SignalHandler",)


@contextmanager
def _jvm_forwards(spark: SparkSession) -> Iterator[None]:
    """Let the JVM pass SIGTERM on, rather than shut down by it, until the block ends."""
    context = spark.sparkContext
    ensure_callback_server_started(context._gateway)
    jvm: Any = context._jvm
    signals = jvm.sun.misc.Signal
    term = signals("TERM")
    before = signals.handle(term, _Forward())
    try:
        yield
    finally:
        with suppress(Py4JError, OSError):  # then the JVM is gone
            signals.handle(term, before)
