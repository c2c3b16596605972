"""Restore many checkpoints, such as one for each day of a year."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.format.manifests import read_manifest
from siltstone.restore.proof import plan_checkpoints
from siltstone.restore.series import (
    RestoredLabel,
    digest_of,
    labels_by_checkpoint,
    publish_labels,
    read_label,
    restore_chain,
)
from siltstone.restore.verify import Failure, check_indexes
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import needs_spark, spark_session
from siltstone.store.paths import check_label
from siltstone.store.scratch import hold_directory, remove_abandoned

AT_ONCE = 64
"""checkpoints that are restored before their labels appear; a chain that is split here is read twice"""
STAGED = ".series-"


@dataclass(frozen=True)
class SeriesResult(Result):
    """The labels below `root`: those `restored` now, those `kept` because they existed, and those that failed."""

    stream: str
    root: str
    restored: list[RestoredLabel]
    kept: list[RestoredLabel]
    failed: list[Failure]
    seconds: float


@needs_spark
def restore_series(
    settings: Settings,
    stream: str,
    labels: Mapping[str, int],
    on_label: Callable[[RestoredLabel], None] = lambda _: None,
) -> SeriesResult:
    """Restore in Spark tasks, `AT_ONCE` checkpoints at a time (`StreamClient.restore_series`)."""
    start = time.perf_counter()
    for label in labels:
        check_label(label)
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        catalog, root = warehouse.catalog, warehouse.warehouse.local.restored_series(stream)
        catalog.streams.get(stream)
        remove_abandoned(root, STAGED)
        recorded = {id: catalog.checkpoints.get(stream, id).digest for id in set(labels.values())}
        there = {label: read_label(root, label) for label in labels}
        kept = [
            found
            for label, found in there.items()
            if found and (found.checkpoint, found.digest) == (labels[label], recorded[labels[label]])
        ]
        missing = {label: id for label, id in labels.items() if label not in {found.label for found in kept}}
        restored: list[RestoredLabel] = []
        failed: list[Failure] = []
        by_checkpoint = labels_by_checkpoint(missing)
        for some in _parts(list(by_checkpoint)):
            with make_staging_directory(root) as staged, hold_lease(catalog, stream, some, what="restores"):
                done, failures = _restore(settings, warehouse, stream, some, staged, recorded)
                failed += failures
                for id, rows in done.items():
                    published = [RestoredLabel(label, id, recorded[id], rows) for label in by_checkpoint[id]]
                    publish_labels(root, staged / str(id), published)
                    restored += published
                    for label in published:
                        on_label(label)
    return SeriesResult(stream, str(root), restored, kept, failed, round(time.perf_counter() - start, 3))


def _restore(
    settings: Settings,
    warehouse: OpenWarehouse,
    stream: str,
    ids: Sequence[int],
    staged: Path,
    recorded: Mapping[int, str],
) -> tuple[dict[int, int], list[Failure]]:
    """Write some checkpoints below `staged`; return id -> rows of those that are proven, and the failures."""
    catalog, store, local = warehouse.catalog, warehouse.warehouse.store, warehouse.warehouse.local
    spark = spark_session(settings.master, settings.spark)
    plan = plan_checkpoints(warehouse, stream, ids)
    on = warehouse.warehouse
    parts = spark_map(spark, lambda task: restore_chain(store, task, staged, local.scratch()), plan.tasks, on=on)
    checked = spark_map(spark, lambda checks: check_indexes(store, checks), plan.indexes, on=on)
    failures = [*plan.failures, *(f for part in parts for f in part.failures), *(f for found in checked for f in found)]
    first = {failure.checkpoint: failure for failure in reversed(failures)}
    done: dict[int, int] = {}
    for id in ids:
        if id in first:
            continue
        record = catalog.checkpoints.get(stream, id)
        digest, rows = digest_of(parts, read_manifest(store, record.manifest))
        if digest == recorded[id]:
            done[id] = rows
            restore_s = round(max((part.restore_s.get(id, 0.0) for part in parts), default=0.0), 6)
            size = sum(part.restore_bytes.get(id, 0) for part in parts)
            with suppress(Unreachable):  # it is restored; only the policies would have learned from it
                catalog.checkpoints.record_restore(
                    stream, id, epoch=record.epoch, restore_s=restore_s, restore_bytes=size
                )
        else:
            why = f"checkpoint {id} of {stream}: digest {digest} is not the recorded {recorded[id]}"
            first[id] = Failure(id, why)
    return done, [first[id] for id in sorted(first.keys() & set(ids))]


@contextmanager
def make_staging_directory(root: Path) -> Iterator[Path]:
    """Make a directory next to the labels, and remove it at the end of the block."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(hold_directory(root, STAGED))
        except OSError as error:
            raise Unreachable(
                f"cannot write below {root}: {error.strerror}; check permissions and free space"
            ) from error
        yield path


def _parts(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[i : i + AT_ONCE] for i in range(0, len(ids), AT_ONCE))
