"""Read manifests from a store, and look up what they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from siltstone.errors import CorruptObject
from siltstone.format.manifest import Manifest
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.model import Kind, StoredObject
from siltstone.state.schema import TableSchema
from siltstone.store.ahead import read_ahead
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath, materialization_of


def schemas_of(manifest: Manifest, operator: str) -> dict[str, TableSchema]:
    """Return the schemas of an operator's tables, as recorded at a checkpoint."""
    variables = manifest.operators[operator]["variables"].values()
    return {name: TableSchema.from_json(shape) for v in variables for name, shape in v["tables"].items()}


def variables_of(manifest: Manifest, operator: str) -> dict[tuple[str, str], Kind]:
    """Return (operator, table or opaque variable) -> its kind, as recorded at a checkpoint."""
    return {(operator, name): kind for name, kind in manifest.variables[operator].items()}


def opaque_of(manifest: Manifest, operator: str) -> tuple[str, ...]:
    """Return an operator's opaque variables (those without tables), as recorded at a checkpoint."""
    return tuple(name for name, kind in manifest.variables[operator].items() if kind is Kind.OPAQUE)


def read_manifest(store: Store, stored: StoredObject, stream: str | None = None) -> Manifest:
    """Read one manifest.

    Args:
        stream: the stream to set in it, since a fork begins with manifests of another stream; None keeps the writer's.

    Raises:
        CorruptObject: it is missing, cut or altered, or another manifest, or its digest is not the catalog's.
        NewerFormat: a newer Siltstone wrote it.
    """
    return _decode(store.read(stored), stored, stream)


def read_many(store: Store, stored: Sequence[StoredObject], stream: str | None = None) -> list[Manifest]:
    """Read manifests, in order.

    Threads fetch them and then this one decodes them, since threads that take turns at Python take twice as long.

    Raises:
        CorruptObject, NewerFormat: as `read_manifest`.
        Unreachable: one of them cannot be fetched, which is told first.
    """
    fetched = list(read_ahead(store.read, stored))
    return [_decode(data, each, stream) for data, each in zip(fetched, stored, strict=True)]


def _decode(data: pa.Buffer, stored: StoredObject, stream: str | None) -> Manifest:
    manifest = decode_manifest(data, stored.name)
    _check_expected(manifest, stored)
    return manifest if stream is None else replace(manifest, stream=stream)


def _check_expected(manifest: Manifest, stored: StoredObject) -> None:
    """Compare a manifest's content with its name and with the catalog.

    Its checksum already proves this, unless it is xxh3-128, which can be forged.

    Raises:
        CorruptObject: they differ.
    """
    path, said = CheckpointPath.of(stored.name), (manifest.stream, manifest.epoch, manifest.checkpoint)
    other = path is not None and (path.stream, path.epoch, path.checkpoint) != said
    if other or (materialization_of(stored.name) or "") != manifest.materialization:
        raise CorruptObject(
            f"object {stored.name} was altered: it is the manifest of checkpoint {manifest.checkpoint} of "
            f"{manifest.stream}, epoch {manifest.epoch}"
        )
    if stored.digest is not None and manifest.digest != stored.digest:
        raise CorruptObject(
            f"object {stored.name} was altered: its digest is {manifest.digest}, the catalog has {stored.digest}"
        )


def read_manifests(store: Store, stored: Sequence[StoredObject], stream: str | None = None) -> dict[int, Manifest]:
    """Read checkpoint id -> manifest; bases of materializations among them replace what they materialized.

    Args:
        stream: see `read_manifest`.

    Raises:
        CorruptObject: one of them is missing, cut or altered.
    """
    return with_materializations(read_many(store, stored, stream))


def with_materializations(read: Sequence[Manifest]) -> dict[int, Manifest]:
    """Return checkpoint id -> manifest, given those of checkpoints and of the materializations in their chains."""
    manifests = {m.checkpoint: m for m in read if not m.materialization}
    for materialized in sorted((m for m in read if m.materialization), key=lambda m: m.checkpoint):
        at = materialized.checkpoint
        # Everything else that the checkpoint wrote may have been replaced since.
        manifests[at] = manifests[at].with_bases(materialized) if at in manifests else materialized
    return manifests


def objects_of(manifests: Mapping[int, Manifest]) -> list[StoredObject]:
    """Return every object in the manifests."""
    return [stored for manifest in manifests.values() for stored in manifest.objects]
