"""PySpark's daemon, which forks Python workers, out of the reach of SIGTERM (`spark.python.daemon.module`).

A supervisor that stops all processes of a run at once would end the workers in the middle of the step that is to end
in a checkpoint first. The signal stays blocked, here and in each worker. All of them end when the JVM closes the
daemon's standard input, which it does however it ends.

Events of the workers are shown as the command line shows its own that started the session, if one did.

What tasks import is imported here, before the first fork: a worker that imports it itself takes most of a second of
its core, and Spark starts new ones whenever none was needed for a minute.
"""

import gc
import os
import signal

import pyspark.worker
from pyspark.daemon import manager

import siltstone.spark.step
from siltstone.log import configure_worker

IMPORTED = (pyspark.worker, siltstone.spark.step)
"""modules that workers have from their start, with all that these import"""

if __name__ == "__main__":
    configure_worker(os.environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    gc.freeze()  # the workers' collections leave these pages shared
    manager()
