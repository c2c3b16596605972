"""Proves checkpoints, from their digests and row by row."""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.reference_copies import ReferenceCopyRecord
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.errors import StateError, UnknownCheckpoint, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.restore.compare import TableComparison, compare, compare_tasks
from siltstone.restore.export import unit_tasks
from siltstone.restore.proof import Proof, prove_checkpoints
from siltstone.restore.verify import Failure, check_objects
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.store.base import Store


@dataclass(frozen=True)
class Stalled:
    """An operator whose materialization is `failing` or `stalled` (`state`), and the reason."""

    operator: str
    state: str
    reason: str


@dataclass(frozen=True)
class VerifyResult(Result):
    """Which checkpoints are proven, why the others are not, and for which operators materialization falls behind."""

    stream: str
    proven: list[int]
    failed: list[Failure]
    seconds: float
    stalled: list[Stalled] = field(default_factory=list)


@needs_spark
def verify(
    settings: Settings,
    stream: str,
    *,
    at: str = "latest",
    every: bool = False,
    deep: bool = False,
    sample: int | None = None,
) -> VerifyResult:
    """Read and merge the chains in Spark tasks, under a lease (`StreamClient.verify`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        catalog = warehouse.catalog
        of_all = every or sample is not None
        wanted = None if of_all else [catalog.checkpoints.resolve(stream, at)]
        # Lease the checkpoints before listing them and before starting Spark: others may be deleting.
        with hold_lease(catalog, stream, wanted, what="verifies"):
            some = (
                catalog.checkpoints.list(stream)
                if wanted is None
                else [catalog.checkpoints.get(stream, c) for c in wanted]
            )
            if sample is not None:
                some = _select_due(some, sample)
            written_by = {c.id: c.epoch for c in some}
            copies = [s for s in catalog.reference_copies.list(stream) if s.checkpoint in written_by]
            if deep and not copies:
                raise UsageError(
                    f"no snapshot of {stream} to compare with: take one with `siltstone snapshot {stream}`"
                )
            spark = spark_session(settings.master, settings.spark)
            start = time.perf_counter()
            proof = prove_checkpoints(
                warehouse, stream, list(written_by), partial(spark_map, spark, on=warehouse.warehouse)
            )
            failures = _check_copies(warehouse.warehouse.store, stream, copies)
            if deep:
                failures += _compare_deeply(settings, spark, warehouse, copies)
        failed = {f.checkpoint: f for f in reversed(failures)} | proof.failures
        written_by = _leave_out_gone(catalog, stream, written_by, failed, of_all)
        failed = {c: failure for c, failure in failed.items() if c in written_by}
        _record_proofs(catalog, stream, written_by, failed, proof)
        health = materialization_health(catalog, stream, settings.materialization, settings.policy_options)
        stalled = [Stalled(name, h.health.value, h.reason) for name, h in health.items() if not h.fine]
        seconds = round(time.perf_counter() - start, 3)
    proven = [c for c in written_by if c not in failed]
    return VerifyResult(stream, proven, [failed[c] for c in sorted(failed)], seconds, stalled)


def _check_copies(store: Store, stream: str, copies: Sequence[ReferenceCopyRecord]) -> list[Failure]:
    """Read the objects of full snapshots; returns which are damaged."""
    advice = f"this is of its snapshot only, which `siltstone recover {stream}` drops"
    objects = [(stored, [copy.checkpoint]) for copy in copies for stored in copy.objects]
    return [replace(f, reason=f"{f.reason}; {advice}") for f in check_objects(store, objects)]


def _select_due(records: Sequence[CheckpointRecord], sample: int) -> list[CheckpointRecord]:
    """Select the newest checkpoint, those that are not proven, and of the others those whose proofs are oldest."""
    newest = max((record.id for record in records), default=0)
    due = [record for record in records if record.proven_at is None or record.id == newest]
    proven = [(record.proven_at, record.id, record) for record in records if record.proven_at and record.id != newest]
    return [*due, *(record for _, _, record in sorted(proven)[:sample])]


def _leave_out_gone(
    catalog: Catalog, stream: str, written_by: dict[int, int], failed: Collection[int], of_all: bool
) -> dict[int, int]:
    """Leave out of `written_by`, checkpoint -> writer epoch, those that failed because they are gone.

    A process that loses its lease, as when its machine slept, misses what was deleted meanwhile: that is no damage.

    Raises:
        UnknownCheckpoint: one is gone, and it was asked for, not what there is `of_all`.
    """
    still = {c.id: c.epoch for c in catalog.checkpoints.list(stream)} if failed else written_by
    gone = {c for c in failed if still.get(c) != written_by[c]}
    if gone and not of_all:
        raise UnknownCheckpoint(
            f"no checkpoint {min(gone)} of {stream} any more: it was deleted or given up while it was proven; "
            "verify others"
        )
    return {c: epoch for c, epoch in written_by.items() if c not in gone}


def _record_proofs(
    catalog: Catalog, stream: str, written_by: Mapping[int, int], failed: Mapping[int, Failure], proof: Proof
) -> None:
    """Record each outcome in the catalog, and of each proven checkpoint what restoring it took."""
    for checkpoint, epoch in written_by.items():
        failure = failed.get(checkpoint)
        restore_s, read = proof.restore_s[checkpoint], proof.restore_bytes[checkpoint]
        measured = {} if failure else {"restore_s": round(restore_s, 6), "restore_bytes": read}
        reason = failure.reason if failure else None
        with suppress(UnknownCheckpoint):  # it was deleted or given up since
            catalog.checkpoints.record_proof(stream, checkpoint, failure is None, reason, epoch=epoch, **measured)


@dataclass(frozen=True)
class SnapshotComparison(Result):
    """A checkpoint's restored state compared with its full snapshot, table by table and part by part."""

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
    """Compare in Spark tasks, under a lease (`StreamClient.compare_snapshot`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        warehouse.catalog.checkpoints.get_latest(stream)
        snapshots = warehouse.catalog.reference_copies.list(stream)
        if not snapshots:
            raise UsageError(f"no snapshot of {stream} to compare with: take one with `siltstone snapshot {stream}`")
        with hold_lease(warehouse.catalog, stream, [snapshots[-1].checkpoint], what="compares"):
            spark = spark_session(settings.master, settings.spark)
            tables = _compare_copy(settings, spark, warehouse, snapshots[-1])
    return SnapshotComparison(stream, snapshots[-1].checkpoint, tables)


def _compare_deeply(
    settings: Settings, spark: SparkSession, warehouse: OpenWarehouse, copies: list[ReferenceCopyRecord]
) -> list[Failure]:
    """Compare checkpoints row by row with their full snapshots; returns which differ."""
    failures = []
    for copy in copies:
        try:
            tables = _compare_copy(settings, spark, warehouse, copy)
            failures += [Failure(copy.checkpoint, str(table)) for table in tables if not table.same]
        except StateError as error:
            failures.append(Failure(copy.checkpoint, str(error)))
    return failures


def _compare_copy(
    settings: Settings, spark: SparkSession, warehouse: OpenWarehouse, snapshot: ReferenceCopyRecord
) -> list[TableComparison]:
    store, local = warehouse.warehouse.store, warehouse.warehouse.local
    stored = warehouse.catalog.chains.list_manifests(snapshot.stream, snapshot.checkpoint)
    manifests = read_manifests(store, stored, snapshot.stream)
    parallelism = settings.parallelism or cores(spark)
    tasks, _ = unit_tasks(manifests, snapshot.checkpoint, parallelism, None)
    compared = spark_map(
        spark,
        lambda task: compare(store, task, local.scratch()),
        compare_tasks(tasks, snapshot.objects),
        on=warehouse.warehouse,
    )
    return [table for tables in compared for table in tables]
