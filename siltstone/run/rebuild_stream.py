"""Replay one stream into a catalog that is being rebuilt, from its newest extract and its manifests.

    retained    the checkpoints that the extract lists, in order, with the materializations at them
    log         the steps that no manifest holds
    later       what the extract's epoch committed after it: manifests that each name the one before
    outputs     those that sinks have, as the newest manifest says, and as missing staged objects show
    marks       checkpoints that were being deleted

Everything goes through the operations that made the lost catalog, at the times when they did.

An epoch writes a manifest only once the checkpoint before is committed. So only the newest manifest of the newest epoch
may not have been. It is taken over: all that it names is durable, and no run followed that does without it, since a run
begins with an extract under an epoch of its own. A run that ends writes an extract, too; no later manifest of its epoch
was committed. Manifests of other epochs that the extract does not list were fenced or given up, and never return.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pyarrow as pa

from siltstone.catalog.database import tables as t
from siltstone.catalog.extract_coding import decode_beginning, decode_steps_part
from siltstone.catalog.rebuilding import Rebuilding
from siltstone.catalog.records.commit_details import CommitDetails, decode_details
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.extracts import Extract
from siltstone.catalog.records.steps import StepRecord
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, NewerFormat, StateError, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.format.manifests import read_manifest
from siltstone.log import get_logger
from siltstone.model import StoredObject
from siltstone.restore.live_rules import LiveHandles, shared_names
from siltstone.run.pending import commit_of
from siltstone.store.ahead import read_ahead
from siltstone.store.base import Store
from siltstone.store.checksums import algorithm_of, checksum_of
from siltstone.store.paths import CheckpointPath

_LOG = get_logger(__name__)
_TELL_EACH = 500
"""checkpoints between two lines of progress"""
_LEASE = timedelta(days=1)
Item = TypeVar("Item")


@dataclass
class Clock:
    """The clock of a draft catalog: it shows when the replayed event happened. `now` is the rebuild's own clock."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    at: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.now()

    def __call__(self) -> datetime:
        """Return the time."""
        return self.at


@dataclass(frozen=True, slots=True)
class RebuiltStream:
    """What was rebuilt of one stream.

    Attributes:
        newest: its newest checkpoint, 0 before the first.
        checkpoints: how many checkpoints it has; `deleting` more were being deleted.
        adopted: how many of them are newer than the extract; the last of these may not have been committed.
        savepoints: their names.
        outstanding: how many outputs its sinks do not have yet.
        steps: how many steps its input log has.
    """

    stream: str
    newest: int
    checkpoints: int
    deleting: int
    adopted: int
    savepoints: tuple[str, ...]
    outstanding: int
    steps: int

    @property
    def summary(self) -> str:
        """One line for people."""
        line = f"{self.stream}: {self.checkpoints:,} checkpoints up to {self.newest}, {self.steps:,} steps"
        line += f", savepoints {', '.join(self.savepoints)}" if self.savepoints else ""
        return line + (f", {self.outstanding} outputs to deliver" if self.outstanding else "")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's manifest in the store, its bytes, and the details of its commit."""

    manifest: Manifest
    stored: StoredObject
    data: pa.Buffer
    details: CommitDetails

    def follows(self, before: StoredObject | None, data: pa.Buffer | None) -> bool:
        """Whether it names `before` as the previous checkpoint's manifest; for None, whether it names none.

        Args:
            data: the bytes of `before`; None if they are damaged or there are none.
        """
        previous = self.details.previous.manifest if self.details.previous else None
        if previous is None or before is None:
            return previous is None and before is None
        if (previous.name, previous.bytes) != (before.name, before.bytes):
            return False
        # Its algorithm may be that of another option of the warehouse.
        algorithm = algorithm_of(previous.checksum)
        if data is None:
            return algorithm != algorithm_of(before.checksum) or previous.checksum == before.checksum
        return checksum_of(data, algorithm) == previous.checksum


