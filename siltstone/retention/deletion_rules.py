"""Decide which objects of marked checkpoints can be deleted, and which checkpoints go with them: a pure decision.

As in US 9471438, a checkpoint that others depend on is only marked. Each of its objects goes as soon as no remaining
checkpoint needs it, and the checkpoint itself with the last of them. The result depends on what is marked, not on the
order of marking.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from siltstone.catalog.objects import ObjectRecord


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """Marked checkpoints, ascending: `goes` are not needed, `waits` wrote an object that one needs that is not marked,
    `leased` one that a reader needs. `objects` can be deleted now. `needed_by` gives, for each that waits, the last
    checkpoint that needs it.
    """

    goes: tuple[int, ...]
    waits: tuple[int, ...]
    leased: tuple[int, ...]
    objects: tuple["ObjectRecord", ...]
    needed_by: dict[int, int]


def plan_deletion(
    objects: Collection["ObjectRecord"],
    kept: Collection[int],
    marked: Collection[int],
    leased: Callable[[int], bool] = lambda _: False,
    restores_from: int | None = None,
) -> DeletionPlan:
    """Decide what can be deleted of the marked checkpoints.

    A marked checkpoint is never restored, so only the others need objects. An object that can be deleted stays so: a
    new checkpoint needs only what the newest needs, or what it writes itself, and the newest is never marked.

    Args:
        objects: what the marked checkpoints wrote, with the checkpoints that need each (`catalog.objects`).
        kept: the checkpoints that are not marked.
        marked: the checkpoints to delete, including those still waiting from earlier deletions.
        leased: whether what a checkpoint wrote is being read.
        restores_from: what was written from this checkpoint on may be read by a run's current step, which restores the
            newest checkpoint by the chain that it had when the step began.
    """
    ordered = sorted(kept)
    waits: dict[int, int] = {}
    read: set[int] = set()
    free: list[ObjectRecord] = []
    for stored in objects:
        needed_by = _last_needing(stored, ordered, restores_from)
        if needed_by:
            waits[stored.checkpoint] = max(needed_by, waits.get(stored.checkpoint, 0))
        elif leased(stored.checkpoint):
            read.add(stored.checkpoint)
        else:
            free.append(stored)
    going = sorted(set(marked) - waits.keys() - read)
    return DeletionPlan(
        goes=tuple(id for id in going if not leased(id)),
        waits=tuple(sorted(waits)),
        leased=tuple(sorted({*(read - waits.keys()), *(id for id in going if leased(id))})),
        objects=tuple(free),
        needed_by=waits,
    )


def _last_needing(stored: "ObjectRecord", kept: Sequence[int], restores_from: int | None) -> int:
    """Return the last checkpoint that needs the object; 0 if none does."""
    if restores_from is not None and stored.checkpoint >= restores_from:
        return kept[-1] if kept else 0
    first, end = bisect_left(kept, stored.checkpoint), bisect_right(kept, stored.until)
    return kept[end - 1] if end > first else 0
