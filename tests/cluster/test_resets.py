"""A worker that dies between two steps of an interval takes their state with it, but not their log."""

from siltstone.chains.policies import PolicyOptions
from tests.cluster.conftest import ClusterRun

SECOND_OF_AN_INTERVAL = 4
"""the input file of the fifth step"""


def _lose_a_worker(run: ClusterRun, batches: int, file: int, **options: object) -> int:
    """Run some micro-batches, kill a worker in the middle of one step, and return how often the run was reset."""
    lost, left = run.cluster.workers
    with run.held_run(batches, file, **options) as running:
        run.cluster.remove(lost)
        run.await_executors([left.host])
    assert running.result is not None
    return running.result.resets


def test_a_worker_that_dies_in_an_interval_costs_no_step(cluster_run: ClusterRun) -> None:
    """Before each step was logged, the run was reset. Now the survivor restores the checkpoint, and rolls forward."""
    assert _lose_a_worker(cluster_run, 7, SECOND_OF_AN_INTERVAL, checkpoint_steps=3) == 0
    cluster_run.check(steps=7)
    assert cluster_run.outcomes() == ["done"]
    assert (cluster_run.moves(), cluster_run.restores, cluster_run.roll_forwards) == (1, 3, 3), "of each operator one"
    names = ("restores", "roll_forwards", "resets", "steps")
    assert [cluster_run.metrics[f"siltstone_{name}_total"] for name in names] == [3, 3, 0, 7]


def test_a_worker_that_dies_in_an_interval_that_is_not_logged_resets_the_run(cluster_run: ClusterRun) -> None:
    """Where each checkpoint is a base (D = 0), the run goes back to its newest one, and the survivor does the steps
    again."""
    every_base = PolicyOptions(d_max=0)
    assert _lose_a_worker(cluster_run, 6, 3, checkpoint_steps=2, policy_options=every_base) == 1
    cluster_run.check(steps=6)
    assert cluster_run.outcomes() == ["reset", "done"]
    assert cluster_run.metrics["siltstone_resets_total"] == 1