def rebuild_stream(place: OpenWarehouse, extract: Extract, clock: Clock, tell: Callable[[str], None]) -> RebuiltStream:
    """Replay a stream into the catalog of `place`, which has its parent, if it is a fork, and nothing of it.

    Args:
        clock: the catalog's clock.
        tell: called with what is being done, for people.

    Raises:
        CorruptObject, NewerFormat: an object that it is made of is missing, damaged or newer.
        Unreachable: the store failed.
    """
    replay = _Replay(place, extract, clock, tell)
    replay.add_retained()
    replay.add_steps()
    adopted = replay.add_later()
    replay.settle_outputs()
    replay.mark_deleted()
    catalog, stream = place.catalog, extract.stream
    retained, newest = catalog.checkpoints.list_retained(stream), catalog.checkpoints.last_id(stream)
    return RebuiltStream(
        stream=stream,
        newest=newest,
        checkpoints=sum(not each.deleted for each in retained),
        deleting=sum(each.deleted for each in retained),
        adopted=adopted,
        savepoints=tuple(savepoint.name for savepoint in catalog.savepoints.list(stream)),
        outstanding=len(catalog.outbox.list(stream, outstanding=True)),
        steps=len(catalog.input_log.list(stream, newest)),
    )


class _Replay:
    """The replay of one stream."""

    def __init__(self, place: OpenWarehouse, extract: Extract, clock: Clock, tell: Callable[[str], None]) -> None:
        self._extract, self._clock, self._tell = extract, clock, tell
        self._store, self._catalog, self._stream = place.warehouse.store, place.catalog, extract.stream
        self._rows = Rebuilding(place.catalog.transactions)
        self._live = LiveHandles()
        self._count = 0
        self._open: frozenset[str] = frozenset()
        """names of the objects that the newest checkpoint needs, and of those that it wrote"""
        self._newest: Found | None = None
        self._later: Found | None = None
        """the newest checkpoint that the extract does not have"""
        self._marked = {id for each in extract.retained if each.marked for id in range(each.first, each.last + 1)}
        self._materializations: dict[int, dict[str, Mapping[str, Any]]] = {}
        """checkpoint -> operator -> the newest completed materialization"""
        for row in extract.rows[t.materialization.name]:
            self._materializations.setdefault(row["checkpoint"], {})[row["operator"]] = row

    def add_retained(self) -> None:
        """Add the rows of the extract and its checkpoints, with their materializations and reference copies."""
        self._rows.begin(self._extract)
        paths = [each.path(id) for each in self._extract.retained for id in range(each.first, each.last + 1)]
        times = {each.last: each.committed_at for each in self._extract.retained}
        bare = {row["id"]: row for row in self._extract.rows[t.checkpoint.name]}
        for (path, found), after in with_next(self._read_all(paths)):
            id = path.checkpoint
            self._report()
            if found is None:
                if id in bare and any(self._is_stored(row) for row in self._materializations.get(id, {}).values()):
                    self._rows.add_bare_checkpoint(bare[id])
                    self._add_materializations(id)
                continue
            self._clock.at = times.get(id) or self._committed_at(found, after[1] if after else None)
            kept = [step for step in found.details.steps if step.step >= self._extract.oldest_step]
            commit = self._commit(found, CommitDetails(steps=kept))
            self._rows.set_epoch(self._stream, found.manifest.epoch)
            self._rows.add_checkpoint(self._stream, found.manifest.epoch, commit)
            self._add_materializations(id)
            self._newest = found
        for copy in self._extract.copies:
            self._clock.at = copy.taken_at
            self._rows.set_epoch(self._stream, copy.epoch)
            self._catalog.reference_copies.add(self._stream, copy.epoch, copy.checkpoint, copy.objects, copy.rows)
        self._rows.add_savepoints(self._extract)
        self._rows.set_epoch(self._stream, self._extract.epoch)

    def add_steps(self) -> None:
        """Add the steps that no manifest holds."""
        steps: list[StepRecord] = []
        for part in self._extract.parts:
            steps += decode_steps_part(self._store.read(part.stored).to_pybytes(), part.stored.name)
        kept = [step for step in steps if step.step >= self._extract.oldest_step]
        stored = self._extract.beginning
        beginning = None if stored is None else decode_beginning(self._store.read(stored).to_pybytes(), stored.name)
        self._rows.add_steps(self._stream, beginning, [*kept, *self._extract.logged])

    def add_later(self) -> int:
        """Add what the extract's epoch committed after it; return how many checkpoints that is."""
        if self._extract.ended:
            return 0
        count = 0
        first = CheckpointPath(self._stream, self._extract.epoch, self._extract.newest + 1)
        before = (self._newest.stored, self._newest.data) if self._newest else (None, None)
        for found, after in with_next(read_later(self._store, first, *before)):
            self._report()
            self._clock.at = self._committed_at(found, after)
            try:
                self._catalog.commits.add(self._stream, self._extract.epoch, self._commit(found, found.details))
            except (UsageError, StateError) as error:
                note_refused(self._stream, found, error)
                break
            self._later = found
            count += 1
        return count

    def settle_outputs(self) -> None:
        """Mark the outputs as delivered that sinks have."""
        settle_outputs(self._catalog, self._store, self._stream, self._extract.epoch, self._later)

    def mark_deleted(self) -> None:
        """Mark the checkpoints that were being deleted, and drop the rows of what was deleted or is not shared."""
        catalog, stream, epoch = self._catalog, self._stream, self._extract.epoch
        here = sorted(self._marked & {each.id for each in catalog.checkpoints.list_retained(stream)})
        if not here:
            return
        catalog.deletions.mark(stream, epoch, here)
        forked_at = self._extract.rows[t.stream.name][0]["forked_at"] or 0
        objects = catalog.objects.list(stream, here)
        prefixes = {path.prefix for stored in objects if (path := CheckpointPath.of(stored.name))}
        there = {name for prefix in sorted(prefixes) for name, _ in self._store.list(prefix)}
        gone = [
            stored.name
            for stored in objects
            if stored.name not in there or (stored.checkpoint < forked_at and not stored.is_needed_by(forked_at))
        ]
        catalog.deletions.forget(stream, epoch, (), gone)

    def _report(self) -> None:
        self._count += 1
        if self._count % _TELL_EACH == 0:
            self._tell(f"{self._stream}: {self._count:,} checkpoints")

    def _commit(self, found: Found, details: CommitDetails) -> CheckpointCommit:
        """Make the record of a checkpoint, which replaces what earlier ones wrote."""
        self._live.apply(found.manifest, found.stored.name)
        needed = self._live.needed | self._live.own
        replaced, self._open = self._open - needed, needed
        # What a materialization replaced may have come later than the checkpoints that refer to it again.
        if again := shared_names(found.manifest):
            self._rows.keep_open(self._stream, again)
        return replace(commit_of(found.manifest, found.stored, details), replaced=sorted(replaced))

    def _add_materializations(self, checkpoint: int) -> None:
        """Add the newest materialization of each operator at a checkpoint."""
        rows = self._materializations.get(checkpoint, {}).values()
        for row in sorted(rows, key=lambda row: row["ended_at"]):
            stored = StoredObject(row["manifest"], row["manifest_bytes"], row["manifest_checksum"])
            if checkpoint in self._marked and not self._is_stored(row):
                continue  # it was deleted, since no other checkpoint needs it
            manifest = read_manifest(self._store, stored, self._stream)
            before = self._live.needed
            replaced = self._live.apply(manifest, stored.name)
            unneeded = before - self._live.needed
            self._open = self._live.needed | self._live.own
            catalog, id = self._catalog, row["id"]
            self._clock.at = row["began_at"]
            catalog.leases.take(self._stream, [checkpoint], id=id, who=row["who"], lasts=_LEASE)
            catalog.materializations.begin(self._stream, row["operator"], checkpoint, id=id, who=row["who"])
            self._clock.at = max(row["began_at"], row["ended_at"])
            catalog.leases.renew(id, _LEASE)
            catalog.materializations.complete(
                self._stream,
                id,
                stored,
                manifest.objects,
                replaced=replaced,
                unneeded=unneeded,
                rows_=row["rows"],
                bytes_=row["bytes"],
                seconds=row["seconds"],
            )
            catalog.leases.release(id)
            self._rows.keep_open(self._stream, self._live.needed & {stored.name, *(o.name for o in manifest.objects)})

    def _is_stored(self, materialization: Mapping[str, Any]) -> bool:
        return not is_missing(self._store, materialization["manifest"])

    def _committed_at(self, found: Found, after: Found | None) -> datetime:
        return committed_at(self._store, found, after) or self._clock.at

    def _read_all(self, paths: Sequence[CheckpointPath]) -> Iterator[tuple[CheckpointPath, Found | None]]:
        """Read the manifests of retained checkpoints; None for those that were deleted."""
        for path, found in zip(paths, read_ahead(self._read, paths), strict=True):
            if found is None and path.checkpoint not in self._marked:
                raise CorruptObject(
                    f"object {path.manifest()}, the manifest of checkpoint {path.checkpoint} of stream "
                    f"{self._stream}, is missing",
                    advice="bring it back, or restore a backup of the catalog",
                )
            yield path, found

    def _read(self, path: CheckpointPath) -> Found | None:
        return read_found(self._store, self._stream, path)


