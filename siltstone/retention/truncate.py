"""Truncates a stream: applies its retention, and deletes from the store what the remaining checkpoints do not need.

Retention decides (`retention_rules`) and deletion acts (`deletion`). A truncation may stop anywhere, run twice, or run
beside another one: what it decides to delete is marked in one transaction, and the next truncation completes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.result import Result
from siltstone.retention.deletion import SUBSUMED, DeletionResult, delete_checkpoints, foresee
from siltstone.retention.retention_rules import RetentionOptions, plan_retention, retention_in_force


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that is kept, and every reason to keep it."""

    checkpoint: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A deleted checkpoint whose objects stay, and the newest kept checkpoint that builds on it."""

    checkpoint: int
    needed_by: int


@dataclass(frozen=True, slots=True)
class Truncation(Result):
    """What a truncation did, or with `dry_run` would do.

    `deleted` checkpoints are gone; `waiting` ones are marked; `leased` ones are being read and stay until the next
    truncation. All three include checkpoints that an earlier deletion marked. `objects` objects with `bytes` bytes
    were deleted from the store. `rules` are the retention rules in force; `left` checkpoints were over the limit.
    """

    stream: str
    dry_run: bool
    kept: tuple[Kept, ...]
    deleted: tuple[int, ...]
    waiting: tuple[Waiting, ...]
    leased: tuple[int, ...]
    objects: int
    bytes: int
    rules: Mapping[str, Any]
    left: int = 0

    @property
    def has_rules(self) -> bool:
        """Whether there is any rule; without one everything is kept."""
        return bool(RetentionOptions.model_validate(self.rules).rules)


def truncate(
    warehouse: OpenWarehouse,
    stream: str,
    options: RetentionOptions,
    *,
    dry_run: bool = False,
    epoch: int | None = None,
    limit: int | None = None,
    steps_ended: bool = False,
) -> Truncation:
    """Delete the checkpoints that retention subsumes, and complete what earlier deletions left.

    Ages are by the catalog's clock.

    Args:
        options: rules to apply instead of those recorded with the stream (`retention.retention_rules`).
        dry_run: only report what would be done; nothing is changed.
        epoch: of the run that truncates, which deletes nothing once it is fenced; None for a caller that is not a run.
        limit: the most checkpoints to mark, and the most to delete.
        steps_ended: that run begins no further step.

    Raises:
        UnknownStream: no such stream has run here.
        UnknownCheckpoint: it has no checkpoint yet.
        UsageError: the rules keep no checkpoint, or a savepoint was set meanwhile on one to delete; nothing is deleted.
        WrongWarehouse: the catalog is older than the store; nothing is deleted.
        Fenced: another run has taken the stream over; marked checkpoints stay marked, truncate again.
        Unreachable: the store or the catalog failed; marked checkpoints stay marked, truncate again.
    """
    catalog = warehouse.catalog
    record = catalog.streams.get(stream)
    epoch, options = record.epoch if epoch is None else epoch, retention_in_force(record.retention, options)
    catalog.checkpoints.get_latest(stream)  # or there is nothing to truncate
    check_catalog(warehouse, stream)  # in a dry run too, which reports what would be done
    retained = [c for c in catalog.checkpoints.list_retained(stream) if not c.deleted]
    committed_at = {c.id: c.committed_at for c in retained}
    plan = plan_retention(committed_at, catalog.savepoints.list(stream), options, catalog.now())
    if dry_run:
        done = _foresee_deletion(catalog, stream, plan.subsumed)
    else:
        going = plan.subsumed[:limit]
        done = delete_checkpoints(
            warehouse,
            stream,
            going,
            epoch=epoch,
            reason=SUBSUMED,
            spare_leased=True,
            limit=limit,
            input_log=options.input_log,
            steps_ended=steps_ended,
        )
        done = replace(done, left=done.left + len(plan.subsumed) - len(going))
    kept = tuple(Kept(id, reasons) for id, reasons in plan.kept.items())
    waiting = tuple(Waiting(id, by) for id, by in sorted(done.needed_by.items()))
    rules = options.to_record()
    return Truncation(
        stream, dry_run, kept, done.deleted, waiting, done.leased, done.objects, done.bytes, rules, done.left
    )


def _foresee_deletion(catalog: Catalog, stream: str, subsumed: Sequence[int]) -> DeletionResult:
    """Return what deleting these checkpoints would do now, without changing anything."""
    ahead = foresee(catalog, stream, subsumed)
    size_bytes = sum(stored.bytes for stored in ahead.objects)
    return DeletionResult(
        ahead.goes, ahead.waits, len(ahead.objects), size_bytes, ahead.leased, needed_by=ahead.needed_by
    )


def describe_retention(catalog: Catalog, stream: str, given: RetentionOptions) -> dict[str, Any]:
    """Describe what a stream keeps.

    Returns the rules `recorded` with the stream (None keeps everything), the rules `in_force` given those of the
    settings, where these are `from`, and the rules `described` for people.

    Raises:
        UnknownStream: no such stream has run here.
    """
    recorded = catalog.streams.get(stream).retention
    rules = retention_in_force(recorded, given)
    from_ = "[retention] in the settings" if given.rules else "recorded with the stream"
    return {"recorded": recorded, "in_force": rules.to_record(), "from": from_, "described": rules.described}
