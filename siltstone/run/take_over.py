"""Take a stream over: bring the catalog up to the store first, then begin a writer epoch.

A database may lose transactions that it had acknowledged: a standby that takes over without the newest ones, or a
backup that was taken during a run. The store knows better. A run stores a manifest before each commit, and an extract
with each other change, and both are complete. So before an epoch begins, the catalog follows the store:

    extract     newer than the catalog's newest: the stream's rows become those that `rebuild-catalog` would make
    manifests   those that the epoch of the newest extract stored after the catalog's newest checkpoint, each naming the
                one before: they are committed in the name of that epoch, as its own run would have done; once before
                the next epoch begins, and once after, when no other process can commit

The last manifest may be one whose commit never happened, because the driver died first. Nothing tells it from one whose
commit was acknowledged and lost, and both may be committed: all that it names is durable, the epoch had not ended, and
no other epoch has made a checkpoint of that id, because each writes an extract before its first. Manifests of earlier
epochs, and of those that ended, are not followed: a later epoch did without them, or their commit was refused
(docs/adr/0062-the-catalog-follows-the-store.md).

Each part is one transaction that the store's state alone determines. If the process dies, the next one does the rest.
If the epoch's own run is still at work, it commits the same checkpoint or finds it committed.
"""

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from siltstone.catalog.epochs import Marks, Tenure, begin_epoch, check_marks, find_followed, read_marks
from siltstone.catalog.extract_writer import read_newest_extract
from siltstone.catalog.open import open_catalog
from siltstone.catalog.rebuilding import Rebuilding
from siltstone.catalog.records.extracts import is_ahead
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, Fenced, StateError, UsageError, WrongWarehouse
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.log import get_logger
from siltstone.model import StoredObject
from siltstone.run.manifests import RunManifests
from siltstone.run.pending import commit_of
from siltstone.run.rebuild_stream import (
    Clock,
    Found,
    committed_at,
    is_missing,
    note_refused,
    read_found,
    read_later,
    rebuild_stream,
    settle_outputs,
    with_next,
)
from siltstone.run.references import RunReferences
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath

_LOG = get_logger(__name__)
_LOOKS = 4
"""how often to look again at what another process is changing"""


def take_over(warehouse: OpenWarehouse, stream: str, who: str, tenure: Tenure | None = None) -> int:
    """Take a stream over: bring its catalog up to the store, and begin its next writer epoch.

    Args:
        who: this process's name for people.
        tenure: the hold of the run that takes it over; its `epoch` is set.

    Returns:
        The epoch.

    Raises:
        Fenced, UnknownStream, WrongWarehouse, Unreachable: as `catalog.epochs.begin_epoch`.
        CorruptObject: the catalog lost what an object says that is damaged; the message names it.
    """
    marks = read_marks(warehouse.warehouse.store, stream)
    check_marks(warehouse, marks, warehouse.catalog.streams.get(stream).epoch)
    for _ in range(_LOOKS):
        if not catch_up(warehouse, stream, marks):
            break

    def bring_up(epoch: int) -> None:
        # The run before may have committed one more since, and its database lost that.
        if followed is not None:
            _follow(warehouse, stream, followed, epoch)

    followed = find_followed(warehouse.catalog, stream, marks)
    return begin_epoch(warehouse, stream, who, tenure, marks, bring_up)


def catch_up(warehouse: OpenWarehouse, stream: str, marks: Marks) -> bool:
    """Bring the catalog's rows of a stream up to the store. Returns whether to look again: another process was faster.

    Args:
        marks: read before.

    Raises:
        CorruptObject, WrongWarehouse, Unreachable: as `take_over`.
    """
    catalog = warehouse.catalog
    record = catalog.streams.get(stream)
    if is_ahead(marks.extract, record.epoch, record.extracts):
        return not _replace(warehouse, stream)
    followed = find_followed(catalog, stream, marks)
    return followed is not None and not _follow(warehouse, stream, followed, record.epoch)


