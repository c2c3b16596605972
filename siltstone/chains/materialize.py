"""Materialization: consolidate a chain up to a checkpoint into a new base, in the background (FLIP-158).

    plan_materialization    the units of one operator at one checkpoint: key-group ranges
    materialize_unit        merge base and deltas of one unit, write the new bases, prove them
    materialize             all of this for one operator, under a lease; `run` maps over the units

It is independent of checkpoints and never blocks the stream: it reads immutable objects, writes its own, and commits
in one catalog transaction, guarded by its lease: every chain through the checkpoint then begins with the new bases. If
it is killed before that, it leaves orphans under its own id and a lease that expires.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np

from siltstone.catalog.extract_writer import try_write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import uploader_of
from siltstone.errors import Unreachable, UsageError, summarize
from siltstone.format.base import write_base
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifests import objects_of, read_many, schemas_of, variables_of, with_materializations
from siltstone.format.opaque import encode_opaque
from siltstone.model import Form, Handle, Kind, StoredObject
from siltstone.restore.export import plan_units
from siltstone.restore.live_rules import LiveHandles, Variable, shared_names
from siltstone.restore.plan_rules import RestoreUnit
from siltstone.restore.restore import MemoryState, apply_reads, compare_digests, opaque_digests
from siltstone.restore.tables import add_digests, merged_tables, split_reads
from siltstone.retention.leases import hold_lease, this_process
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader
from siltstone.store.paths import CheckpointPath, materialization_of
from siltstone.store.ranged import create_ranged

DEFAULT_UPLOAD = UploadOptions()


class Abandoned(BaseException):
    """Raised by `run` when a materialization is no longer wanted; it does not count as a failure."""


class HeldWhole(UsageError):
    """There is nothing to consolidate: a restore reads no change of the operator."""


@dataclass(frozen=True)
class MaterializeTask:
    """One unit: what to merge, and where to write the result."""

    id: str
    part: int
    unit: RestoreUnit
    manifests: Mapping[int, Manifest]
    path: CheckpointPath
    upload: UploadOptions


@dataclass(frozen=True)
class MaterializedPart:
    """What one unit wrote."""

    handles: list[Handle]
    objects: list[StoredObject]
    rows: int
    uploads: UploadStatistics = field(default_factory=UploadStatistics)


def plan_materialization(
    manifests: Mapping[int, Manifest],
    operator: str,
    checkpoint: int,
    parallelism: int,
    id: str,
    upload: UploadOptions,
    *,
    rebuild: bool = False,
) -> list[MaterializeTask]:
    """Split one operator at `checkpoint` into at least `parallelism` units, more if one would merge too much.

    Args:
        rebuild: take everything, since the materialization that this one replaces may have tables that a later one at
            an earlier checkpoint made bases of, too.

    Raises:
        StateError: the chain has a gap.
        HeldWhole: there is nothing to consolidate.
    """
    manifest = manifests[checkpoint]
    handles = {c: [h for h in m.handles if h.operator == operator] for c, m in manifests.items()}
    variables, known = variables_of(manifest, operator), manifest.max_parallelism
    whole = plan_units(handles, checkpoint, known, 1, variables)
    path = CheckpointPath(manifest.stream, manifest.epoch, checkpoint)
    wanted = variables if rebuild else find_consolidated(whole.units, variables, path)
    plan = plan_units(handles, checkpoint, known, parallelism, wanted)
    own = {c: m.of_operator(operator) for c, m in manifests.items()}
    filled = [unit for unit in plan.units if unit.key_groups]
    if not filled:
        raise HeldWhole(f"checkpoint {checkpoint} of {manifest.stream} holds all of operator {operator} whole already")
    return [MaterializeTask(id, part, unit, own, path, upload) for part, unit in enumerate(filled)]


def find_consolidated(
    units: Sequence[RestoreUnit], variables: Mapping[Variable, Kind], path: CheckpointPath
) -> dict[Variable, Kind]:
    """Choose the variables to consolidate: those of which a restore reads changes, or files, or what another stream
    wrote, from which a fork gets independent; if there are none, every table.

    What the checkpoint itself holds of a table goes with them, since the new bases stand for all its tables
    (`Manifest.with_bases`), and so does what another materialization at it holds, since this one replaces that one.
    """
    changed, held, again = set[str](), set[str](), set[str]()
    for unit in units:
        tables = {name: (*reads.bases, *reads.deltas) for name, reads in unit.tables.items()}
        for name, reads in (*tables.items(), *unit.opaque.items()):
            here = [r for r in reads if r.checkpoint == path.checkpoint]
            changed |= {name for r in reads if r.handle.form is not Form.BASE or _is_foreign(r.handle, path)}
            held |= {name for r in here if r.handle.kind is Kind.INCREMENTAL}
            again |= {name for r in here if materialization_of(r.handle.object) is not None}
    if changed or again:
        return {name: kind for name, kind in variables.items() if name[1] in changed | held | again}
    return {name: kind for name, kind in variables.items() if kind is Kind.INCREMENTAL}


def _is_foreign(handle: Handle, path: CheckpointPath) -> bool:
    writer = CheckpointPath.of(handle.object)
    return writer is not None and writer.stream != path.stream


def materialize_unit(store: Store, task: MaterializeTask, scratch: Path | None = None) -> MaterializedPart:
    """Merge every table of one unit and write it as a base. `scratch`: see `BlockReader`.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged, or the merged rows do not match the recorded digest.
        Unreachable: the store cannot be written.
    """
    unit, manifest = task.unit, task.manifests[task.path.checkpoint]
    recorded_schemas = schemas_of(manifest, unit.operator)
    schemas = {name: recorded_schemas[name] for name in unit.tables}
    reader = BlockReader(store, objects_of(task.manifests), scratch)
    part, uploader = MaterializedPart([], [], 0), uploader_of(store.url, task.upload)
    rows = 0
    reads, others = split_reads(unit.reads)
    opaque = MemoryState.make_empty({}, unit.key_groups, manifest.max_parallelism)
    apply_reads(opaque, others, reader)
    for name in unit.opaque:
        values = opaque.opaque.get(name, {})
        _compare(task, name, opaque_digests(values, unit.key_groups))
        path = task.path.materialized_opaque(unit.operator, name, task.part, task.id)
        stored = uploader.put(path, encode_opaque(values))
        part.objects.append(stored)
        part.handles.append(_handle(unit, name, stored, 0, Kind.OPAQUE))
    merged = merged_tables(reads, schemas, reader, unit.key_groups, manifest.max_parallelism)
    for name, batches in merged:
        found = np.zeros(manifest.max_parallelism, np.uint64)
        with create_ranged(uploader, task.path.materialized_base(unit.operator, name, task.part, task.id)) as out:
            count = write_base(out, schemas[name], add_digests(batches, found))
            # Before the base is stored: a base whose proof fails never appears in the store.
            _compare(task, name, found[unit.key_groups.start : unit.key_groups.end])
        assert out.stored is not None
        part.objects.append(out.stored)
        part.handles.append(_handle(unit, name, out.stored, count))
        rows += count
    return MaterializedPart(part.handles, part.objects, rows, uploader.metrics.take())


def _compare(task: MaterializeTask, name: str, found: np.ndarray) -> None:
    """Compare the digests of a unit's key groups with the recorded ones."""
    unit, checkpoint = task.unit, task.path.checkpoint
    manifest = task.manifests[checkpoint]
    groups = np.arange(unit.key_groups.start, unit.key_groups.end)
    where = f"the materialization of checkpoint {checkpoint} of {manifest.stream}: {unit.operator}.{name}"
    compare_digests(where, found, manifest.digests[unit.operator][name][groups], groups)


