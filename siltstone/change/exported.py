"""An exported savepoint: a checkpoint in a place of its own, which needs no warehouse, no catalog and no chain.

    <URL>/
    |- <stream>/00000001/000000000001/     its objects, under the names of the first checkpoint of a warehouse
    |  |- manifest.arrow                       names all of them, with their checksums and the digests of the state
    |  '- ...
    '- _savepoint/export                       names the manifest, and where input and sinks continue; written last

Without the last object there is no savepoint: an export that was killed is not taken for a whole one. The place is a
store of any kind, and holds nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siltstone.catalog.extract_coding import seal_values, unseal
from siltstone.catalog.records.commit_details import (
    CommitDetails,
    check_stored,
    decode_details,
    decode_steps,
    encode_steps,
)
from siltstone.catalog.records.imports import Continuation
from siltstone.catalog.records.source_entries import check_sources
from siltstone.catalog.records.steps import BEFORE_FIRST, Step
from siltstone.catalog.records.streams import TABLE
from siltstone.chains.policy_rules import PolicyState
from siltstone.change.stand_alone import move
from siltstone.decoding import check_integer, check_object, check_text, translate_decode_errors
from siltstone.errors import CorruptObject, StateError, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import MAX_ID, Form, StoredObject, check_name
from siltstone.operator import SOURCE
from siltstone.store.base import Store
from siltstone.store.paths import EXPORT, CheckpointPath, is_built_here

FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """What the last object of an export says.

    Attributes:
        stream, savepoint, checkpoint: what was exported; `checkpoint` is its id in the warehouse that it comes from.
        origin: the stream below whose directory the sources keep files, if they keep any in the warehouse.
        manifest: the manifest, with the digest of the state.
    """

    stream: str
    savepoint: str
    checkpoint: int
    origin: str
    manifest: StoredObject
    digest: str
    continuation: Continuation


def encode_exported(exported: Exported) -> bytes:
    """Encode the last object of an export; the same savepoint has the same bytes."""
    goes_on, manifest = exported.continuation, exported.manifest
    return seal_values(
        {
            "format": FORMAT,
            "stream": exported.stream,
            "savepoint": exported.savepoint,
            "checkpoint": exported.checkpoint,
            "origin": exported.origin,
            "manifest": [manifest.name, manifest.bytes, manifest.checksum],
            "digest": exported.digest,
            "beginning": None if goes_on.beginning is None else encode_steps([goes_on.beginning]),
            "sink_offset": goes_on.sink_offset,
            "default_sink": goes_on.default_sink,
        }
    )


def read_exported(store: Store) -> Exported:
    """Read the last object of an export.

    Raises:
        UsageError: there is no savepoint, or its export did not finish.
        CorruptObject, NewerFormat: it is damaged, or a newer Siltstone wrote it.
        Unreachable: the store failed.
    """
    found = {name: size for name, size in store.list(EXPORT) if name == EXPORT}
    if not found:
        raise UsageError(
            f"there is no exported savepoint at {store.label}: check the URL, and repeat an export that did not finish"
        )
    what = f"object {EXPORT} in {store.label}"
    return decode_exported(store.read_range(EXPORT, 0, found[EXPORT]).to_pybytes(), what)


def decode_exported(data: bytes, name: str) -> Exported:
    """Decode the last object of an export, which errors call `name`.

    Raises:
        CorruptObject, NewerFormat: it is damaged, or a newer Siltstone wrote it.
    """
    with translate_decode_errors(name, "an exported savepoint"):
        return _decode(unseal(data, name))


def _decode(values: Mapping[str, Any]) -> Exported:
    stream, beginning = check_name("stream", values["stream"]), values["beginning"]
    manifest = check_stored(*values["manifest"])
    if manifest.name != CheckpointPath(stream, 1, 1).manifest():
        raise ValueError(f"{manifest.name} is not the manifest of an export")
    if beginning is not None:
        [beginning] = decode_steps(check_object(beginning, "the beginning"))
        check_integer(beginning.step, 0, 0, "the step of the beginning")
        check_sources(beginning.sources)
    sink = values["default_sink"]
    if sink not in (None, TABLE):
        raise ValueError(f"its sinks are {str(sink)[:40]!r}")
    return Exported(
        stream=stream,
        savepoint=check_name("savepoint", values["savepoint"]),
        checkpoint=check_integer(values["checkpoint"], 1, MAX_ID, "a checkpoint"),
        origin=check_name("stream", values["origin"]),
        manifest=manifest,
        digest=check_text(values["digest"], "a digest"),
        continuation=Continuation(
            beginning=beginning,
            sink_offset=check_integer(values["sink_offset"], 0, MAX_ID, "sink_offset"),
            default_sink=sink,
        ),
    )


def read_exported_manifest(store: Store, exported: Exported) -> tuple[Manifest, CommitDetails]:
    """Read the manifest of an export and what its commit added, and check that a stream can begin with them.

    Nobody vouches for an export, so nothing of it is used that an export does not need: it names nothing outside its
    own place, and brings steps and a definition, but no outputs.

    Raises:
        CorruptObject, NewerFormat: it is damaged, or a newer Siltstone wrote it.
        Unreachable: the store failed.
    """
    manifest, name = read_manifest(store, exported.manifest), exported.manifest.name
    own = CheckpointPath(exported.stream, 1, 1)
    for stored in manifest.objects:
        if CheckpointPath.of(stored.name) != own or not is_built_here(stored.name):
            raise CorruptObject(f"object {name} was altered: it names an object {stored.name!r}")
    if unnamed := sorted({handle.object for handle in manifest.handles} - {o.name for o in manifest.objects}):
        raise CorruptObject(f"object {name} was altered: it does not list its object {unnamed[0]!r}")
    if any(handle.form is Form.FILES for handle in manifest.handles):
        raise CorruptObject(f"object {name} was altered: no export has files of RocksDB")
    if manifest.digest != exported.digest or manifest.materialization:
        raise CorruptObject(f"object {name} was altered: it is not of the exported state")
    details = decode_details([bytes(part) for part in manifest.commit], name)
    try:
        with translate_decode_errors(f"object {name}", "the manifest of an export"):
            move(manifest, own)
            _check_steps(details.steps, manifest.step)
            _check_definition(details.definition, manifest.operators)
            for chain in (chain for of in manifest.chains.values() for chain in of.values()):
                PolicyState.from_json(chain)
    except CorruptObject:
        raise
    except StateError as error:
        raise CorruptObject(f"object {name} was altered: {error}") from error
    dropped = [each for each in details.dropped if each.startswith(f"{SOURCE}.")]
    return manifest, CommitDetails(steps=details.steps, definition=details.definition, dropped=dropped)


def _check_steps(steps: Sequence[Step], newest: int) -> None:
    for step in steps:
        check_integer(step.step, 1, newest, "a step")
        if step.batch_id is not None:
            check_integer(step.batch_id, BEFORE_FIRST, MAX_ID, "a batch")
        check_sources(step.sources)


def _check_definition(definition: Mapping[str, Any] | None, operators: Mapping[str, Any]) -> None:
    """Check that a definition is that of the state: a run compares its code with the definition alone."""
    recorded = check_object(definition, "the definition")["operators"]
    for operator, of in operators.items():
        there = check_object(recorded.get(operator), f"the definition of {operator}")
        if there["key"] != of["key"]:
            raise ValueError(f"the definition has another key of {operator} than the state")
        for variable, shape in of["variables"].items():
            if there["variables"].get(variable, {}).get("tables") != shape["tables"]:
                raise ValueError(f"the definition has another {operator}.{variable} than the state")
