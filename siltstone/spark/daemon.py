"""PySpark's daemon, which forks Python workers, out of the reach of SIGTERM (`spark.python.daemon.module`).

A supervisor that stops all processes of a run at once would end the workers in the middle of the step that is to end
in a checkpoint first. The signal stays blocked, here and in each worker. All of them end when the JVM closes the
daemon's standard input, which it does however it ends.

Events of the workers are shown as the command line shows its own that started the session, if one did.
"""

import os
import signal

from pyspark.daemon import manager

from siltstone.log import configure_worker

if __name__ == "__main__":
    configure_worker(os.environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    manager()
