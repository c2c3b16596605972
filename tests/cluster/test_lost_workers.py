"""A worker that dies, freezes or is added in the middle of a step costs time, and nothing else."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from siltstone.chains.policies import DEFAULT_POLICY, FILES_BACKEND, FILES_POLICY
from siltstone.spark.operations import verify
from siltstone.state.backends.named import BACKENDS
from tests.cluster.cluster import wait_until
from tests.cluster.conftest import ClusterRun
from tests.cluster.streams import hold, read_calls

HELD = 2
"""the input file at which tasks are held, until the worker is lost"""


@pytest.mark.smoke
def test_a_worker_is_killed_in_the_middle_of_a_step_and_a_new_one_takes_its_part(cluster_run: ClusterRun) -> None:
    """The survivor does the step. After the first checkpoint since the new worker came, it has a subtask of its own."""
    cluster, (lost, left) = cluster_run.cluster, cluster_run.cluster.workers
    shared, alone = cluster_run.shared, hold(cluster_run.shared, HELD + 1)
    alone.touch()
    with cluster_run.held_run(6, HELD):
        cluster.remove(lost)
        cluster_run.await_executors([left.host])
        hold(shared, HELD).unlink()
        wait_until(lambda: any(call["file"] == HELD + 1 for call in read_calls(shared)), "the next step")
        cluster.add_worker(lost.host)
        cluster_run.await_executors([left.host, lost.host])
        alone.unlink()
    cluster_run.check(steps=6)
    machines = [{call["machine"] for call in read_calls(shared) if call["file"] == n} for n in range(6)]
    assert [len(machines[n]) for n in (0, 1, 2, 4, 5)] == [2] * 5
    assert cluster_run.moves() == 2, "the lost subtask to the survivor, and one to the new worker"
    # A placement outlives a run: its first step may also make good what an earlier run's worker left.
    assert cluster_run.metrics["siltstone_placement_moves_total"] >= 2
    served = [cluster_run.metrics[f"siltstone_{name}_total"] for name in ("restores", "roll_forwards", "resets")]
    assert served == [6, 0, 0], "both moves of each of three operators restored a checkpoint"


def test_a_third_worker_is_added_and_takes_its_share(cluster_run: ClusterRun) -> None:
    cluster, before = cluster_run.cluster, [worker.host for worker in cluster_run.cluster.workers]
    with cluster_run.held_run(5, HELD, parallelism=3):
        third = cluster.add_worker("127.0.0.4")
        cluster_run.await_executors([*before, third.host])
    cluster.remove(third)
    cluster_run.check(steps=5)
    machines = [{call["machine"] for call in read_calls(cluster_run.shared) if call["file"] == n} for n in range(5)]
    assert [len(machines[n]) for n in (0, 1, 3, 4)] == [2, 2, 3, 3]


@pytest.mark.parametrize(("steps_per_checkpoint", "steps"), [(1, 4), (3, 6)])
def test_a_worker_is_frozen_past_the_heartbeat_and_woken_again(
    cluster_run: ClusterRun, steps_per_checkpoint: int, steps: int
) -> None:
    """What it was about to write when it froze, it writes when it wakes; nothing leads there. With three steps per
    checkpoint it freezes in the second of an interval."""
    frozen, left = cluster_run.cluster.workers
    with cluster_run.held_run(steps, steps - 2, checkpoint_steps=steps_per_checkpoint) as running:
        frozen.freeze()
        cluster_run.await_executors([left.host])
    frozen.wake()
    assert running.result is not None and running.result.resets == 0
    cluster_run.run(3, checkpoint_steps=steps_per_checkpoint)
    cluster_run.check(steps=steps + 3)
    proven = verify(cluster_run.settings, cluster_run.stream.name, every=True)
    assert proven.proven == [*range(1, (steps + 3) // steps_per_checkpoint + 1)] and not proven.failed


def modes() -> Iterator[Any]:
    """Each backend and form, with and without pending checkpoints in turn; in `make test-thorough` with both."""
    forms = [*product(BACKENDS, [DEFAULT_POLICY]), (FILES_BACKEND, FILES_POLICY)]
    for nth, (form, (turn, max_pending)) in enumerate(product(forms, enumerate((0, 2)))):
        marks = [] if nth // 2 % 2 == turn else [pytest.mark.thorough]
        yield pytest.param(*form, max_pending, marks=marks)


@pytest.mark.parametrize(("backend", "policy", "max_pending"), list(modes()))
def test_a_worker_is_killed_with_each_backend_and_mode_and_the_next_run_has_the_other_backend(
    cluster_run: ClusterRun, backend: str, policy: str, max_pending: int
) -> None:
    """Each checkpoint is that of an undisturbed run on the heap that waits for every checkpoint."""
    cluster, (lost, left) = cluster_run.cluster, cluster_run.cluster.workers
    with cluster_run.held_run(HELD + 1, HELD, backend=backend, policy=policy, max_pending=max_pending) as running:
        cluster.remove(lost)
        cluster_run.await_executors([left.host])
    assert running.result is not None and running.result.resets == 0
    cluster_run.check(steps=HELD + 1)
    [other] = set(BACKENDS) - {backend}
    cluster_run.run(2, backend=other, max_pending=max_pending)
    cluster_run.check(steps=HELD + 3)
    assert cluster_run.outcomes() == ["done", "done"]
