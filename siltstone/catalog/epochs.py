"""Begin writer epochs, in the catalog and in the store, so that a catalog older than the store is noticed.

    1  begin the epoch in the catalog
    2  mark it in the store, by an object that is written once
    3  delete the older marks that were found, and list the marks again: a higher one refuses the epoch
    4  write an extract of the catalog (`catalog.extracts`), under this epoch; only then is it granted

So the store has a higher epoch than the catalog only if the catalog lost something: it was restored from a backup, or
its database failed over. What runs wrote since would look like orphans to it. Nothing is deleted then, and
`run.take_over` brings the catalog up to the store before the next epoch begins.

An epoch belongs to the process that made its mark. Two processes may begin the same epoch: in two catalogs, if one is
a copy without its own identity, or in one catalog, if its database lost that the first had begun. The second process
cannot make the mark. It does not end the epoch in the catalog either, because the epoch may be the other's. A process
may be frozen before it marks its epoch, and wake up long after later epochs were marked. It finds a higher mark in step
3, because the highest is never deleted.

An epoch without an extract has done nothing. If a process is killed before that, or its database loses the epoch, the
next epoch begins above it.

A catalog that knows the newest epoch may be older than the store, too. It is if the store has

    an extract    with a higher epoch or number: the catalog counts its extracts over all epochs, each before it is
                  stored
    a manifest    two above the newest checkpoint, of the newest epoch: it was stored after the one between was
                  committed
    a manifest    directly above it, of the newest extract's epoch, if the catalog has a later epoch, such as that of an
                  upgrade: the next run takes it over (`find_followed`)

A fork shares objects with its parent, and is marked beside the parent's epochs: a catalog that does not know the fork
is older than the store, too, and would delete shared objects. A new stream is refused if the store holds objects under
its name that the catalog does not know.

The extract says from which checkpoint the epoch continues. So a rebuilt catalog does not take what an older epoch wrote
beyond that checkpoint.
"""

import re
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.records.extracts import is_ahead
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import ObjectExists, UnknownStream, Unreachable, WrongWarehouse
from siltstone.log import get_logger
from siltstone.store.base import Store
from siltstone.store.paths import (
    CheckpointPath,
    epoch_mark,
    epoch_marks,
    extract_number,
    extract_prefix,
    fork_mark,
    fork_of_mark,
    stream_prefix,
)

_LOG = get_logger(__name__)
_EPOCH = re.compile(r"[0-9]{8}")
_PLAUSIBLE = 1_000_000
"""maximum epochs or checkpoints that the store may be ahead of a catalog restored from a backup"""


@dataclass
class Tenure:
    """One run's hold on its stream, through all epochs that it begins.

    Attributes:
        epoch: the run's newest epoch, None before the first. The run's next epoch begins only directly after it: a run
            that resets itself never takes the stream from a run that has fenced it. An epoch without an extract, which
            the catalog has lost, does not count.
        files: checkpoint -> the checksums of the `.files` objects that its subtasks have acknowledged, for the newest
            checkpoints.
    """

    epoch: int | None = None
    files: dict[int, Collection[str]] = field(default_factory=dict)


