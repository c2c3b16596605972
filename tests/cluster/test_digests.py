"""On machines that share no disk a stream comes to what it comes to on one, and restores nothing while nothing dies."""

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


def test_steps_between_checkpoints_find_the_state_where_it_is(cluster_run: ClusterRun) -> None:
    """Seen without placement: "no longer on this machine". The last checkpoint is closed by a step without rows."""
    cluster_run.run(7, checkpoint_steps=3)
    cluster_run.check(steps=7)
    assert (cluster_run.moves(), cluster_run.restores) == (0, 0)
