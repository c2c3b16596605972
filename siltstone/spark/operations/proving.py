"""Proves checkpoints, from their digests and row by row."""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from siltstone.catalog.reference_copies import ReferenceCopyRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.errors import StateError, UnknownCheckpoint, UsageError
from siltstone.restore.compare import TableComparison, compare, compare_tasks
from siltstone.restore.export import unit_tasks
from siltstone.restore.proof import prove_checkpoints
from siltstone.restore.restore import read_manifests
from siltstone.restore.verify import Failure, check_objects
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import cores, needs_spark, spark_session


@dataclass(frozen=True)
class Stalled:
    """An operator whose materialization is `failing` or `stalled`, and why."""

    operator: str
    state: str
    reason: str


@dataclass(frozen=True)
class VerifyResult(Result):
    """Which checkpoints are proven, and why the others are not; of which operators materialization does not keep up."""

    stream: str
    proven: list[int]
    failed: list[Failure]
    seconds: float
    stalled: list[Stalled] = field(default_factory=list)


@needs_spark
def verify(
    settings: Settings, stream: str, *, at: str = "latest", every: bool = False, deep: bool = False
) -> VerifyResult:
    """Prove one checkpoint, or with `every` all of them; the outcome is recorded in the catalog.

    Args:
        deep: also compare, row by row, with the full snapshot of each checkpoint that has one.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing answers to the name, id or time.
        UsageError: `deep` for a checkpoint that has no snapshot.
    """
    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        catalog, store = place.catalog, place.warehouse.store
        named = None if every else [catalog.checkpoints.resolve(stream, at)]
        # Leased before they are listed, and before Spark starts: others may be deleting.
        with hold_lease(catalog, stream, named, what="verifies"):
            some = (
                catalog.checkpoints.list(stream)
                if named is None
                else [catalog.checkpoints.get(stream, c) for c in named]
            )
            written_by = {c.id: c.epoch for c in some}
            wanted = list(written_by)
            snapshots = {s.checkpoint: s for s in catalog.reference_copies.list(stream)}
            if deep and not snapshots.keys() & set(wanted):
                raise UsageError(
                    f"no snapshot of {stream} to compare with: take one with `siltstone snapshot {stream}`"
                )
            spark = spark_session(settings.master, settings.spark)
            start = time.perf_counter()
            proof = prove_checkpoints(place, stream, wanted, partial(spark_map, spark))
            taken = [(stored, [c]) for c, s in snapshots.items() if c in wanted for stored in s.objects]
            failures = [
                replace(f, reason=f"{f.reason}; this is of its snapshot only, which `siltstone recover {stream}` drops")
                for f in check_objects(store, taken)
            ]
            if deep:
                failures += _deep(settings, spark, place, [s for c, s in snapshots.items() if c in wanted])
        first = {f.checkpoint: f for f in reversed(failures)} | proof.failures
        # Whoever loses the lease, as when its machine slept, misses what was deleted meanwhile: that is no damage.
        still = {c.id: c.epoch for c in catalog.checkpoints.list(stream)} if first else written_by
        if gone := {c for c in first if still.get(c) != written_by[c]}:
            if named is not None:
                raise UnknownCheckpoint(
                    f"no checkpoint {min(gone)} of {stream} any more: it was deleted or given up while it was proven; "
                    "verify others"
                )
            wanted = [c for c in wanted if c not in gone]
            first = {c: failure for c, failure in first.items() if c not in gone}
        for checkpoint in wanted:
            failure = first.get(checkpoint)
            restore_s, read = proof.restore_s[checkpoint], proof.restore_bytes[checkpoint]
            measured = {} if failure else {"restore_s": round(restore_s, 6), "restore_bytes": read}
            reason, epoch = failure.reason if failure else None, written_by[checkpoint]
            with suppress(UnknownCheckpoint):  # it was deleted or given up since
                catalog.checkpoints.record_proof(stream, checkpoint, failure is None, reason, epoch=epoch, **measured)
        health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
        stalled = [Stalled(name, h.health.value, h.reason) for name, h in health.items() if not h.fine]
        seconds = round(time.perf_counter() - start, 3)
    proven = [c for c in wanted if c not in first]
    return VerifyResult(stream, proven, [first[c] for c in sorted(first)], seconds, stalled)


@dataclass(frozen=True)
class SnapshotComparison(Result):
    """A checkpoint's restored state beside its full snapshot, table by table and part by part."""

    stream: str
    checkpoint: int
    tables: list[TableComparison]

    def to_dict(self) -> dict[str, Any]:
        """The fields; of each table, its rows and how many keys differ."""
        return {
            "stream": self.stream,
            "checkpoint": self.checkpoint,
            "tables": [
                {
                    "operator": table.operator,
                    "table": table.table,
                    "restored_rows": int(table.restored_rows.sum()),
                    "live_rows": int(table.live_rows.sum()),
                    "differing": table.differing,
                    "same": table.same,
                }
                for table in self.tables
            ],
        }


@needs_spark
def compare_snapshot(settings: Settings, stream: str) -> SnapshotComparison:
    """Restore the newest checkpoint that has a full snapshot, and compare both row by row.

    Raises:
        UsageError: none has a snapshot.
        CorruptObject, ProofFailed: the chain or the snapshot is damaged.
    """
    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        place.catalog.checkpoints.latest(stream)
        snapshots = place.catalog.reference_copies.list(stream)
        if not snapshots:
            raise UsageError(f"no snapshot of {stream} to compare with: take one with `siltstone snapshot {stream}`")
        with hold_lease(place.catalog, stream, [snapshots[-1].checkpoint], what="compares"):
            spark = spark_session(settings.master, settings.spark)
            tables = _compared(settings, spark, place, snapshots[-1])
    return SnapshotComparison(stream, snapshots[-1].checkpoint, tables)


def _deep(
    settings: Settings, spark: SparkSession, place: OpenWarehouse, snapshots: list[ReferenceCopyRecord]
) -> list[Failure]:
    """Row by row against the full snapshots."""
    failures = []
    for snapshot in snapshots:
        try:
            tables = _compared(settings, spark, place, snapshot)
            failures += [Failure(snapshot.checkpoint, str(table)) for table in tables if not table.same]
        except StateError as error:
            failures.append(Failure(snapshot.checkpoint, str(error)))
    return failures


def _compared(
    settings: Settings, spark: SparkSession, place: OpenWarehouse, snapshot: ReferenceCopyRecord
) -> list[TableComparison]:
    store = place.warehouse.store
    stored = place.catalog.chains.list_manifests(snapshot.stream, snapshot.checkpoint)
    manifests = read_manifests(store, stored, snapshot.stream)
    parallelism = settings.parallelism or cores(spark)
    tasks, _ = unit_tasks(manifests, snapshot.checkpoint, parallelism, None)
    compared = spark_map(spark, lambda task: compare(store, task), compare_tasks(tasks, snapshot.objects))
    return [table for tables in compared for table in tables]
