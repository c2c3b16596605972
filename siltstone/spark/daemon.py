"""Run PySpark's daemon, which forks Python workers, with SIGTERM blocked (`spark.python.daemon.module`).

A supervisor that signals all processes of a run would otherwise end the workers in the middle of the step after which
the run takes its last checkpoint. Daemon and workers end when the JVM closes the daemon's standard input, which happens
however the JVM ends.

The workers log events in the level and format of the command that started the session, if there is one.
"""

import os
import signal

from pyspark.daemon import manager

from siltstone.log import configure_worker

if __name__ == "__main__":
    configure_worker(os.environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    manager()