def begin_epoch(
    warehouse: OpenWarehouse,
    stream: str,
    who: str,
    tenure: Tenure | None = None,
    marks: "Marks | None" = None,
    bring_up: Callable[[int], None] = lambda _: None,
) -> int:
    """Begin the next writer epoch of a stream, in the catalog and in the store; `run.take_over` calls it.

    Args:
        who: this process's name for people.
        tenure: the hold of the run that takes it over; its `epoch` is set.
        marks: read before the catalog was brought up to the store.
        bring_up: called with the epoch, which fences all others, before its extract is written: brings the catalog up
            to what was stored meanwhile.

    Raises:
        Fenced: another run has the stream since the epoch of `tenure`.
        UnknownStream: the stream does not exist.
        WrongWarehouse: the catalog is older than the store, or another catalog writes to the same store.
        Unreachable: the store or the catalog failed; an epoch that was begun has done nothing.
    """
    marks = marks or read_marks(warehouse.warehouse.store, stream)
    check_marks(warehouse, marks, warehouse.catalog.streams.get(stream).epoch)
    _refuse_unknown(warehouse, stream, marks)
    mark_fork(warehouse, stream)
    tenure = tenure or Tenure()
    # An epoch without an extract did nothing: if the catalog lost it, the next one begins above it.
    after, above = tenure.epoch, max([*marks.epochs, tenure.epoch or 0])
    if after is not None and marks.extract[0] < after:
        after = min(after, warehouse.catalog.streams.get(stream).epoch)
    epoch = tenure.epoch = warehouse.catalog.runs.begin(stream, who, after=after, above=above)
    _mark(warehouse, stream, epoch, who, marks.epochs)
    _extract(warehouse, stream, epoch, bring_up)
    log = _LOG.bind(stream=stream, epoch=epoch)
    for older in warehouse.catalog.runs.list_superseded(stream, epoch):
        log.info("took over from a run that had not ended", older_epoch=older.epoch, older_run=older.who)
    log.debug("writer epoch begun", who=who)
    return epoch


def mark_fork(warehouse: OpenWarehouse, stream: str) -> None:
    """Mark a fork in the store, beside all its ancestors' epochs; do nothing for a stream that is not a fork.

    Raises:
        UnknownStream: the stream does not exist.
        Unreachable: the store or the catalog failed.
    """
    _, *ancestors = warehouse.catalog.forks.get_lineage(stream)
    for ancestor in ancestors:
        with suppress(ObjectExists):
            warehouse.warehouse.store.put(fork_mark(ancestor, stream), f"{stream}\n".encode())


def check_new_name(warehouse: OpenWarehouse, stream: str) -> None:
    """Check that the store holds nothing of a stream that the catalog does not know.

    Raises:
        WrongWarehouse: it does; nothing was changed.
        Unreachable: the store or the catalog failed.
    """
    store = warehouse.warehouse.store
    there = any(_first_name(store, prefix) for prefix in (epoch_marks(stream), stream_prefix(stream)))
    if there and all(record.name != stream for record in warehouse.catalog.streams.list()):
        raise WrongWarehouse(
            f"the store at {warehouse.warehouse.label} holds a stream {stream} that the catalog "
            f"{warehouse.catalog.url} does not know: was the catalog restored from a backup? Name the newer catalog "
            "with --catalog, or give the new stream another name"
        )


def go_on_from_backup(warehouse: OpenWarehouse, stream: str, who: str, outcome: str, *, older: bool = False) -> bool:
    """If the catalog is older than the store, take the stream over with an epoch above the store's, and end that epoch.

    What newer runs wrote and the catalog does not know is given up. Its objects are kept for a while, as after any
    recovery; the working state of those runs is not used. Forks that the catalog does not know are given up, too.

    Args:
        outcome: the outcome to record for the new epoch.
        older: True if the catalog is known to be older, even if no mark shows it.

    Returns:
        Whether the catalog was older; if not, nothing was changed.

    Raises:
        WrongWarehouse: an object's epoch or checkpoint is too far above the catalog's to be of a newer run; nothing was
            changed.
    """
    store, catalog = warehouse.warehouse.store, warehouse.catalog
    marks = read_marks(store, stream)
    forks = _unknown_forks(catalog, stream, marks)
    if not older and not forks and not _is_older(warehouse, stream, marks):
        return False
    known, last = catalog.streams.get(stream).epoch, catalog.checkpoints.last_id(stream)
    check_marks(warehouse, marks, known)
    newest, stored = max(known, marks.newest), 0
    for name, _ in store.list(stream_prefix(stream)):
        path = CheckpointPath.of(name)
        if path is not None:
            _refuse_implausible(warehouse, name, max(path.epoch - known, path.checkpoint - last))
            newest, stored = max(newest, path.epoch), max(stored, path.checkpoint)
    epoch = catalog.rollbacks.skip_epochs(stream, who, above=newest, newest=stored, extracts=marks.extract[1])
    _mark(warehouse, stream, epoch, who, marks.epochs)
    _extract(warehouse, stream, epoch)
    if forks:
        _LOG.warning("forks that the catalog does not know are given up", stream=stream, forks=forks)
        store.delete([fork_mark(stream, fork) for fork in forks])
    catalog.runs.end(stream, epoch, outcome)
    return True