def find_next_damaged(warehouse: OpenWarehouse, stream: str) -> tuple[int, CorruptObject] | None:
    """Find the next checkpoint to follow if its manifest is damaged, in two reads, and the error; None if it is not.

    No run can take the stream over until that checkpoint is given up.
    """
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    followed = find_followed(catalog, stream, read_marks(store, stream))
    if followed is None:
        return None
    path = CheckpointPath(stream, followed, catalog.checkpoints.last_id(stream) + 1)
    try:
        with suppress(CorruptObject):  # a store may return wrong bytes once
            read_found(store, stream, path)
            return None
        warehouse.confirm_store()
        read_found(store, stream, path)
    except CorruptObject as error:
        warehouse.confirm_store()
        return path.checkpoint, error
    return None


def _replace(warehouse: OpenWarehouse, stream: str) -> bool:
    """Replace the stream's rows by those of the store's newest extract and the manifests after it; False, with nothing
    replaced, if they changed meanwhile."""
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    rows = Rebuilding(catalog.transactions)
    before = rows.get_position(stream)
    extract = read_newest_extract(store, stream)
    if extract is None:
        return False
    ancestors = catalog.forks.get_lineage(stream)[1:]
    if extract.parent != next(iter(ancestors), None):
        raise WrongWarehouse(
            f"the catalog {catalog.url} is older than the store at {warehouse.warehouse.label}, which holds another "
            f"stream {stream}, a fork of {extract.parent}: run the stream under another name, or rebuild the catalog "
            "at a new place with `siltstone rebuild-catalog`"
        )
    with tempfile.TemporaryDirectory(prefix="siltstone-catch-up-") as directory:
        clock = Clock(catalog.transactions.now)
        with open_catalog(f"sqlite:///{Path(directory) / 'catalog.db'}", now=clock) as draft:
            Rebuilding(draft.transactions).add_streams([catalog.streams.get(name) for name in reversed(ancestors)])
            try:
                done = rebuild_stream(OpenWarehouse(warehouse.warehouse, draft), extract, clock, lambda _: None)
            except CorruptObject:
                if read_newest_extract(store, stream) == extract:
                    raise
                return False  # another process has written a newer one, and deleted what only this one names
            if not rows.replace(stream, before, draft):
                return False
    _LOG.warning(
        "the catalog had lost what the store knows, and is up to date again: nothing may use an older copy of it",
        stream=stream,
        catalog=catalog.url,
        newest=done.newest,
    )
    return True


def _follow(warehouse: OpenWarehouse, stream: str, made_by: int, epoch: int) -> bool:
    """Commit the checkpoints whose manifests follow the newest one; False if another process did so meanwhile.

    Args:
        made_by: the epoch that stored them (`find_followed`).
        epoch: the stream's newest, under whose fence they are committed.
    """
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    newest, later = catalog.checkpoints.last_id(stream), list[Found]()
    path = CheckpointPath(stream, made_by, newest + 1)
    if is_missing(store, path.manifest()):
        return True
    before = catalog.checkpoints.get(stream, newest).manifest if newest else None
    data = _read_whole(store, before)
    references = RunReferences(stream, catalog, RunManifests(stream, store))
    if before is not None and data is not None:
        references.resume(replace(decode_manifest(data, before.name), stream=stream), before.name)
    for found, after in with_next(read_later(store, path, before, data)):
        try:
            commit = commit_of(found.manifest, found.stored, found.details)
            if data is not None or newest == 0:  # else what it needs is not known, and nothing counts as replaced
                oldest, replaced = references.advance(found.manifest, found.stored.name)
                commit = replace(commit, oldest_needed=oldest, replaced=replaced)
            committed = catalog.commits.add(stream, epoch, commit, committed_at(store, found, after), made_by)
        except Fenced:
            return False
        except (UsageError, StateError) as error:
            if catalog.checkpoints.last_id(stream) != found.manifest.checkpoint - 1:
                return False
            note_refused(stream, found, error)
            break
        references.follow(committed.manifests)
        later.append(found)
    if later:
        with suppress(Fenced):  # who has fenced it delivers them again, under the same ids
            settle_outputs(catalog, store, stream, epoch, later[-1])
        _LOG.info(
            "checkpoints that the store has and the catalog had not are taken over",
            stream=stream,
            checkpoints=len(later),
            newest=later[-1].manifest.checkpoint,
        )
    return True


def _read_whole(store: Store, stored: StoredObject | None) -> pa.Buffer | None:
    """Read a manifest; None if there is none, or it is damaged: whatever restores it says so."""
    try:
        return None if stored is None else store.read(stored)
    except CorruptObject:
        return None
