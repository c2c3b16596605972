"""Import an exported savepoint: begin a stream of another warehouse with it.

    1  read what the export says, and prove it: compare every object with its checksum, rebuild the state, and compare
       every digest; nothing that the export says is used before it is known to be what a stream can begin with
    2  take the stream over, as a run does: register it, begin a writer epoch
    3  copy each object, verified on the way, and store the manifest
    4  commit the first checkpoint, its savepoint and the input position, in one transaction
    5  write the extract that has them: only then does the import survive the loss of the catalog's newest transactions

The stream has nothing before step 4. If the import is killed, it is repeated under the next epoch, which fences
the killed one; a sweep deletes what that had copied, as it does for a run that was killed before its first checkpoint.
If it fails between steps 4 and 5, repeating it writes the extract.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from siltstone.catalog.epochs import begin_epoch, check_new_name
from siltstone.catalog.extract_writer import read_newest_extract, try_write_extract, write_extract
from siltstone.catalog.records.commit_details import CommitDetails, PreviousCheckpoint, encode_details
from siltstone.catalog.records.imports import Continuation
from siltstone.catalog.records.source_entries import decode_sources
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.export_savepoint import AT_ONCE
from siltstone.change.exported import Exported, read_exported, read_exported_manifest
from siltstone.change.stand_alone import FIRST, move
from siltstone.errors import ProofFailed, Unreachable, UsageError
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.model import StoredObject, check_name
from siltstone.restore.export import restore_unit, unit_tasks, whole_digest
from siltstone.result import Result
from siltstone.retention.leases import this_process
from siltstone.retention.retention_rules import NEW_STREAM
from siltstone.retention.sweep import sweep_ended
from siltstone.run.pending import commit_of
from siltstone.store.base import Store
from siltstone.store.copying import copy_object, verify_object
from siltstone.store.open import open_store
from siltstone.store.paths import CheckpointPath

IMPORTED = "imported"
"""outcome of the epoch of an import"""


@dataclass(frozen=True)
class SavepointImport(Result):
    """A stream that begins with checkpoint `checkpoint`, which was `exported_checkpoint` of `exported_stream`."""

    stream: str
    savepoint: str
    checkpoint: int
    exported_stream: str
    exported_checkpoint: int
    digest: str
    rows: int
    objects: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ProvenExport:
    """An export whose state was rebuilt and proven; `rows` are those of its state."""

    store: Store
    exported: Exported
    manifest: Manifest
    details: CommitDetails
    rows: int


def prove_export(url: str) -> ProvenExport:
    """Read an exported savepoint, and prove its state; no warehouse is needed.

    Raises:
        UsageError: there is no savepoint, or its export did not finish.
        CorruptObject, ProofFailed: it is damaged; the message names the object.
        NewerFormat: a newer Siltstone wrote it.
        Unreachable: the store failed.
    """
    store = open_store(url)
    store.check(writable=False)
    exported = read_exported(store)
    manifest, details = read_exported_manifest(store, exported)
    tasks, _ = unit_tasks({FIRST: manifest}, FIRST, min(os.cpu_count() or 1, manifest.max_parallelism), None)
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda stored: verify_object(store, stored), manifest.objects))
        results = list(pool.map(lambda task: restore_unit(store, task), tasks))
    if whole_digest(results, manifest.max_parallelism) != exported.digest:
        raise ProofFailed(f"the savepoint at {store.label} does not have its recorded digest", advice="export it again")
    return ProvenExport(store, exported, manifest, details, sum(result.rows for result in results))


def import_savepoint(warehouse: OpenWarehouse, proven: ProvenExport, new: str | None = None) -> SavepointImport:
    """Begin a stream with an exported savepoint.

    Args:
        new: the stream's name here; None for the name that it had.

    Raises:
        UsageError: the name is not valid, or a stream of that name has begun here.
        WrongWarehouse: the store holds a stream of that name that the catalog does not know.
        CorruptObject: an object was damaged meanwhile; the stream has no checkpoint.
        Fenced: another process has taken the stream over meanwhile; the stream has no checkpoint of this import.
        Unreachable: a store or the catalog failed; repeat it.
    """
    start, exported = time.perf_counter(), proven.exported
    stream = check_name("stream", exported.stream if new is None else new)
    size = _find_committed(warehouse, proven, stream)
    if size is None:
        _check_free(warehouse, stream)
        size = _begin_stream(warehouse, proven, stream)
    if write_extract(warehouse, stream).newest < FIRST:
        raise Unreachable(f"the catalog has lost the import of stream {stream}, which it had acknowledged: repeat it")
    return SavepointImport(
        stream,
        exported.savepoint,
        FIRST,
        exported.stream,
        exported.checkpoint,
        proven.manifest.digest,
        proven.rows,
        len(proven.manifest.objects),
        size,
        round(time.perf_counter() - start, 3),
    )


def _find_committed(warehouse: OpenWarehouse, proven: ProvenExport, stream: str) -> int | None:
    """Return the bytes of the checkpoint that an earlier import of the savepoint committed, without its extract.

    None if no import did.
    """
    catalog, savepoint = warehouse.catalog, proven.exported.savepoint
    if all(each.name != stream for each in catalog.streams.list()):
        return None
    if (savepoint, FIRST) not in {(each.name, each.checkpoint) for each in catalog.savepoints.list(stream)}:
        return None
    record, extract = catalog.checkpoints.get(stream, FIRST), read_newest_extract(warehouse.warehouse.store, stream)
    lacks = extract is not None and extract.newest < FIRST
    return record.bytes if lacks and record.digest == proven.manifest.digest else None


def _begin_stream(warehouse: OpenWarehouse, proven: ProvenExport, stream: str) -> int:
    """Register the stream and commit its first checkpoint; return its bytes."""
    catalog, exported = warehouse.catalog, proven.exported
    definition, max_parallelism = proven.details.definition, proven.manifest.max_parallelism
    assert definition is not None, "the definition was checked"
    catalog.streams.register(stream, max_parallelism, definition, NEW_STREAM.to_record())
    who = f"{this_process()} imports savepoint {exported.savepoint} of {exported.stream}"
    epoch, outcome = begin_epoch(warehouse, stream, who), "failed"
    try:
        size = _add(warehouse, proven, CheckpointPath(stream, epoch, FIRST))
        outcome = IMPORTED
    finally:
        with suppress(Unreachable):
            catalog.runs.end(stream, epoch, outcome)
            sweep_ended(warehouse, stream, epoch)
            if outcome != IMPORTED:
                try_write_extract(warehouse, stream)
    return size


def _check_free(warehouse: OpenWarehouse, stream: str) -> None:
    """Check that no stream of this name has begun, other than by an import that did not finish."""
    check_new_name(warehouse, stream)
    catalog = warehouse.catalog
    record = next((each for each in catalog.streams.list() if each.name == stream), None)
    if record is None:
        return
    began = catalog.input_log.get_position(stream, 0).beginning is not None
    if began or record.forked_from is not None or catalog.checkpoints.list_retained(stream):
        raise UsageError(f"stream {stream} exists here already: import the savepoint under another name (--as)")


def _add(warehouse: OpenWarehouse, proven: ProvenExport, path: CheckpointPath) -> int:
    """Copy the objects and commit the checkpoint; return its bytes."""
    catalog, store, exported = warehouse.catalog, warehouse.warehouse.store, proven.exported

    def localize(step: Step) -> Step:
        return replace(step, sources=_sources_below(step.sources, exported.origin, path.stream))

    # It follows a checkpoint of another warehouse, so nobody takes it over from its manifest alone, which does not say
    # how input and sinks go on: if this commit is lost, or without an extract, the import is repeated.
    previous = PreviousCheckpoint(exported.manifest, catalog.now())
    details = replace(proven.details, steps=[localize(step) for step in proven.details.steps], previous=previous)
    manifest = replace(move(proven.manifest, path), commit=encode_details(details))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = zip(proven.manifest.objects, manifest.objects, strict=True)
        list(pool.map(lambda pair: copy_object(proven.store, pair[0], store, pair[1].name), pairs))
    stored: StoredObject = store.put(path.manifest(), encode_manifest(manifest))
    commit = replace(commit_of(manifest, stored, details), oldest_needed=FIRST)
    beginning = exported.continuation.beginning
    continuation: Continuation = replace(
        exported.continuation, beginning=None if beginning is None else localize(beginning)
    )
    catalog.imports.add(path.stream, path.epoch, commit, continuation, exported.savepoint)
    return commit.bytes


def _sources_below(sources: str, origin: str, stream: str) -> str:
    """Return entries of sources' logs whose files in the warehouse are below the directory of `stream`.

    The entries name the warehouse by a placeholder (`spark.source_log`), so only the stream's name in them changes.
    """
    if origin == stream:
        return sources
    in_warehouse = re.compile(rf'^(\{{"path":"file:(?://)?\{{[a-z-]+\}}/source/){re.escape(origin)}/', re.MULTILINE)
    moved: Mapping[str, Any] = {
        source: {str(number): in_warehouse.sub(rf"\g<1>{stream}/", text) for number, text in numbered.items()}
        for source, numbered in decode_sources(sources).items()
    }
    return json.dumps(moved)
