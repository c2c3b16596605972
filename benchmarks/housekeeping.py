"""Measure a sweep of a large store, and the metadata of many checkpoints.

sweep       a filesystem store of 100,000 objects of which 1 % are orphans; it may list the store once
metadata    36,000 checkpoints, ten per second for an hour, committed to a SQLite catalog that is truncated every
            minute: bytes of the catalog with its log, and of one manifest. Manifests are encoded and counted, but not
            stored
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.goals import Goal, Report, table_of
from benchmarks.states import OPERATOR, always_deltas, new_chain, stream
from benchmarks.summary import MB
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, StoredObject
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.sweep import sweep
from siltstone.retention.truncate import truncate
from siltstone.run.pending import commit_of
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.paths import CheckpointPath, stream_prefix

OBJECTS = 100_000
ORPHANS_OF = 100
"""one of this number of objects is an orphan"""
SWEEP_AT_MOST_S = 60.0
CHECKPOINTS = 36_000
TRUNCATED_EVERY = 600
KEPT = 1_000
# Bytes by `siltstone.catalog.database.tables`: a checkpoint with its two objects, a step, a deletion.
CHECKPOINT_BYTES, STEP_BYTES, DELETION_BYTES = 800 + 2 * 250, 250, 300
DELETIONS_MOST = 100_000
EMPTY_BYTES = 1 << 20
"""bytes of the first pages of tables"""
LOG_BYTES = 4 << 20
"""size at which SQLite writes its log back: a thousand pages"""
_OF_A_CHECKPOINT = 300
_DATA = b"sixteen bytes ok"


class Lists:
    """A `Store` that counts how often all objects of a stream were listed."""

    def __init__(self, store: Store, stream: str) -> None:
        self.count = 0
        self._store, self._all = store, stream_prefix(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.count += prefix == self._all
        return self._store.list(prefix)


def _commit(warehouse: OpenWarehouse, epoch: int, id: int, names: list[str]) -> None:
    """Commit a checkpoint that refers to these objects; their contents do not matter."""
    checksum = checksum_of(_DATA)
    manifest, *segments = [StoredObject(name, len(_DATA), checksum) for name in names]
    forms, size = {OPERATOR: Form.BASE}, len(names) * len(_DATA)
    commit = CheckpointCommit(id, manifest, "0" * 32, 1, size, forms, segments=segments, oldest_needed=id)
    warehouse.catalog.commits.add(stream().name, epoch, commit)


def _write(root: Path, names: list[str]) -> None:
    """Write objects as the filesystem store does, without waiting for the disk."""
    (root / names[0]).parent.mkdir(parents=True)
    for name in names:
        (root / name).write_bytes(_DATA)


def measure_sweep(scratch: Path, objects: int) -> Report:
    """Measure a sweep of checkpoints that each have orphans, left by an attempt that was not accepted."""
    with OpenWarehouse.open_writable(str(scratch / "swept")) as warehouse:
        name, catalog = stream().name, warehouse.catalog
        catalog.streams.register(name, stream().max_parallelism, stream().definition())
        epoch, root = catalog.runs.begin(name, "benchmark"), warehouse.warehouse.local.objects
        orphans = 0
        for id in range(1, objects // _OF_A_CHECKPOINT + 1):
            path = CheckpointPath(name, epoch, id)
            names = [path.manifest(), *(path.segment(f"s{i}") for i in range(_OF_A_CHECKPOINT - 1))]
            left = _OF_A_CHECKPOINT // ORPHANS_OF
            _write(root, names)
            _commit(warehouse, epoch, id, names[:-left])
            orphans += left
        lists = Lists(warehouse.warehouse.store, name)
        began = time.perf_counter()
        found = sweep(OpenWarehouse(cast(Any, SimpleNamespace(store=lists)), catalog), name)
        took = time.perf_counter() - began
        second = sweep(warehouse, name)
    assert (found.deleted, second.found) == (orphans, 0), "the orphans, and nothing else"
    total = objects // _OF_A_CHECKPOINT * _OF_A_CHECKPOINT
    table = table_of("sweeping a filesystem store", "objects", "orphans", "seconds", "lists", left=0)
    table.add_row(f"{total:,}", f"{orphans:,}", f"{took:.1f}", str(lists.count))
    goals = [
        Goal(f"sweep of {total:,} objects, 1 % orphans: seconds", took, at_most=SWEEP_AT_MOST_S),
        Goal("sweep: lists of the store", lists.count, at_most=1),
    ]
    return Report([table], goals, {"objects": total, "orphans": orphans, "seconds": took, "lists": lists.count})


def _real_manifest(scratch: Path) -> Manifest:
    """Make the manifest of a small delta, by a real run."""
    with new_chain(str(scratch / "small"), 5_000, always_deltas()) as chain:
        chain.change(50)
        stored = chain.warehouse.catalog.checkpoints.get(stream().name, chain.change(50).id).manifest
        return read_manifest(chain.warehouse.warehouse.store, stored)


def _next_commit(manifest: Manifest, epoch: int, id: int) -> CheckpointCommit:
    """Make the commit of a similar checkpoint: a base after the most deltas allowed, one segment, one step."""
    chain = PolicyOptions().d_max + 1
    since = id - (id - 1) % chain
    path = CheckpointPath(manifest.stream, epoch, id)
    segment = replace(manifest.objects[0], name=path.segment(f"{id:032x}"))
    form = Form.BASE if since == id else Form.DELTA
    manifest = replace(
        manifest,
        checkpoint=id,
        step=id,
        epoch=epoch,
        handles=[replace(handle, object=segment.name, previous=id - 1) for handle in manifest.handles],
        objects=[segment],
        forms={OPERATOR: form},
    )
    data = encode_manifest(manifest)
    stored = StoredObject(path.manifest(), len(data), checksum_of(data))
    offsets = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":1700000000000}}\n{{"logOffset":{id}}}'
    commit = commit_of(manifest, stored, CommitDetails(steps=[Step(id, id - 1, offsets)]))
    return replace(commit, oldest_needed=since)


def _catalog_bytes(warehouse: OpenWarehouse) -> int:
    path = warehouse.warehouse.local.catalog
    return sum(os.path.getsize(file) for file in path.parent.glob(f"{path.name}*"))


def measure_metadata(scratch: Path, checkpoints: int) -> Report:
    """Measure the metadata with one event per checkpoint and retention once a minute."""
    manifest = _real_manifest(scratch)
    largest = catalog_bytes = 0
    rules = RetentionOptions(keep_last=KEPT)
    with OpenWarehouse.open_writable(str(scratch / "hour")) as warehouse:
        name, catalog = stream().name, warehouse.catalog
        catalog.streams.register(name, stream().max_parallelism, stream().definition())
        epoch = catalog.runs.begin(name, "benchmark")
        began = time.perf_counter()
        for id in range(1, checkpoints + 1):
            commit = _next_commit(manifest, epoch, id)
            catalog.commits.add(name, epoch, commit)
            largest = max(largest, commit.manifest.bytes)
            if id % TRUNCATED_EVERY == 0:
                truncate(warehouse, name, rules)
                catalog_bytes = max(catalog_bytes, _catalog_bytes(warehouse))
        took = time.perf_counter() - began
        left = len(catalog.checkpoints.list(name, marked=True))
    each, each_ms = catalog_bytes / checkpoints, 1e3 * took / checkpoints
    held = min(checkpoints, KEPT + PolicyOptions().d_max + TRUNCATED_EVERY) * CHECKPOINT_BYTES
    deletions = min(2 * max(0, checkpoints - KEPT), DELETIONS_MOST) * DELETION_BYTES
    stated = held + checkpoints * STEP_BYTES + deletions + EMPTY_BYTES + LOG_BYTES
    heads = ("checkpoints", "left", "catalog MB", "bytes a checkpoint", "manifest bytes", "ms a checkpoint")
    table = table_of("metadata of ten checkpoints per second for an hour", *heads, left=0)
    counts = (f"{checkpoints:,}", str(left), f"{catalog_bytes / MB:.1f}", f"{each:.0f}")
    table.add_row(*counts, f"{largest}", f"{each_ms:.2f}")
    goals = [
        Goal("metadata: MB of the catalog with its log", catalog_bytes / MB, at_most=stated / MB),
        Goal("metadata: bytes of a manifest", largest),
        Goal("metadata: ms a checkpoint, of which there are ten a second", each_ms, at_most=100),
    ]
    numbers = {"checkpoints": checkpoints, "left": left, "catalog_bytes": catalog_bytes, "manifest_bytes": largest}
    return Report([table], goals, numbers | {"seconds": took})


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Run both measurements."""
    parts = {
        "sweep": measure_sweep(scratch, 6_000 if quick else OBJECTS),
        "metadata": measure_metadata(scratch, 1_200 if quick else CHECKPOINTS),
    }
    return Report(
        [table for part in parts.values() for table in part.tables],
        [goal for part in parts.values() for goal in part.goals],
        {name: part.numbers for name, part in parts.items()},
    )
