"""Delete stored objects that nothing refers to; `retention.orphan_rules` decides which.

    1  list the store, then read the catalog: an object that appeared in between is already referred to, or belongs to
       the checkpoint being written
    2  write an extract: the process that made objects orphans may have died before it did so, and a catalog rebuilt
       from the extract before would need them
    3  in batches of some hundred objects: judge them again, in the transaction that records their tombstones
       (`catalog.tombstones`), and delete those that are orphans in both views

A sweep takes no writer epoch and stops no run. Whatever happens meanwhile (a commit, a new run, another sweep, a lease)
is either seen by the second judgement or comes after the tombstones, and then the commit is refused. So a sweep may
continue when a new run takes over: what that run fenced stays an orphan. If it is killed, some recorded deletions did
not happen; the next sweep finds these objects and deletes them.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.records.passes import Pass
from siltstone.catalog.records.references import CatalogView
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.result import Result
from siltstone.retention.leases import this_process
from siltstone.retention.orphan_rules import (
    AGE_GUARD,
    DELETES,
    Reason,
    incomplete_prefixes,
    judge,
    judge_unfinished,
    killed_prefixes,
)
from siltstone.store.base import Store, Unfinished
from siltstone.store.paths import CheckpointPath, is_manifest, sink_tables, stream_prefix

_LOG = get_logger(__name__)
ORPHANS = "objects that nothing refers to"
_BATCH = 500
_NAMED = 5
"""how many names a result lists for each reason"""


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What a sweep may do.

    Attributes:
        limit: maximum objects to delete, None for no limit.
        dry_run: only report what it would do; change nothing.
        incomplete: list only the prefixes of checkpoints that never completed, instead of everything.
        age_guard: what a run may be writing counts as abandoned if nothing was stored for that checkpoint for so long.
    """

    limit: int | None = None
    dry_run: bool = False
    incomplete: bool = False
    age_guard: timedelta = AGE_GUARD


@dataclass(slots=True)
class FoundObjects:
    """What was found for one reason: the number of objects, their bytes, and some of their names."""

    reason: str
    deletes: bool
    objects: int = 0
    bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str, size_bytes: int) -> None:
        """Count one more object."""
        self.objects += 1
        self.bytes += size_bytes
        if len(self.names) < _NAMED:
            self.names.append(name)


@dataclass(frozen=True, slots=True)
class SweepResult(Result):
    """What a sweep did.

    Nothing refers to the `found` objects and unfinished writes: `deleted` of them, with `bytes` in total, are gone, and
    `kept` stay. In a dry run all are kept, `bytes` would be freed, and `reasons` show what would be deleted.
    """

    stream: str
    dry_run: bool
    found: int
    deleted: int
    kept: int
    bytes: int
    seconds: float
    reasons: list[FoundObjects]


def sweep(
    warehouse: OpenWarehouse, stream: str, options: SweepOptions | None = None, who: str | None = None
) -> SweepResult:
    """Delete the orphans of a stream, and discard unfinished writes. The stream may be running.

    Args:
        who: recorded as the author of the deletions; default this process.

    Raises:
        UnknownStream: the stream has not run here.
        UnknownCheckpoint: it has no checkpoint yet.
        WrongWarehouse: the catalog is older than the store; nothing is deleted.
        Unreachable: the store or the catalog failed; deletions so far are recorded, sweep again.
    """
    options, start = options or SweepOptions(), time.perf_counter()
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    if not catalog.rollbacks.list(stream):  # a rollback may have removed every checkpoint
        catalog.checkpoints.get_latest(stream)
    store.check(writable=not options.dry_run)
    check_catalog(warehouse, stream)
    prefixes = [stream_prefix(stream)]
    if options.incomplete:
        prefixes = incomplete_prefixes(catalog.runs.list(stream), catalog.references.view(stream, ()))
    work = _Sweep(warehouse, stream, who or this_process(), options)
    work.sweep(prefixes)
    return work.result(time.perf_counter() - start)


