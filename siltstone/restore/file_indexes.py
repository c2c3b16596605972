"""The `.files` objects of a checkpoint: those whose files the next one may refer to again (`run.persist_files`)."""

from collections.abc import Iterable, Sequence

from siltstone.errors import CorruptObject
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, with_materializations
from siltstone.model import Form, Handle, KeyGroupRange, StoredObject
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath, is_files_index, is_materialization_manifest


def file_indexes(handles: Iterable[Handle]) -> dict[str, dict[KeyGroupRange, str]]:
    """Return operator -> key groups of a subtask -> the name of the `.files` object with its files."""
    found: dict[str, dict[KeyGroupRange, str]] = {}
    for handle in handles:
        if handle.form is Form.FILES and is_files_index(handle.object):
            found.setdefault(handle.operator, {})[handle.key_groups] = handle.object
    return found


def read_handles(store: Store, manifest: Manifest, chain: Sequence[StoredObject]) -> Sequence[Handle]:
    """Return the handles that a restore of a checkpoint reads, materializations in place of what they replaced.

    Other files are not proven, and a rebuilt catalog has not kept them.

    Args:
        chain: the manifests that the restore reads. If one of them is damaged, the result is empty.
    """
    materialized = [stored for stored in chain if _is_materialized_at(stored.name, manifest.checkpoint)]
    try:
        whole = [manifest, *(read_manifest(store, stored, manifest.stream) for stored in materialized)]
    except CorruptObject:
        return ()
    return with_materializations(whole)[manifest.checkpoint].handles


def _is_materialized_at(name: str, checkpoint: int) -> bool:
    path = CheckpointPath.of(name) if is_materialization_manifest(name) else None
    return path is not None and path.checkpoint == checkpoint