def _handle(unit: RestoreUnit, name: str, stored: StoredObject, rows: int, kind: Kind = Kind.INCREMENTAL) -> Handle:
    place = (stored.name, 0, stored.bytes, stored.checksum, unit.key_groups)
    return Handle(unit.operator, name, kind, Form.BASE, *place, rows=rows, previous=0)


@dataclass(frozen=True)
class Materialized:
    """The result of a materialization: bases of `bytes` with `rows` rows, up to `checkpoint`."""

    operator: str
    checkpoint: int
    id: str
    rows: int
    bytes: int
    seconds: float


Run = Callable[[Callable[[MaterializeTask], MaterializedPart], Sequence[MaterializeTask]], list[MaterializedPart]]
"""a function that maps a function over tasks"""


def materialize(
    warehouse: OpenWarehouse,
    stream: str,
    operator: str,
    checkpoint: int,
    *,
    id: str,
    parallelism: int,
    run: Run,
    rebuild: bool = False,
    upload: UploadOptions = DEFAULT_UPLOAD,
    uploaded: Callable[[UploadStatistics], None] = lambda _: None,
    completed: Callable[[StoredObject, Manifest], None] = lambda *_: None,
) -> Materialized:
    """Consolidate one operator's chain at `checkpoint`: every table and opaque variable of which it reads changes.

    Args:
        id: at most 32 letters and digits, unique among materializations.
        rebuild: replace a damaged materialization: start from the chain that it was made from.
        uploaded: called with statistics of what was stored, whether or not the materialization completes.
        completed: called with its manifest as soon as chains begin with it.

    Raises:
        UsageError: another process is at it, or the stream has no such operator.
        HeldWhole: there is nothing to consolidate.
        UnknownCheckpoint: the checkpoint does not exist, or no longer.
        CorruptObject, ProofFailed, Fenced, Abandoned: the chain is damaged, the lease was lost meanwhile, or `run` gave
            up; nothing changed.
    """
    start = time.perf_counter()
    catalog, store, local = warehouse.catalog, warehouse.warehouse.store, warehouse.warehouse.local
    with hold_lease(catalog, stream, [checkpoint], what=f"materializes {operator}", id=id):
        catalog.materializations.begin(stream, operator, checkpoint, id=id, who=this_process())
        try:
            # Objects first: those of a materialization that completes now are then not open without being live.
            open_ = {stored.name for stored in catalog.chains.list_objects(stream, checkpoint)}
            chain = _read_chain(warehouse, stream, operator, checkpoint, rebuild)
            manifests = with_materializations([manifest for _, manifest in chain])
            tasks = plan_materialization(manifests, operator, checkpoint, parallelism, id, upload, rebuild=rebuild)
            parts = run(lambda task: materialize_unit(store, task, local.scratch()), tasks)
            uploaded(reduce(UploadStatistics.merge, (part.uploads for part in parts), UploadStatistics()))
            manifest = _manifest(manifests[checkpoint], operator, id, parts)
            stored = _store_manifest(store, tasks[0].path.materialization(operator, id), manifest, upload, uploaded)
            rows, size = sum(part.rows for part in parts), sum(o.bytes for o in manifest.objects)
            seconds = round(time.perf_counter() - start, 6)
            replaced, needed = find_replaced(manifest, stored.name, chain)
            catalog.materializations.complete(
                stream, id, stored, manifest.objects, replaced, open_ - needed, rows_=rows, bytes_=size, seconds=seconds
            )
            completed(stored, manifest)
            try_write_extract(warehouse, stream)
        except (Abandoned, HeldWhole, KeyboardInterrupt):
            with suppress(Unreachable):  # then its lease expires
                catalog.materializations.abandon(stream, id)
            raise
        except BaseException as error:
            with suppress(Unreachable):  # then its lease expires
                catalog.materializations.fail(stream, id, summarize(error))
            raise
    return Materialized(operator, checkpoint, id, rows, size, seconds)


