"""Run PySpark's daemon, which forks Python workers (`spark.python.daemon.module`).

SIGTERM is blocked. A supervisor that signals all processes of a run would otherwise end the workers in the middle of
the step after which the run takes its last checkpoint. Daemon and workers end when the JVM closes the daemon's standard
input, which happens however the JVM ends.

What every worker needs is imported once, here, and shared by those that are forked: importing it takes longer than many
steps. PySpark's daemon does not, because a library may start threads when it is imported, and a forked process does not
have them. Of ours only Arrow's allocator would, to give memory back in the background; here it does so as it goes.

What a worker has received it confirms when it waits for more (`confirm_at_once`).

The workers log events in the level and format of the command that started the session, if there is one.
"""

import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import BinaryIO

ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"
"""environment variable with the options of Arrow's allocator"""
_READ_BYTES = 1 << 16


def prefer_unpacked(path: list[str]) -> list[str]:
    """Return a module search path without the zip files of a Spark that is installed as the package that it holds.

    Spark puts its zip files first. What is imported from them is compiled anew by each process.
    """
    zips = [each for each in path if each.endswith(".zip") and Path(each).parts[-4:-1] == ("pyspark", "python", "lib")]
    rest = [each for each in path if each not in zips]
    found = PathFinder.find_spec("pyspark", rest)
    if found is None or found.origin is None:
        return path
    package = Path(found.origin).parent.resolve()
    return rest if all(Path(each).parents[2].resolve() == package for each in zips) else path


def import_for_workers() -> None:
    """Import what a worker needs for a step, and exempt it from garbage collection, which PySpark does in each task."""
    os.environ.setdefault(ARROW_ALLOCATOR, "background_thread:false")
    import numpy as np

    for name in ("pandas", "pyspark.worker", "siltstone.spark.step"):  # Arrow imports pandas when it converts values
        import_module(name)
    os.register_at_fork(after_in_child=np.random.seed)  # else all workers would draw the same numbers
    gc.collect()
    gc.freeze()


class ConfirmedInput(io.RawIOBase):
    """What a worker reads from the JVM by TCP. Before it waits for more, it confirms what it has.

    The JVM sends a task in several small pieces, and holds one back until the one before is confirmed (Nagle's
    algorithm). Linux confirms up to 40 ms late: longer than most tasks of a micro-batch take.
    """

    def __init__(self, infile: io.BufferedReader, connection: socket.socket) -> None:
        self._infile, self._connection = infile, connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Linux forgets this option: it holds for what has come until now.
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        # Not readinto1: with bytes left of an earlier read, it may wait for more than there will be.
        found = self._infile.read1(min(len(buffer), _READ_BYTES))
        buffer[: len(found)] = found
        return len(found)


def confirm_at_once(main: Callable[[BinaryIO, BinaryIO], None]) -> Callable[[io.BufferedReader, BinaryIO], None]:
    """Return a worker's main function whose input is confirmed as it is read, where the system can."""

    def run(infile: io.BufferedReader, outfile: BinaryIO) -> None:
        with socket.socket(fileno=os.dup(infile.fileno())) as connection:
            connection.settimeout(None)  # with a default timeout, reads would return before anything has come
            if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_QUICKACK"):
                main(infile, outfile)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                main(io.BufferedReader(ConfirmedInput(infile, connection), _READ_BYTES), outfile)

    return run


if __name__ == "__main__":
    sys.path[:] = prefer_unpacked(sys.path)

    from pyspark import worker

    worker.main = confirm_at_once(worker.main)  # before PySpark's daemon imports it
    from pyspark.daemon import manager

    from siltstone.log import configure_worker

    configure_worker(os.environ)
    import_for_workers()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    manager()