def read_found(store: Store, stream: str, path: CheckpointPath) -> Found | None:
    """Read a manifest of a checkpoint of `stream` and verify it; None if there is none.

    Args:
        path: the checkpoint as its writer named it, which for the first ones of a fork is another stream.

    Raises:
        CorruptObject: it is cut or altered, or another one.
    """
    name = path.manifest()
    size = dict(store.list(name)).get(name)
    if size is None:
        return None
    data = store.read_range(name, 0, size)
    manifest = decode_manifest(data, name)
    if (manifest.stream, manifest.epoch, manifest.checkpoint) != (path.stream, path.epoch, path.checkpoint):
        raise CorruptObject(f"object {name} was altered: it is a manifest of stream {manifest.stream}")
    stored = StoredObject(name, size, checksum_of(data, store.checksums))
    details = decode_details(manifest.commit, name)
    return Found(replace(manifest, stream=stream, commit=()), stored, data, details)


def read_later(
    store: Store, first: CheckpointPath, before: StoredObject | None, data: pa.Buffer | None
) -> Iterator[Found]:
    """Read a writer epoch's manifests from a checkpoint on, until one does not follow the one before.

    Args:
        before: the manifest of the checkpoint before the first, and its `data`, as in `Found.follows`.
    """
    path = first
    while True:
        found = read_found(store, path.stream, path)
        if found is None or not found.follows(before, data):
            return
        yield found
        before, data, path = found.stored, found.data, replace(path, checkpoint=path.checkpoint + 1)