def sweep_ended(warehouse: OpenWarehouse, stream: str, epoch: int) -> None:
    """Delete what a run has left of its unfinished checkpoint, by one short listing.

    Called by the run itself, once its end is in the catalog; a fenced run deletes nothing (promise 5). On failure the
    next sweep does the rest.
    """
    try:
        path = CheckpointPath(stream, epoch, warehouse.catalog.checkpoints.last_id(stream) + 1)
        work = _Sweep(warehouse, stream, this_process(), SweepOptions(incomplete=True), {Reason.ENDED})
        work.sweep_objects([path.prefix])
        found = work.result(0.0)
        if found.deleted:
            _LOG.info(
                "swept an incomplete checkpoint of the run",
                stream=stream,
                epoch=epoch,
                checkpoint=path.checkpoint,
                objects=found.deleted,
                bytes=found.bytes,
            )
    except Unreachable as error:
        _LOG.warning("the run's incomplete checkpoint is not swept", stream=stream, epoch=epoch, error=str(error))


def sweep_killed(warehouse: OpenWarehouse, stream: str, epoch: int) -> SweepResult:
    """Delete what the newest runs before `epoch` left if they did not end well, by one short listing each.

    Only the run `epoch` calls it; once fenced, it deletes nothing (promise 5).

    Raises:
        UnknownStream: the stream has not run here.
        Unreachable: the store or the catalog failed; the next sweep continues.
    """
    start, catalog = time.perf_counter(), warehouse.catalog
    work = _Sweep(warehouse, stream, this_process(), SweepOptions(incomplete=True), epoch=epoch)
    work.sweep(killed_prefixes(catalog.runs.list(stream), catalog.references.view(stream, ()), epoch))
    return work.result(time.perf_counter() - start)


