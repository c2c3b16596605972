"""A worker that dies or freezes in the middle of a step costs time, and nothing else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from siltstone.spark.operations import verify
from tests.cluster.cluster import Worker, wait_until
from tests.cluster.conftest import ClusterRun
from tests.cluster.executors import executor_hosts
from tests.cluster.streams import hold, read_calls

HELD = 2
"""the input file at which tasks are held, until the worker is lost"""


def _run_and_lose(run: ClusterRun, batches: int, worker: Worker, lose: Callable[[Worker], None]) -> None:
    """Run; lose a worker once both subtasks of `accounts` are in the middle of a step, and let the other one go on."""

    def act() -> None:
        try:
            wait_until(lambda: sum(call["file"] == HELD for call in read_calls(run.shared)) == 2, "both subtasks")
            lose(worker)
            wait_until(lambda: worker.host not in executor_hosts(run.spark), "the loss of the executor")
        finally:
            hold(run.shared, HELD).unlink()

    hold(run.shared, HELD).touch()
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(act)
        run.run(batches)
        losing.result()


def test_a_worker_is_killed_in_the_middle_of_a_step(cluster_run: ClusterRun) -> None:
    worker = cluster_run.cluster.workers[0]
    _run_and_lose(cluster_run, 4, worker, cluster_run.cluster.remove)
    assert worker not in cluster_run.cluster.workers
    cluster_run.check(steps=4)


def test_a_worker_is_frozen_past_the_heartbeat_and_woken_again(cluster_run: ClusterRun) -> None:
    """What it was about to write when it froze, it writes when it wakes; nothing leads there."""
    worker = cluster_run.cluster.workers[1]
    _run_and_lose(cluster_run, 4, worker, Worker.freeze)
    worker.wake()
    cluster_run.run(2)
    cluster_run.check(steps=6)
    proven = verify(cluster_run.settings, cluster_run.stream.name, every=True)
    assert proven.proven == [1, 2, 3, 4, 5, 6] and not proven.failed