def mark_rebuilt(warehouse: OpenWarehouse, stream: str, who: str, outcome: str) -> int:
    """Take over a stream of a catalog that is being rebuilt, with an epoch above all in the store, and end it.

    Args:
        outcome: the outcome to record for the new epoch.

    Returns:
        The new epoch.

    Raises:
        WrongWarehouse: a mark is too far above the rebuilt epochs to be of a run; nothing was changed.
        Unreachable: the store failed.
    """
    marks, known = read_marks(warehouse.warehouse.store, stream), warehouse.catalog.streams.get(stream).epoch
    check_marks(warehouse, marks, known)
    mark_fork(warehouse, stream)
    epoch = warehouse.catalog.runs.begin(stream, who, above=max(known, marks.newest))
    _mark(warehouse, stream, epoch, who, marks.epochs)
    warehouse.catalog.runs.end(stream, epoch, outcome)
    return epoch


def check_catalog(warehouse: OpenWarehouse, stream: str) -> None:
    """Check that the catalog knows every writer epoch and every fork of a stream that the store has.

    Call it before deleting anything: apparent orphans may be newer than the catalog.

    Raises:
        UnknownStream: the stream does not exist.
        WrongWarehouse: it does not; nothing was changed.
    """
    # The store is read first: an epoch is begun in the catalog before it is marked.
    _refuse_older(warehouse, stream, read_marks(warehouse.warehouse.store, stream))


@dataclass(frozen=True)
class Marks:
    """What marks the progress of one stream in the store.

    Attributes:
        epochs: its marked writer epochs.
        forks: the names of its forks.
        extract: epoch and number of its newest extract; (0, 0) if it has none.
        names: writer epoch -> an object that is of it.
    """

    epochs: list[int]
    forks: list[str]
    extract: tuple[int, int]
    names: dict[int, str]

    @property
    def newest(self) -> int:
        """The highest writer epoch."""
        return max(self.names, default=0)


def read_marks(store: Store, stream: str) -> Marks:
    """List what marks the progress of a stream in the store."""
    names = [name for name, _ in store.list(epoch_marks(stream))]
    epochs = _epochs_of(names, stream)
    forks = [fork for name in names if (fork := fork_of_mark(name))]
    extracts = {number: name for name, _ in store.list(extract_prefix(stream)) if (number := extract_number(name))}
    extract = max(extracts, default=(0, 0))
    return Marks(list(epochs), forks, extract, {epoch: name for (epoch, _), name in extracts.items()} | epochs)


def find_followed(catalog: Catalog, stream: str, marks: Marks) -> int | None:
    """Return the epoch whose manifests a catalog that has its extract is to follow, None if there is none.

    It is the epoch of the newest extract, because later ones did nothing. Its run must not have ended by itself, and it
    must not have been given up.
    """
    epoch = marks.extract[0]
    if not epoch or not catalog.runs.is_unfinished(stream, epoch):
        return None
    return None if any(each.epoch > epoch for each in catalog.rollbacks.list(stream)) else epoch


def _marked_epochs(store: Store, stream: str) -> dict[int, str]:
    """Map each marked writer epoch to its mark."""
    return _epochs_of([name for name, _ in store.list(epoch_marks(stream))], stream)


