"""Rebuild a catalog from manifests in memory, by the replay that `siltstone rebuild-catalog` uses."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pyarrow as pa

from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.format.manifest import Manifest
from siltstone.model import StoredObject
from siltstone.run import rebuild_stream
from siltstone.run.rebuild_stream import Clock, Found, _Replay
from siltstone.store.paths import CheckpointPath


class _Names:
    """A store of which only names are asked for."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        return [(name, 1) for name in self._names if name.startswith(prefix)]

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        return {}


class _InMemory(_Replay):
    manifests: Mapping[str, Manifest]

    def _read(self, path: CheckpointPath) -> Found | None:
        manifest, stored = self.manifests.get(path.manifest()), StoredObject(path.manifest(), 1, "xxh3-128:" + "0" * 32)
        return manifest and Found(manifest, stored, pa.py_buffer(b""), CommitDetails())


def rebuild_from_memory(lost: Catalog, stream: str, manifests: Mapping[str, Manifest], catalog: Catalog) -> None:
    """Rebuild a stream in an empty catalog; the store has the objects that the lost catalog refers to."""
    names = {stored.name for stored in lost.objects.list(stream)}
    place = SimpleNamespace(catalog=catalog, warehouse=SimpleNamespace(store=_Names(names)))
    extract = lost.extracts.take(stream).extract
    clock = cast(Clock, SimpleNamespace(at=datetime.now(UTC)))
    replay = _InMemory(cast(OpenWarehouse, place), extract, clock, print)
    replay.manifests = {name: manifest for name, manifest in manifests.items() if name in names}
    with patch.object(rebuild_stream, "read_manifest", lambda _, stored, __: manifests[stored.name]):
        replay.add_retained()
        replay.mark_deleted()
