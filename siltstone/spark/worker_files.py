"""Where a cluster's worker keeps the working state of its subtasks: in a directory of its own, never in the driver's.

A task finds it in the machine that it runs on. Spark tells each Python worker the local directories of its executor
(`SPARK_LOCAL_DIRS`), on disks that the cluster's administrator chose, and removes them with the executor. So an
executor that ends leaves nothing, and no other one, of an older run that wakes up for instance, can use them. Within an
application, which may run several epochs, `remove_older_epochs` removes what no run goes on from.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import xxhash

from siltstone.errors import StateError
from siltstone.run.task import StepTask
from siltstone.run.working_state import remove_older_epochs
from siltstone.store.identity import check_on_this_machine
from siltstone.store.open import Warehouse
from siltstone.store.paths import LocalLayout
from siltstone.store.private import make_private_directory

LOCAL_DIRS = "SPARK_LOCAL_DIRS"
"""environment variable with the local directories of an executor, separated by commas"""


def on_this_worker(task: StepTask, subtask: int) -> StepTask:
    """Return the task with the local directory of the machine that this runs on, rid of what earlier epochs left.

    Raises:
        UsageError: the machine does not have the warehouse.
        StateError: there is only a temporary directory, in which another user has taken the name.
    """
    check_on_this_machine(task.warehouse)
    task = replace(task, warehouse=worker_warehouse(task.warehouse, subtask))
    remove_older_epochs(task.warehouse.local, task.stream, task.oldest_epoch or task.epoch)
    return task


def worker_warehouse(warehouse: Warehouse, subtask: int) -> Warehouse:
    """Return the warehouse with a local directory of this machine; subtasks are spread over the disks that there are.

    Raises:
        StateError: see `on_this_worker`.
    """
    directories = [each for each in os.environ.get(LOCAL_DIRS, "").split(",") if each]
    base = Path(directories[subtask % len(directories)]) if directories else _own_temporary_directory()
    # Another warehouse, or a replay, may have a stream of the same name.
    distinct = f"{warehouse.identity} {warehouse.label} {warehouse.local.root}"
    root = base / f"siltstone-{xxhash.xxh3_64_hexdigest(distinct.encode())}"
    return replace(warehouse, local=LocalLayout(root))


def _own_temporary_directory() -> Path:
    """A directory below the temporary one, which others may write to."""
    path = Path(tempfile.gettempdir()) / f"siltstone-{os.getuid()}"
    make_private_directory(path)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise StateError(
            f"{path} is a link or belongs to another user",
            advice=f"remove it, or set {LOCAL_DIRS} or TMPDIR on this machine",
        )
    return path
