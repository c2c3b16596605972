"""Run PySpark's daemon, which forks Python workers (`spark.python.daemon.module`).

SIGTERM is blocked. A supervisor that signals all processes of a run would otherwise end the workers in the middle of
the step after which the run takes its last checkpoint. Daemon and workers end when the JVM closes the daemon's standard
input, which happens however the JVM ends.

What every worker needs is imported once, here, and shared by those that are forked: importing it takes longer than many
steps. PySpark's daemon does not, because a library may start threads when it is imported, and a forked process does not
have them. Of ours only Arrow's allocator would, to give memory back in the background; here it does so as it goes.

The workers log events in the level and format of the command that started the session, if there is one.
"""

import gc
import os
import signal
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"
"""environment variable with the options of Arrow's allocator"""


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


if __name__ == "__main__":
    sys.path[:] = prefer_unpacked(sys.path)

    from pyspark.daemon import manager

    from siltstone.log import configure_worker

    configure_worker(os.environ)
    import_for_workers()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    manager()
