"""On machines that share no disk a stream comes to what it comes to on one, and restores nothing while nothing dies."""

from siltstone.spark.worker_files import worker_warehouse
from siltstone.store.open import Warehouse
from tests.cluster.conftest import ClusterRun
from tests.fault.small_stream import purchases


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
    own = worker_warehouse(Warehouse.at(run.settings.warehouse), 0).local.root.name
    for worker in run.cluster.workers:
        (root,) = worker.see(private).rglob(own)
        assert root.is_relative_to(worker.see(private / "local"))
        assert [path.name for path in (root / "work" / stream).iterdir()] == ["00000002"]
        operators = [path.parent.name for path in root.glob(f"work/{stream}/00000002/state/*/*.lock")]
        assert sorted(operators) == sorted(each.name for each in run.stream.operators), "one subtask of each"
    assert not list(private.rglob(f"work/{stream}/*/state")), "the driver has none"


def test_steps_between_checkpoints_find_the_state_where_it_is(cluster_run: ClusterRun) -> None:
    """Seen without placement: "no longer on this machine". The last checkpoint is closed by a step without rows."""
    cluster_run.run(7, checkpoint_steps=3)
    cluster_run.check(steps=7)
    assert (cluster_run.moves(), cluster_run.restores) == (0, 0)
