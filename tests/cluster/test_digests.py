"""On machines that share no disk a stream comes to what it comes to on one."""

from tests.cluster.conftest import ClusterRun
from tests.fault.small_stream import purchases


def test_each_checkpoint_and_the_sink_are_as_on_one_machine(cluster_run: ClusterRun) -> None:
    """`places` reads what `accounts` returns. Some micro-batches are empty. A second run continues."""
    first, second, third, *_ = purchases()
    cluster_run.tables = [first, second, first.slice(0, 0), third, third.slice(0, 0)]
    cluster_run.run(3)
    cluster_run.run(2)
    cluster_run.check(steps=5)