def _epochs_of(names: Iterable[str], stream: str) -> dict[int, str]:
    prefix = epoch_marks(stream)
    return {int(number): name for name in names if _EPOCH.fullmatch(number := name.removeprefix(prefix))}


def check_marks(warehouse: OpenWarehouse, marks: Marks, known: int) -> None:
    """Check that no epoch is too far above the catalog's newest, `known`, to be of a run.

    Raises:
        WrongWarehouse: one is; the message names the object.
    """
    for epoch, name in marks.names.items():
        _refuse_implausible(warehouse, name, epoch - known)


def _first_name(store: Store, prefix: str) -> str | None:
    return next((name for name, _ in store.list(prefix)), None)


def _refuse_implausible(warehouse: OpenWarehouse, name: str, ahead: int) -> None:
    if ahead > _PLAUSIBLE:
        raise WrongWarehouse(
            f"object {name} in {warehouse.warehouse.label} is {ahead:,} epochs or checkpoints ahead of the catalog "
            f"{warehouse.catalog.url}, so no run can have written it: find out who did, delete it with the store's own "
            "tools, and try again"
        )


def _unknown_forks(catalog: Catalog, stream: str, marks: Marks) -> list[str]:
    """Return the marked forks that the catalog does not know as forks of this stream; call it after reading marks."""
    unknown = []
    for fork in marks.forks:
        try:
            known = stream in catalog.forks.get_lineage(fork)[1:]
        except UnknownStream:
            known = False
        if not known:
            unknown.append(fork)
    return unknown


def _mark(warehouse: OpenWarehouse, stream: str, epoch: int, who: str, marked: list[int]) -> None:
    """Mark an epoch in the store, delete the older ones among `marked`, and check that no higher one is there.

    It belongs to the process that made its mark. If the mark was not made, the epoch stays open in the catalog, as
    after a crash: its database may have lost it, and the row of this number may be that of another run.

    Raises:
        Fenced: a newer run of this catalog has taken the stream over meanwhile.
        WrongWarehouse: another catalog has begun this epoch, or a higher one.
        Unreachable: the store failed.
    """
    store, catalog = warehouse.warehouse.store, warehouse.catalog
    try:
        store.put(epoch_mark(stream, epoch), f"{who} {uuid.uuid4().hex}\n".encode())
    except ObjectExists as error:
        raise _other_catalog_error(warehouse, stream, epoch) from error
    try:
        try:
            store.delete([epoch_mark(stream, each) for each in marked if each < epoch])
        except Unreachable as error:  # the next epoch deletes them
            _LOG.warning("old epoch marks stay", stream=stream, epoch=epoch, error=str(error))
        newest = max(_marked_epochs(store, stream), default=0)
        if newest > epoch:
            catalog.runs.check_epoch(stream, epoch)
            raise _other_catalog_error(warehouse, stream, newest)
    except BaseException:
        with suppress(Unreachable):
            catalog.runs.end(stream, epoch, "failed")
        raise


def _other_catalog_error(warehouse: OpenWarehouse, stream: str, epoch: int) -> WrongWarehouse:
    return WrongWarehouse(
        f"writer epoch {epoch} of stream {stream} was begun in {warehouse.warehouse.label} by another catalog than "
        f"{warehouse.catalog.url}: use one catalog for a store, and `siltstone reidentify` for a copied warehouse (if "
        "its database has just failed over, another run may have begun it: run it again)"
    )


def _extract(
    warehouse: OpenWarehouse, stream: str, epoch: int, bring_up: Callable[[int], None] = lambda _: None
) -> None:
    """Write the extract of an epoch that has its mark.

    Raises:
        Fenced: a newer run has taken the stream over meanwhile.
        Unreachable: the store or the catalog failed, or the catalog has lost the epoch, which has no extract then.
    """
    try:
        bring_up(epoch)
        if write_extract(warehouse, stream).epoch != epoch:
            warehouse.catalog.runs.check_epoch(stream, epoch)
            raise Unreachable(f"the catalog had lost writer epoch {epoch} of stream {stream} for a while: run it again")
    except BaseException:
        with suppress(Unreachable):
            warehouse.catalog.runs.end(stream, epoch, "failed")
        raise


