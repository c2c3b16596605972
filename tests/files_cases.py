"""A stream whose checkpoints are files of RocksDB, and what its warehouse holds."""

import shutil
import tempfile
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy, policy_by_name
from siltstone.format.files import decode_files, encode_files
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import Form
from siltstone.operator import Rows, State, ValueState
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.store.checksums import checksum_of
from siltstone.store.paths import CheckpointPath, is_files_index
from tests.crafted_files import CLAIM, blocks_of, mend_table
from tests.forgery import replace_object
from tests.proofs import check_restores
from tests.region_run import RegionRun
from tests.stored import stream_objects
from tests.sums import NAME, Counted, stream_of

FILES = policy_by_name("files")
KEYS = 4000


class Tables(Counted):
    """Sums, the largest value of each key, and an opaque tally."""

    largest = ValueState(value={"n": pa.int64(), "note": pa.string()})

    def process(self, rows: Rows, state: State) -> None:
        """Add, count, and keep the newest."""
        super().process(rows, state)
        numbers = np.zeros(len(rows.keys), np.int64)
        np.maximum.at(numbers, rows.key_index, rows.table.column("n").to_numpy())
        notes = pa.array([f"note {n}" for n in numbers.tolist()])
        state.largest.put(rows.keys, {"n": numbers, "note": notes})


STREAM = stream_of(Tables(), max_parallelism=8)


def rows(n: int, keys: int = KEYS, changed: int = 200) -> pa.Table:
    """All keys first, then some."""
    chosen = np.arange(keys) if n == 1 else (np.arange(changed) * 3 + 7 * n) % keys
    return pa.table({"k": chosen, "n": np.full(len(chosen), n)})


def run_of(
    place: OpenWarehouse,
    parallelism: int = 2,
    backend: str = "rocksdb",
    name: str = NAME,
    policy: Policy = FILES,
    **options: Any,
) -> RegionRun:
    return RegionRun(place, replace(STREAM, name=name), policy, parallelism, backend=backend, **options)


def steps(run: RegionRun, first: int, last: int) -> list[str]:
    """Take steps; the digests of their checkpoints."""
    return [done.digest for n in range(first, last + 1) if (done := run.step(rows(n)))]


@cache
def known(count: int = 14) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as root, OpenWarehouse.open_writable(root) as place:
        run = run_of(place, backend="heap", policy=policy_by_name("marginal-cost"))
        found = steps(run, 1, count)
        run.region.close("stopped")
        return tuple(found)


def expected(count: int) -> list[str]:
    """The digests of the checkpoints of as many steps, whatever keeps the state."""
    return list(known()[:count])


def manifest_of(place: OpenWarehouse, checkpoint: int, stream: str = NAME) -> Manifest:
    return read_manifest(place.warehouse.store, place.catalog.checkpoints.get(stream, checkpoint).manifest, stream)


def files_of(place: OpenWarehouse, checkpoint: int, stream: str = NAME) -> set[str]:
    return {h.object for h in manifest_of(place, checkpoint, stream).handles if h.form is Form.FILES}


def is_old(place: OpenWarehouse, checkpoint: int, name: str) -> bool:
    path = CheckpointPath.of(name)
    return path is not None and path.checkpoint < checkpoint


def check(place: OpenWarehouse, *streams: str) -> None:
    """Everything is proven, some of it restores, and the store holds what is referred to, and nothing else."""
    for stream in streams or (NAME,):
        check_restores(place, stream, (3, 1))
    known = {o.name for stream in streams or (NAME,) for o in place.catalog.objects.list(stream)}
    assert {name for name, _ in stream_objects(place.warehouse.store)} == known


def lose_state(place: OpenWarehouse, name: str = NAME) -> None:
    shutil.rmtree(place.warehouse.local.root / "work" / name)


def craft_checkpoint(place: OpenWarehouse, checkpoint: int) -> str:
    """Craft a table file of a checkpoint of one subtask, and mend all that leads to it in the store.

    Returns:
        The name of its `.files` object.
    """
    store, manifest = place.warehouse.store, manifest_of(place, checkpoint)
    [index] = {h.object for h in manifest.handles if h.form is Form.FILES and is_files_index(h.object)}
    objects = {stored.name: stored for stored in manifest.objects}
    victim = next(name for name in sorted(files_of(place, checkpoint) & objects.keys()) if name.endswith(".sst"))
    table, found = store.read(objects[victim]).to_pybytes(), decode_files(store.read(objects[index]))
    blocks = blocks_of(table)
    start, _ = blocks[-3]  # of the index
    crafted = mend_table(table[:start] + CLAIM + table[start + len(CLAIM) :], blocks)
    mended = {objects[victim].checksum: checksum_of(crafted)}
    files = tuple(replace(file, checksum=mended.get(file.checksum, file.checksum)) for file in found.files)
    listed = encode_files(replace(found, files=files))
    mended[objects[index].checksum] = checksum_of(listed)
    altered = replace(
        manifest,
        handles=[replace(h, checksum=mended.get(h.checksum, h.checksum)) for h in manifest.handles],
        objects=[replace(o, checksum=mended.get(o.checksum, o.checksum)) for o in manifest.objects],
    )
    name = place.catalog.checkpoints.get(NAME, checkpoint).manifest.name
    for each, data in {victim: crafted, index: listed, name: encode_manifest(altered)}.items():
        replace_object(store, each, data)
    return index


def check_after_failure(place: OpenWarehouse, run: RegionRun) -> None:
    """The next run does what this one has not completed, up to step 7; what it leaves is swept, and all proves."""
    done = run.region.completed
    run.region.close("failed")
    run = run_of(place)
    assert steps(run, done + 1, 7) == expected(7)[done:]
    run.region.close("stopped")
    sweep(place, NAME, SweepOptions(age_guard=timedelta(0)))
    check(place)