class _Sweep:
    """One sweep and its findings so far. It deletes only for some `reasons` (default all) and, with `epoch`, only while
    that is the newest."""

    def __init__(
        self,
        warehouse: OpenWarehouse,
        stream: str,
        who: str,
        options: SweepOptions,
        reasons: Collection[Reason] = DELETES,
        epoch: int | None = None,
    ) -> None:
        self._reasons, self._epoch = reasons, epoch
        self._warehouse, self._catalog, self._store = warehouse, warehouse.catalog, warehouse.warehouse.store
        self._stream, self._who, self._options = stream, who, options
        self._by = Pass.begin(ORPHANS, who)
        self._left = options.limit
        self._found: dict[Reason, FoundObjects] = {}

    def sweep(self, prefixes: Sequence[str]) -> None:
        """Sweep objects under the prefixes, and unfinished writes of the stream."""
        # Listed before the objects: a write that finishes in between is then found as an object.
        own = (stream_prefix(self._stream), sink_tables(self._stream))
        by_token = {write.token: write for prefix in own for write in self._store.list_unfinished(prefix)}
        unfinished = list(by_token.values())  # one whose name is not known is listed for every prefix
        self.sweep_objects(prefixes)
        self._sweep_unfinished(unfinished)

    def sweep_objects(self, prefixes: Sequence[str]) -> None:
        """Sweep objects under the prefixes."""
        sizes = dict(chain.from_iterable(self._store.list(prefix) for prefix in prefixes))
        view = self._catalog.references.view(self._stream, sizes if self._options.incomplete else None)
        whole = {_checkpoint_prefix(name) for name in sizes if is_manifest(name)}
        ages: dict[str, datetime] = {}
        last_written: dict[str, datetime] = {}

        def reason(name: str, view: CatalogView) -> Reason | None:
            return judge(name, view, self._options.age_guard, last_written.get(_checkpoint_prefix(name)))

        # What has a manifest is whole however old it is: the next run takes it over, if the catalog lost it.
        undecided = [
            name for name in sizes if _checkpoint_prefix(name) not in whole and reason(name, view) is Reason.WRITING
        ]
        for some in _batches(undecided):
            ages |= self._store.modified_at(some)
        for name, at in ages.items():
            prefix = _checkpoint_prefix(name)
            last_written[prefix] = max(at, last_written.get(prefix, at))
        orphans = []
        for name, size in sizes.items():
            why = reason(name, view)
            if why in self._reasons:
                orphans.append(name)
            elif why is not None:
                self._count(why, name, size)
        orphans.sort(key=is_manifest, reverse=True)
        going = self._within_limit(orphans, sizes)
        if going and not self._options.dry_run:
            write_extract(self._warehouse, self._stream)
        # A rebuilt catalog takes the newest manifest over, and everything with it: so manifests go before the rest.
        manifests = [name for name in going if is_manifest(name)]
        for some in (*_batches(manifests), *_batches(going[len(manifests) :])):
            ages |= _find_times(self._store, some)
            self._delete(some, sizes, reason, ages, self._store.delete)

    def _sweep_unfinished(self, unfinished: Sequence[Unfinished]) -> None:
        view = self._catalog.references.view(self._stream, ())
        by_name = {f"unfinished {write.token}": write for write in unfinished}
        sizes = dict.fromkeys(by_name, 0)  # stores do not report them
        ages = {name: write.began_at for name, write in by_name.items()}

        def reason(name: str, view: CatalogView) -> Reason:
            return judge_unfinished(by_name[name], view, self._options.age_guard)

        for name in by_name:
            if not (why := reason(name, view)).deletes:
                self._count(why, name, 0)
        going = self._within_limit([name for name in by_name if reason(name, view).deletes], sizes)
        for some in _batches(going):
            self._delete(some, sizes, reason, ages, lambda names: self._store.discard(by_name[n] for n in names))

    def _delete(
        self,
        names: Sequence[str],
        sizes: dict[str, int],
        reason: Callable[[str, CatalogView], Reason | None],
        ages: dict[str, datetime],
        delete: Callable[[Iterable[str]], None],
    ) -> None:
        """Judge some orphans again, record tombstones for those that still are, and delete them; in a dry run only
        judge."""
        judged: dict[str, Reason | None] = {}

        def decide(view: CatalogView) -> list[Tombstone]:
            if self._epoch is not None and view.epoch != self._epoch:
                return []
            judged.update((name, reason(name, view)) for name in names)
            return [
                Tombstone(name, sizes[name], why.value, ages.get(name))
                for name, why in judged.items()
                if why is not None and why in self._reasons
            ]

        if self._options.dry_run:
            decide(self._catalog.references.view(self._stream, names))
        else:
            tombstones = self._catalog.tombstones.record_orphans(self._stream, self._who, names, decide, self._by)
            delete([each.name for each in tombstones])
        for name, why in judged.items():
            if why is not None:
                self._count(why, name, sizes[name])

    def _within_limit(self, orphans: list[str], sizes: dict[str, int]) -> list[str]:
        """Return as many as this sweep may still delete; count the others."""
        if self._left is None:
            return orphans
        taken, rest = orphans[: self._left], orphans[self._left :]
        self._left -= len(taken)
        for name in rest:
            self._count(Reason.BEYOND_LIMIT, name, sizes[name])
        return taken

    def _count(self, why: Reason, name: str, size_bytes: int) -> None:
        self._found.setdefault(why, FoundObjects(why.value, why.deletes)).add(name, size_bytes)

    def result(self, seconds: float) -> SweepResult:
        """Return all findings."""
        findings = [self._found[reason] for reason in Reason if reason in self._found]
        found, orphans = sum(f.objects for f in findings), sum(f.objects for f in findings if f.deletes)
        deleted = 0 if self._options.dry_run else orphans
        return SweepResult(
            stream=self._stream,
            dry_run=self._options.dry_run,
            found=found,
            deleted=deleted,
            kept=found - deleted,
            bytes=sum(f.bytes for f in findings if f.deletes),
            seconds=round(seconds, 3),
            reasons=findings,
        )


def _checkpoint_prefix(name: str) -> str:
    path = CheckpointPath.of(name)
    return path.prefix if path else name


def _find_times(store: Store, names: Sequence[str]) -> dict[str, datetime]:
    """Return when objects were written, for the records of their deletion; none if the store cannot be read."""
    try:
        return store.modified_at(names)
    except Unreachable:
        return {}


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + _BATCH] for start in range(0, len(names), _BATCH))
