"""A worker that is decommissioned ends the tasks that it has. Then its subtasks go on elsewhere."""

from siltstone.spark.operations import verify
from tests.cluster.cluster import wait_until
from tests.cluster.conftest import ClusterRun
from tests.cluster.executors import decommissioned_hosts

SECOND_OF_AN_INTERVAL = 4
"""the input file of the fifth step"""


def test_a_worker_that_is_decommissioned_in_an_interval_costs_no_step(cluster_run: ClusterRun) -> None:
    """Its tasks in the middle of a step end there. Then its state is gone: the survivor restores the checkpoint, and
    rolls forward."""
    leaving, _ = cluster_run.cluster.workers
    with cluster_run.held_run(7, SECOND_OF_AN_INTERVAL, checkpoint_steps=3) as running:
        leaving.decommission()
        wait_until(lambda: decommissioned_hosts(cluster_run.spark) == [leaving.host], "the decommissioning")
    cluster_run.cluster.remove(leaving)
    assert running.result is not None and running.result.resets == 0 and cluster_run.outcomes() == ["done"]
    cluster_run.check(steps=7)
    # One of each operator. While `accounts` waited for Python to start, the other worker may have taken `daily`, which
    # queues for the same core, and then it stays there (docs/adr/0059).
    restores = cluster_run.find("restore")
    assert {name for name, _ in restores} >= {"accounts", "places"} and restores.total() == len(restores) <= 3
    assert cluster_run.moves() == 1 and cluster_run.find("forward") == restores
    names = ("restores", "roll_forwards", "resets", "steps")
    assert [cluster_run.metrics[f"siltstone_{name}_total"] for name in names] == [len(restores), len(restores), 0, 7]
    proven = verify(cluster_run.settings, cluster_run.stream.name, every=True)
    assert proven.proven == [1, 2, 3] and not proven.failed
