"""Executors that come and go by dynamic allocation cost time, and nothing else."""

import time

import pytest

from siltstone.spark.operations import RunResult
from tests.cluster.cluster import wait_until
from tests.cluster.conftest import HOSTS, ClusterRun
from tests.cluster.executors import executor_hosts

IDLE_S = 3
"""after how long without a task Spark takes an executor away"""
DYNAMIC = {
    "spark.decommission.enabled": "false",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": f"{IDLE_S}s",
    # Else Spark keeps an executor with shuffled rows until Java happens to collect garbage.
    "spark.dynamicAllocation.shuffleTracking.timeout": f"{IDLE_S}s",
}
pytestmark = pytest.mark.parametrize("cluster_spark", [pytest.param(DYNAMIC, id="dynamic")], indirect=True)


def test_executors_whose_subtasks_are_not_placed_are_taken_away_between_two_steps(cluster_run: ClusterRun) -> None:
    """The run begins without executors. Their state goes with them: the next step, on new ones, restores the
    checkpoint, and the log has the rest.

    It comes first: where subtasks are placed, executors stay after the run, too.
    """
    _await_executors(cluster_run, 0)

    def pause(checkpoint: int) -> None:
        if checkpoint == 1:
            _await_executors(cluster_run, 0)

    cluster_run.sink.then = pause
    with cluster_run.held_run(4, 0, placement=False, checkpoint_steps=2) as running:
        assert executor_hosts(cluster_run.spark) == [*HOSTS], "one for each subtask, as the first step needs them"
    _check_undisturbed(cluster_run, running.result, steps=4)
    restored = set(cluster_run.find("restore"))
    assert restored == {(operator.name, n) for operator in cluster_run.stream.operators for n in range(2)}


def test_executors_that_have_subtasks_stay_and_others_are_taken_away(cluster_run: ClusterRun) -> None:
    """A first run keeps two executors through a pause. In a second one, a single subtask needs a single executor."""
    seen = dict[int, int]()

    def pause(checkpoint: int) -> None:
        if checkpoint == 2:
            time.sleep(IDLE_S + 1)
        elif checkpoint == 4:
            _await_executors(cluster_run, 1)
        seen[checkpoint] = len(executor_hosts(cluster_run.spark))

    cluster_run.sink.then = pause
    with cluster_run.held_run(3, 0) as running:  # two subtasks at once, so there are two executors
        pass
    _check_undisturbed(cluster_run, running.result, steps=3)
    assert cluster_run.restores <= 3, "of one subtask, if it began elsewhere than where it was placed"
    with cluster_run.watched_run(2, parallelism=1) as running:
        pass
    _check_undisturbed(cluster_run, running.result, steps=5)
    assert seen == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1}


def _await_executors(run: ClusterRun, number: int) -> None:
    wait_until(lambda: len(executor_hosts(run.spark)) == number, f"a session of {number} executors")


def _check_undisturbed(run: ClusterRun, result: RunResult | None, steps: int) -> None:
    """The run was not reset, and has come to what an undisturbed one comes to."""
    assert result is not None and result.resets == 0 and {*run.outcomes()} == {"done"}
    run.check(steps)