def _is_older(warehouse: OpenWarehouse, stream: str, marks: Marks) -> bool:
    """Whether the store, whose marks were read before, has runs of the stream that the catalog does not know."""
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    while True:
        record, newest = catalog.streams.get(stream), catalog.checkpoints.last_id(stream)
        epoch = record.epoch
        if max(marks.epochs, default=0) > epoch or is_ahead(marks.extract, epoch, record.extracts):
            return True
        if epoch:
            followed = find_followed(catalog, stream, marks)
            # The next checkpoint of an epoch that is fenced is taken over, or else would count as an orphan.
            path = CheckpointPath(stream, epoch, newest + 2)
            manifest = (path if followed in (None, epoch) else CheckpointPath(stream, followed, newest + 1)).manifest()
            newer = _first_name(store, manifest) == manifest
        else:  # it has never run, so any object under its name belongs to another stream
            newer = _first_name(store, stream_prefix(stream)) is not None
        if not newer:
            return False
        if (catalog.streams.get(stream).epoch, catalog.checkpoints.last_id(stream)) == (epoch, newest):
            return True  # otherwise a run made progress meanwhile


def _refuse_unknown(warehouse: OpenWarehouse, stream: str, marks: Marks) -> None:
    """Refuse to take a stream over if the store has of it what the catalog does not know, and could not be told."""
    record = warehouse.catalog.streams.get(stream)
    _refuse_forks(warehouse, stream, marks)
    ahead = is_ahead(marks.extract, record.epoch, record.extracts)
    # If it has never run, any object under its name belongs to another stream.
    if ahead or (record.epoch == 0 and _first_name(warehouse.warehouse.store, stream_prefix(stream)) is not None):
        raise _older_catalog_error(warehouse, stream, _newer_epochs(warehouse.catalog, stream))


def _refuse_older(warehouse: OpenWarehouse, stream: str, marks: Marks) -> None:
    """Refuse to delete anything by a catalog that is older than the store."""
    known = warehouse.catalog.streams.get(stream).epoch
    check_marks(warehouse, marks, known)  # such a mark would also make `recover --accept-loss` fail
    _refuse_forks(warehouse, stream, marks)
    if _is_older(warehouse, stream, marks):
        why = _newer_epochs(warehouse.catalog, stream)
        raise _older_catalog_error(warehouse, stream, why, "run the stream, which brings the catalog up to the store, ")


def _refuse_forks(warehouse: OpenWarehouse, stream: str, marks: Marks) -> None:
    if forks := _unknown_forks(warehouse.catalog, stream, marks):
        why = f"it does not know {', '.join(forks)}, made from stream {stream}, and might delete what it shares"
        raise _older_catalog_error(warehouse, stream, why)


def _newer_epochs(catalog: Catalog, stream: str) -> str:
    known, newest = catalog.streams.get(stream).epoch, catalog.checkpoints.last_id(stream)
    return (
        f"it knows stream {stream} with writer epochs up to {known} and checkpoints up to {newest}, the store has "
        "newer ones"
    )


def _older_catalog_error(warehouse: OpenWarehouse, stream: str, why: str, first: str = "") -> WrongWarehouse:
    ways = f"{first}name the newer one with --catalog, rebuild one at a new place with `siltstone rebuild-catalog`, or "
    ways += f"give up what it does not know with `siltstone recover {stream} --accept-loss`"
    return WrongWarehouse(
        f"the catalog {warehouse.catalog.url} is older than the store at {warehouse.warehouse.label}: {why}; was it "
        f"restored from a backup, or has its database lost transactions? {ways[0].upper()}{ways[1:]}"
    )
