"""Finds the newest checkpoint that restores, which a recovery goes back to.

The newest checkpoint is proven first; if it fails, older ones, twice as many at a time, until one holds. What fails is
proven twice, since a store may return wrong bytes once, and only a store that shows the warehouse's identity is
believed.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from siltstone.catalog.records.materializations import MaterializationRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.errors import NewerFormat, StateError, UnknownCheckpoint, Unreachable, UsageError
from siltstone.restore.proof import Map, prove_checkpoints
from siltstone.restore.verify import Failure
from siltstone.run.outbox import damaged_output
from siltstone.store.paths import materialization_of

_MAX_LOOKS = 5
"""how often to look at a stream that changes meanwhile"""


@dataclass(frozen=True)
class RecoveryPoint:
    """The checkpoint to go back to.

    Attributes:
        checkpoint: the newest one that is proven; 0 if none is.
        newest: the newest of all.
        failures: why each one above `checkpoint` does not hold, newest first.
        rebuilt: operators whose damaged base was materialized again; of a point found without `rebuild`, operators for
            which that is worth trying.
    """

    checkpoint: int
    newest: int
    failures: tuple[Failure, ...] = ()
    rebuilt: tuple[str, ...] = ()


def find_beside_run(warehouse: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None]) -> RecoveryPoint:
    """Find the recovery point while a run may be at work.

    That run's retention, recovery or deletions remove checkpoints meanwhile: a checkpoint that has gone is not a
    damaged one, so everything is proven again.

    Raises:
        Unreachable: the stream changed at each look.
    """
    for _ in range(_MAX_LOOKS):
        before = {c.id: c.epoch for c in warehouse.catalog.checkpoints.list(stream)}
        with suppress(UnknownCheckpoint):
            point = find_recovery_point(warehouse, stream, run, tell, rebuild=False)
            now = {c.id: c.epoch for c in warehouse.catalog.checkpoints.list(stream)}
            if all(now.get(f.checkpoint) == before.get(f.checkpoint) for f in point.failures):
                return point
    raise Unreachable(f"stream {stream} changes while it is looked at: recover it again", transient=True)


def find_recovery_point(
    warehouse: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None], *, rebuild: bool
) -> RecoveryPoint:
    """Find the newest checkpoint that is proven, and why those above it are not.

    Args:
        run: maps the proofs over tasks.
        tell: called with what is proven and what fails, line by line.
        rebuild: materialize damaged bases again where what they were made of is still there.

    Raises:
        UnknownCheckpoint: a checkpoint was deleted meanwhile.
        NewerFormat: a newer Siltstone wrote something that has to be proven.
        Unreachable: the store or the catalog failed, which says nothing about any checkpoint.
    """
    waiting = [c.id for c in warehouse.catalog.checkpoints.list(stream)][::-1]
    newest = max(waiting, default=0)
    failed = _find_output_failures(warehouse, stream, waiting, tell)
    waiting = waiting[len(failed) :]
    rebuilt: tuple[str, ...] = ()
    at_once = 1
    while waiting:
        some, waiting = waiting[:at_once], waiting[at_once:]
        tell(f"proving {describe_checkpoints(some)}")
        failures = _prove_twice(warehouse, stream, some, run)
        if failures and at_once == 1:
            damaged = _find_damaged_bases(warehouse, stream, failures[some[0]])
            rebuilt = _rebuild(warehouse, stream, damaged, run, tell) if rebuild else tuple(m.operator for m in damaged)
            if rebuild and rebuilt:
                failures = _prove_twice(warehouse, stream, some, run)
        for failure in failures.values():
            tell(f"checkpoint {failure.checkpoint} cannot be restored: {failure.reason}")
        good = next((c for c in some if c not in failures), 0)
        failed += [failures[c] for c in some if c > good]
        if good:
            return RecoveryPoint(good, newest, tuple(failed), rebuilt)
        at_once *= 2
    return RecoveryPoint(0, newest, tuple(failed), rebuilt)


def _find_output_failures(
    warehouse: OpenWarehouse, stream: str, newest_first: list[int], tell: Callable[[str], None]
) -> list[Failure]:
    """Return the first checkpoint whose staged output is damaged, and all later ones.

    Made again from the same input, they stage it again.
    """
    damaged = damaged_output(warehouse.warehouse.store, warehouse.catalog, stream)
    if damaged is None:
        return []
    warehouse.confirm_store()
    first, error = damaged
    tell(f"the output of checkpoint {first} cannot be delivered: {error}")
    return [Failure(c, str(error)) for c in newest_first if c >= first]


def _prove_twice(warehouse: OpenWarehouse, stream: str, some: list[int], run: Map) -> dict[int, Failure]:
    """Return why checkpoints fail, if they fail twice, in a store that shows the warehouse's identity."""
    failures = prove_checkpoints(warehouse, stream, some, run).failures
    if failures:
        warehouse.confirm_store()
        failures = prove_checkpoints(warehouse, stream, sorted(failures), run).failures
    if failures:
        warehouse.confirm_store()
    return failures


def _find_damaged_bases(warehouse: OpenWarehouse, stream: str, failure: Failure) -> list[MaterializationRecord]:
    """Return the materialization that the damaged object belongs to, if any."""
    id = materialization_of(failure.object or "")
    begins = warehouse.catalog.materializations.list_in_chain(stream, failure.checkpoint) if id else []
    return [m for m in begins if m.id == id]


def _rebuild(
    warehouse: OpenWarehouse,
    stream: str,
    damaged: Sequence[MaterializationRecord],
    run: Map,
    tell: Callable[[str], None],
) -> tuple[str, ...]:
    """Make these materializations again, at the same checkpoints; returns the operators where that worked."""
    done = []
    for m in damaged:
        tell(f"rebuilding the base of {m.operator} at checkpoint {m.checkpoint}")
        try:
            id = uuid.uuid4().hex
            materialize(warehouse, stream, m.operator, m.checkpoint, id=id, parallelism=1, run=run, rebuild=True)
            done.append(m.operator)
        except NewerFormat:
            raise
        except (StateError, UsageError):  # what it was made of is damaged too, or gone
            continue
    return tuple(done)


def describe_checkpoints(ids: Sequence[int]) -> str:
    """A range of checkpoints for people, as in "checkpoints 3 to 7"."""
    low, high = min(ids), max(ids)
    return f"checkpoint {low}" if low == high else f"checkpoints {low} to {high}"
