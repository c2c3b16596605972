"""The operations on a stream that need Spark, one function each.

The method of `StreamClient` that calls a function describes it: arguments, results and errors.
"""

from siltstone.spark.operations.editing import EditResult, edit
from siltstone.spark.operations.holding import RunRequest, open_region
from siltstone.spark.operations.materializing import MaterializeResult, full_savepoint, materialize
from siltstone.spark.operations.proving import SnapshotComparison, VerifyResult, compare_snapshot, verify
from siltstone.spark.operations.recovering import recover
from siltstone.spark.operations.replaying import ReplayResult, replay
from siltstone.spark.operations.rescaling import RescaleResult, rescale
from siltstone.spark.operations.restoring import RestoreResult, restore
from siltstone.spark.operations.running import run, stream_runner, write_stream
from siltstone.spark.operations.series import SeriesResult, restore_series
from siltstone.spark.operations.snapshots import SnapshotResult, snapshot
from siltstone.spark.stopping import stop_on_signals
from siltstone.spark.stream_run import RunResult, StreamRun

__all__ = [
    "EditResult",
    "MaterializeResult",
    "ReplayResult",
    "RescaleResult",
    "RestoreResult",
    "RunRequest",
    "RunResult",
    "SeriesResult",
    "SnapshotComparison",
    "SnapshotResult",
    "StreamRun",
    "VerifyResult",
    "compare_snapshot",
    "edit",
    "full_savepoint",
    "materialize",
    "open_region",
    "recover",
    "replay",
    "rescale",
    "restore",
    "restore_series",
    "run",
    "snapshot",
    "stop_on_signals",
    "stream_runner",
    "verify",
    "write_stream",
]