def _store_manifest(
    store: Store, name: str, manifest: Manifest, upload: UploadOptions, uploaded: Callable[[UploadStatistics], None]
) -> StoredObject:
    uploader = uploader_of(store.url, upload)
    stored = uploader.put(name, encode_manifest(manifest))
    uploaded(uploader.metrics.take())
    return stored


def _read_chain(
    warehouse: OpenWarehouse, stream: str, operator: str, checkpoint: int, rebuild: bool
) -> list[tuple[str, Manifest]]:
    """Return name and manifest of what a restore of the checkpoint reads; to rebuild, without what is replaced."""
    chains = warehouse.catalog.chains
    if rebuild:
        stored = chains.list_manifests_before(stream, checkpoint, operator)
    else:
        stored = chains.list_manifests(stream, checkpoint)
    manifests = read_many(warehouse.warehouse.store, stored, stream)
    return [(each.name, manifest) for each, manifest in zip(stored, manifests, strict=True)]


def find_replaced(
    materialized: Manifest, name: str, chain: Sequence[tuple[str, Manifest]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the objects of what a materialization replaces, and of those that may be read after it.

    Args:
        chain: name and manifest of what a restore of its checkpoint reads without it.
    """
    live = LiveHandles()
    for of, manifest in sorted(chain, key=lambda each: each[1].checkpoint):
        live.apply(manifest, of)
    replaced = live.apply(materialized, name)
    return replaced, live.needed.union(*(shared_names(manifest) for _, manifest in chain))


def _manifest(checkpoint: Manifest, operator: str, id: str, parts: Sequence[MaterializedPart]) -> Manifest:
    return Manifest(
        stream=checkpoint.stream,
        checkpoint=checkpoint.checkpoint,
        epoch=checkpoint.epoch,
        step=checkpoint.step,
        max_parallelism=checkpoint.max_parallelism,
        operators={operator: checkpoint.operators[operator]},
        handles=[handle for part in parts for handle in part.handles],
        objects=[stored for part in parts for stored in part.objects],
        digests={operator: checkpoint.digests[operator]},
        forms={operator: Form.BASE},
        materialization=id,
    )
