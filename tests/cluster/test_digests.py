"""On machines that share no disk a stream comes to what it comes to on one. While nothing dies, no run is reset, and
no subtask restores its state on a machine that has had it."""

from collections import Counter

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions
from siltstone.spark.worker_files import worker_warehouse
from siltstone.store.paths import is_base
from tests.cluster.conftest import ClusterRun
from tests.fault.small_stream import purchases

LONG_CHAINS = PolicyOptions(size_ratio_max=None, space_amplification_max=None, restore_weight=0)
"""no base but the first, unless a delta exceeds it: with one between two visits, a subtask is restored"""


def test_each_checkpoint_and_the_sink_are_as_on_one_machine(cluster_run: ClusterRun) -> None:
    """`places` reads what `accounts` returns. Some micro-batches are empty. A second run continues."""
    first, second, third, *_ = purchases()
    cluster_run.tables = [first, second, first.slice(0, 0), third, third.slice(0, 0)]
    cluster_run.run(3)
    cluster_run.run(2)
    cluster_run.check(steps=5)
    assert (cluster_run.moves(), cluster_run.restores) == (0, 0)
    _check_working_files(cluster_run)


def _check_working_files(run: ClusterRun) -> None:
    """They are of the second epoch, in the local directory of each worker, and nowhere else."""
    private, stream = run.cluster.private, run.stream.name
    with OpenWarehouse.open_existing(run.settings.warehouse, run.settings.catalog) as place:
        own = worker_warehouse(place.warehouse, 0).local.root.name
    for worker in run.cluster.workers:
        (root,) = worker.see(private).rglob(own)
        assert root.is_relative_to(worker.see(private / "local"))
        assert [path.name for path in (root / "work" / stream).iterdir()] == ["00000002"]
        operators = [path.parent.name for path in root.glob(f"work/{stream}/00000002/state/*/*.lock")]
        assert sorted(operators) == sorted(each.name for each in run.stream.operators), "one subtask of each"
    assert not list(private.rglob(f"work/{stream}/*/state")), "the driver has none"


def test_steps_between_checkpoints_find_the_state_where_it_is(cluster_run: ClusterRun) -> None:
    """Seen without placement: "no longer on this machine"."""
    with cluster_run.watched_run(7, checkpoint_steps=3):
        pass
    cluster_run.check(steps=7)
    assert (cluster_run.moves(), cluster_run.restores, cluster_run.roll_forwards) == (0, 0, 0)
    names = ("restores", "roll_forwards", "resets", "steps")
    assert [cluster_run.metrics[f"siltstone_{name}_total"] for name in names] == [0, 0, 0, 7]


@pytest.mark.parametrize(("steps_per_checkpoint", "steps"), [(1, 8), (3, 9)])
def test_subtasks_that_are_not_placed_roll_forward_where_they_have_been(
    cluster_run: ClusterRun, steps_per_checkpoint: int, steps: int
) -> None:
    """Spark moves them at random. On its first visit to a worker a subtask has nothing there to roll forward, so it
    restores its state, unless the stream has just begun; after that never again."""
    _run_unplaced(cluster_run, steps, steps_per_checkpoint, LONG_CHAINS)
    restores, bases = cluster_run.find("restore"), Counter[tuple[str, int]]()
    for operator, received in cluster_run.received:
        bases.update((operator, a.subtask) for a in received if any(is_base(o.name) for o in a.objects))
    # Two workers, and each subtask was on one of them from the first step on. A delta that exceeds a base gives way to
    # one, over which state does not roll forward.
    assert {bases[operator, 0] for operator in ("daily", "places")} == {1}
    assert all(count <= bases[subtask] for subtask, count in restores.items())
    names = ("placement_moves", "restores", "roll_forwards")
    served = [cluster_run.metrics[f"siltstone_{name}_total"] for name in names]
    assert served == [0, restores.total(), cluster_run.roll_forwards]


def test_subtasks_that_are_not_placed_find_their_steps_although_each_checkpoint_is_a_base(
    cluster_run: ClusterRun,
) -> None:
    """Seen: they were not logged, the run was reset five times before its second checkpoint, and then it failed."""
    _run_unplaced(cluster_run, 6, 3, PolicyOptions(d_max=0))


def _run_unplaced(run: ClusterRun, batches: int, steps_per_checkpoint: int, policy: PolicyOptions) -> None:
    options = {"placement": False, "checkpoint_steps": steps_per_checkpoint, "policy_options": policy}
    with run.watched_run(batches, **options) as running:
        pass
    run.check(steps=batches)
    assert running.result is not None and running.result.resets == 0 and run.outcomes() == ["done"]
    assert run.roll_forwards, "or Spark has stopped moving them"
