"""A worker that dies between two steps of an interval takes their state with it."""

from siltstone.catalog.warehouse import OpenWarehouse
from tests.cluster.conftest import ClusterRun

SECOND_OF_AN_INTERVAL = 3
"""the input file of the fourth step"""


def test_a_worker_that_dies_in_an_interval_resets_the_run(cluster_run: ClusterRun) -> None:
    """The run goes back to its newest checkpoint in the same process, and the survivor does the steps again."""
    cluster_run.settings = cluster_run.settings.model_copy(update={"checkpoint_steps": 2})
    lost, left = cluster_run.cluster.workers
    with cluster_run.held_run(6, SECOND_OF_AN_INTERVAL):
        cluster_run.cluster.remove(lost)
        cluster_run.await_executors([left.host])
    cluster_run.check(steps=6)
    with OpenWarehouse.existing(cluster_run.settings.warehouse, cluster_run.settings.catalog) as place:
        assert [record.outcome for record in place.catalog.runs.list(cluster_run.stream.name)] == ["reset", "done"]
