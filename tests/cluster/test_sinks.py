"""The default sink on machines that share no disk."""

from dataclasses import replace

import pyarrow as pa

from siltstone.client import StreamClient
from siltstone.spark.operations import RunRequest, run
from tests.cluster.conftest import ClusterRun
from tests.fault.reference import small
from tests.fault.small_stream import PURCHASE


def test_the_table_of_the_default_sink_has_each_row_once(cluster_run: ClusterRun) -> None:
    """Seen: `ParquetSink` on a cluster held `_SUCCESS` and no rows. A second run continues in the same table."""
    stream = replace(cluster_run.stream, sinks={"accounts": None})
    for batches in (2, 1):
        run(cluster_run.settings, stream, RunRequest(batches))
    table = StreamClient(cluster_run.settings, stream).sink_table("accounts").to_pyarrow_table()
    wanted = pa.concat_tables([rows.sort_by("sequence") for rows in small().written[:3]])
    assert table.sort_by("sequence").cast(PURCHASE).equals(wanted)
