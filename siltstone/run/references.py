"""The references of one run: which objects of earlier checkpoints its next one no longer needs.

`restore.live_rules` decides this from the manifests. A run begins with the newest checkpoint's manifest, which is
enough for the objects of that checkpoint and later ones. It reads those of the whole chain once, and only if a
checkpoint has bases of some variables but not of all, or the catalog keeps files: where every chain begins anew, no
earlier object is needed. Only a run knows that no later checkpoint refers to a file again that a materialization has
replaced (`live_rules.shared_names`), and it may write nothing but deltas.
"""

from collections.abc import Sequence

from siltstone.catalog.repository import Catalog
from siltstone.errors import CorruptObject, StateError
from siltstone.format.manifest import Manifest
from siltstone.model import Form, StoredObject
from siltstone.restore.live_rules import LiveHandles, replaces, state_handles
from siltstone.run.manifests import RunManifests
from siltstone.store.ahead import read_ahead
from siltstone.store.paths import CheckpointPath, is_materialization_manifest, is_row_file


class RunReferences:
    """The references of one run of a stream; a run that fails must be opened again."""

    def __init__(self, stream: str, catalog: Catalog, manifests: RunManifests) -> None:
        self._stream, self._catalog, self._manifests = stream, catalog, manifests
        self._live = LiveHandles()
        self._is_whole = True
        """whether `_live` and `_open` are of all checkpoints, not only of those that this run has seen"""
        self._keeps_files = False
        """whether the checkpoint that the run began with needs files, as the catalog records it"""
        self._open: dict[str, int] = {}
        """name of an object that the catalog records as needed by the newest checkpoint -> who wrote it"""
        self._followed: set[str] = set()
        """names of the materializations' manifests that are in `_live`"""
        self._damaged = 0
        """the newest checkpoint with a damaged manifest: until all chains begin after it, what it wrote is kept"""

    def resume(self, manifest: Manifest, name: str) -> None:
        """Continue after the checkpoint that this manifest is of.

        Raises:
            Unreachable: the catalog failed.
        """
        self._live, self._is_whole = LiveHandles(), False
        self._live.apply(manifest, name)
        self._open = dict.fromkeys(self._live.own, manifest.checkpoint)
        kept = self._catalog.chains.list_objects(self._stream, manifest.checkpoint)
        self._keeps_files = any(is_row_file(stored.name) for stored in kept)

    def advance(self, manifest: Manifest, name: str) -> tuple[int, list[str]]:
        """Go on to a checkpoint that is about to be committed.

        Args:
            name: its manifest's object name.

        Returns:
            (the oldest checkpoint whose objects it needs, 0 if not known; names of further objects that it does not)

        Raises:
            StateError: it refers to a file that the checkpoint before it does not need.
            Unreachable: the store or the catalog failed.
        """
        variables = {(operator, variable) for operator, of in manifest.digests.items() for variable in of}
        state = state_handles(manifest.handles)
        written = {(handle.operator, handle.variable) for handle in state}
        if written >= variables and all(map(replaces, state)):
            alone = LiveHandles()
            alone.apply(manifest, name)
            if alone.complete_from == manifest.checkpoint:
                self._live, self._is_whole, self._damaged, self._followed = alone, True, 0, set()
                self._open = dict.fromkeys(alone.own, manifest.checkpoint)
                return manifest.checkpoint, []
        replaced = self._keeps_files or any(map(replaces, state)) or not self._live.variables <= variables | written
        if replaced and not self._is_whole:
            self._live, self._is_whole = self._load(manifest.checkpoint - 1), True
        self._live.apply(manifest, name)
        needed = self._live.needed | self._live.own
        files = {handle.object for handle in state if handle.form is Form.FILES}
        if lost := sorted(files - self._live.own - self._open.keys()):
            raise StateError(f"checkpoint {manifest.checkpoint} refers to {lost[0]}, which may be deleted already")
        # 0 while none of the manifests mentions a variable: it may be in one that was not read.
        oldest = self._live.complete_from
        self._open |= dict.fromkeys(needed - self._open.keys(), manifest.checkpoint)
        if self._damaged >= oldest:
            return oldest, []
        unneeded = self._open.keys() - needed
        names = sorted(each for each in unneeded if self._open[each] >= oldest)
        for gone in unneeded:
            del self._open[gone]
        return oldest, names

    def follow(self, manifests: Sequence[StoredObject]) -> None:
        """Let chains begin with the materializations among what a restore of the newest checkpoint reads.

        It is the last to take them over, after `RunChains`.
        """
        for stored in manifests if self._is_whole else ():
            if is_materialization_manifest(stored.name) and stored.name not in self._followed:
                self._apply(self._live, stored, self._read(stored))
        self._manifests.take_over(manifests)

    def _load(self, newest: int) -> LiveHandles:
        """Return what a restore of checkpoint `newest` needs; nothing for 0."""
        live = LiveHandles()
        if newest:
            # Objects first: those of a materialization that completes now are then not open without being live.
            self._open = {o.name: o.checkpoint for o in self._catalog.chains.list_objects(self._stream, newest)}
            manifests = self._catalog.chains.list_manifests(self._stream, newest)
            read = list(zip(manifests, read_ahead(self._read, manifests), strict=True))
            # By checkpoint, and at each its own manifest first: so they are listed.
            for stored, manifest in sorted(read, key=lambda each: _checkpoint_of(each[0])):
                self._apply(live, stored, manifest)
        return live

    def _apply(self, live: LiveHandles, stored: StoredObject, manifest: Manifest | None) -> None:
        if manifest is None:
            self._damaged = max(self._damaged, _checkpoint_of(stored))
            return
        live.apply(manifest, stored.name)
        if manifest.materialization:
            self._followed.add(stored.name)
            self._open |= dict.fromkeys((stored.name, *(o.name for o in manifest.objects)), manifest.checkpoint)

    def _read(self, stored: StoredObject) -> Manifest | None:
        try:
            return self._manifests.read(stored)
        except CorruptObject:
            return None  # whoever restores it says so; here it only delays deletions


def _checkpoint_of(stored: StoredObject) -> int:
    path = CheckpointPath.of(stored.name)
    return path.checkpoint if path else 0