def committed_at(store: Store, found: Found, after: Found | None) -> datetime | None:
    """Return when a checkpoint was committed: as the next one says, or else when its manifest was stored."""
    if after and after.details.previous and after.follows(found.stored, found.data):
        return after.details.previous.committed_at
    return store.modified_at([found.stored.name]).get(found.stored.name)


def note_refused(stream: str, found: Found, error: UsageError | StateError) -> None:
    """Log that a checkpoint whose manifest is stored is not taken over. An acknowledged commit would succeed again on
    the same rows, so the run's own commit was refused, too.

    Raises:
        CorruptObject, NewerFormat: the error is about an object that was read for it.
    """
    if isinstance(error, CorruptObject | NewerFormat):
        raise error
    checkpoint = found.manifest.checkpoint
    _LOG.warning("a checkpoint is not taken over", stream=stream, checkpoint=checkpoint, error=str(error))


def settle_outputs(catalog: Catalog, store: Store, stream: str, epoch: int, later: Found | None) -> None:
    """Mark the outputs as delivered that sinks have.

    If the store lacks objects of the newest checkpoint, a sweep may have deleted them before its commit, which was then
    refused. A recovery gives that checkpoint up, and its outputs are staged again with it.

    Args:
        later: the newest of the checkpoints that were found in the store; its manifest names what was outstanding.
    """
    lacking = _find_lacking(store, later) if later else None
    if later and lacking:
        checkpoint = later.manifest.checkpoint
        _LOG.warning(
            "a checkpoint is taken over that is damaged", stream=stream, checkpoint=checkpoint, missing=lacking
        )
    looked = later.details.outstanding if later else None
    outstanding = None if looked is None else set(looked)
    for output in catalog.outbox.list(stream, outstanding=True):
        own = later is not None and output.checkpoint == later.manifest.checkpoint
        delivered = outstanding is not None and not own and (output.checkpoint, output.name) not in outstanding
        if own and lacking:
            continue
        # Only what sinks have is ever deleted.
        if delivered or any(is_missing(store, stored.name) for stored in output.objects):
            catalog.outbox.mark_delivered(stream, epoch, output.checkpoint, output.name)


def _find_lacking(store: Store, found: Found) -> str | None:
    """Return an object that a checkpoint wrote, by its manifest, and that the store does not have; None if none is."""
    path = CheckpointPath.of(found.stored.name)
    there = {name for name, _ in store.list(path.prefix)} if path else set[str]()
    return next((each.name for each in found.manifest.objects if each.name not in there), None)


def is_missing(store: Store, name: str) -> bool:
    """Whether the store has no object of this name."""
    return all(found != name for found, _ in store.list(name))


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yield each item with the next one, the last with None."""
    waiting: list[Item] = []
    for item in items:
        if waiting:
            yield waiting.pop(), item
        waiting.append(item)
    for last in waiting:
        yield last, None
