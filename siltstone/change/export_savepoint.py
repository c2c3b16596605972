"""Export a savepoint: copy everything that a stream needs to go on from it to a place of its own.

    1  lease the checkpoint, so that nothing of it is deleted meanwhile
    2  read the manifests of its chain, and make one of them (`change.stand_alone`)
    3  copy each object, verified on the way
    4  store that manifest, and last the object that makes the export whole (`change.exported`)

If it is killed, what it copied stays, and the same export verifies that and copies the rest. All bytes depend only on
the savepoint, so two exports of it, even at the same time, write the same.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from siltstone.catalog.records.beginnings import only_of, sources_of
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.imports import Continuation
from siltstone.catalog.records.source_entries import NO_ENTRIES, merge
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.exported import Exported, encode_exported
from siltstone.change.stand_alone import FIRST, stand_alone
from siltstone.errors import ObjectExists, UsageError
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import StoredObject, check_name
from siltstone.operator import SOURCE
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.copying import check_copy, copy_object
from siltstone.store.open import open_store
from siltstone.store.paths import EXPORT, CheckpointPath

AT_ONCE = 8
"""objects that are copied at once"""


@dataclass(frozen=True)
class SavepointExport(Result):
    """An exported savepoint, of `objects` with `bytes`; `copied` of them were not there from an earlier attempt."""

    stream: str
    savepoint: str
    checkpoint: int
    digest: str
    url: str
    objects: int
    bytes: int
    copied: int
    seconds: float


def export_savepoint(warehouse: OpenWarehouse, stream: str, name: str, url: str) -> SavepointExport:
    """Copy a full savepoint to an empty place: a directory, or a store of any other kind.

    The stream may run meanwhile.

    Args:
        url: the place, as of a warehouse: a path, or an s3://, redis://, cassandra:// or rocksdb:// URL.

    Raises:
        UnknownStream: the stream does not exist.
        UsageError: it has no such savepoint, or that is not full, or outputs up to it have not reached their sinks; or
            the place holds anything else.
        CorruptObject: an object is damaged; the export is not whole.
        Unreachable: a store or the catalog failed; repeat the export.
    """
    start = time.perf_counter()
    check_name("savepoint", name)
    checkpoint = _checkpoint_of(warehouse, stream, name)
    target = open_store(url)
    target.check(writable=True)
    with hold_lease(warehouse.catalog, stream, [checkpoint], what=f"exports savepoint {name}"):
        _check_delivered(warehouse, stream, name, checkpoint)
        manifest, objects, continuation = _gather(warehouse, stream, checkpoint)
        data, path = encode_manifest(manifest), CheckpointPath(stream, 1, FIRST)
        stored = StoredObject(path.manifest(), len(data), checksum_of(data))
        origin = warehouse.catalog.forks.get_lineage(stream)[-1]
        exported = Exported(stream, name, checkpoint, origin, stored, manifest.digest, continuation)
        try:
            copied = _copy(warehouse.warehouse.store, target, objects, {stored.name, EXPORT})
            put_same(target, stored.name, data)
            put_same(target, EXPORT, encode_exported(exported))
        except ObjectExists as error:
            raise _not_empty_error(target, f"{error}") from error
    size = sum(each.bytes for each in objects.values())
    seconds = round(time.perf_counter() - start, 3)
    return SavepointExport(stream, name, checkpoint, manifest.digest, target.label, len(objects), size, copied, seconds)


def put_same(store: Store, name: str, data: bytes) -> None:
    """Store an object that may be there already, with the same contents.

    Raises:
        ObjectExists: it has other contents.
    """
    try:
        store.put(name, data)
    except ObjectExists:
        check_copy(store, StoredObject(name, len(data), checksum_of(data)))


def _checkpoint_of(warehouse: OpenWarehouse, stream: str, name: str) -> int:
    savepoints = {each.name: each.checkpoint for each in warehouse.catalog.savepoints.list(stream)}
    if name not in savepoints:
        known = ", ".join(savepoints) or "none"
        raise UsageError(f"no savepoint {name!r} of stream {stream}: it has {known}")
    return savepoints[name]


def _check_delivered(warehouse: OpenWarehouse, stream: str, name: str, checkpoint: int) -> None:
    """Refuse while sinks lack outputs up to the savepoint: these do not travel, and would be lost with the stream."""
    waiting = [o for o in warehouse.catalog.outbox.list(stream, outstanding=True) if o.checkpoint <= checkpoint]
    if waiting:
        raise UsageError(
            f"savepoint {name} of stream {stream} cannot be exported yet: output {waiting[0].name} of checkpoint "
            f"{waiting[0].checkpoint} has not reached its sink; run the stream once more, which delivers it first"
        )


def _gather(
    warehouse: OpenWarehouse, stream: str, checkpoint: int
) -> tuple[Manifest, Mapping[str, StoredObject], Continuation]:
    """Return the manifest of the export, its objects by their new names, and what continues."""
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    position = catalog.input_log.get_position(stream, checkpoint)
    definition = catalog.definitions.get(stream, checkpoint)
    # The newest two with a batch, which Spark needs, and those after the first of them: numbers have no gaps. Without
    # a batch, all steps: the newest one has the stream's clock.
    first = position.newest[0] if position.newest else None
    steps = catalog.input_log.list(stream, checkpoint, after=first.checkpoint - 1 if first else 0)
    kept = [_to_step(step) for step in steps if first is None or step.step >= first.step]
    before = [one for one in catalog.definitions.list(stream) if one.checkpoint <= checkpoint]
    # Step 0 tells where sources begin that were given up, so their names stay taken.
    dropped = {name for one in before for name in one.dropped if name.startswith(f"{SOURCE}.")}
    details = CommitDetails(steps=kept, definition=definition, dropped=sorted(dropped))
    chain = [
        (each.name, read_manifest(store, each, stream)) for each in catalog.chains.list_manifests(stream, checkpoint)
    ]
    manifest, objects = stand_alone(chain, details)
    record, beginning = catalog.streams.get(stream), _find_beginning(position)
    if beginning is not None:
        beginning = only_of(beginning, sources_of([definition, *(one.definition for one in before)]))
    # The next checkpoint has the id after `FIRST` there, and sinks shall know it by the same id as here.
    offset = record.sink_offset + checkpoint - FIRST
    return manifest, objects, Continuation(beginning, offset, record.default_sink)


def _find_beginning(position: InputPosition) -> Step | None:
    """Return where the sources begin, with the files of all steps before the newest two, as if those were pruned."""
    newest = {step.step for step in position.newest}
    known = NO_ENTRIES if position.beginning is None else position.beginning.sources
    read = [step.sources for step in position.entries if step.step not in newest]
    sources = merge([known, *read]) if read else known
    if position.beginning is None:
        return None if sources == NO_ENTRIES else Step(0, BEFORE_FIRST, "", sources)
    return Step(0, position.beginning.batch_id, position.beginning.offsets, sources)


def _to_step(step: Step) -> Step:
    return Step(step.step, step.batch_id, step.offsets, step.sources, step.kind, step.digests, step.clock)


def _copy(source: Store, target: Store, objects: Mapping[str, StoredObject], others: set[str]) -> int:
    """Copy objects to a place that holds nothing but them and `others`; return how many were not there yet."""
    there = {name for name, _ in target.list("")}
    if foreign := sorted(there - objects.keys() - others):
        raise _not_empty_error(target, f"it holds {foreign[0]}")

    def copy(name: str) -> bool:
        if name in there:
            check_copy(target, StoredObject(name, objects[name].bytes, objects[name].checksum))
            return False
        copy_object(source, objects[name], target, name)
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(copy, objects))


def _not_empty_error(target: Store, why: str) -> UsageError:
    return UsageError(f"{target.label} holds something else than this savepoint: {why}; name an empty place")
