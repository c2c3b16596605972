"""Decide which objects of marked checkpoints can be deleted, and which checkpoints go with them: a pure decision.

As in US 9471438, a checkpoint that others depend on is only marked. Each of its objects is deleted as soon as no
remaining checkpoint needs it, and the checkpoint with its last object. The result depends on what is marked, not on the
order of marking.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from siltstone.catalog.records.objects import ObjectRecord


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """What can be deleted of the marked checkpoints.

    Attributes:
        goes: checkpoints that nothing needs, ascending.
        waits: checkpoints that wrote an object that an unmarked checkpoint needs, ascending.
        leased: checkpoints that wrote an object that a reader needs, ascending.
        objects: the objects that can be deleted now.
        needed_by: for each of `waits`, the last checkpoint that needs it.
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
    running: bool = False,
) -> DeletionPlan:
    """Decide what can be deleted of the marked checkpoints.

    A marked checkpoint is never restored, so only the others need objects. An object that can be deleted stays so: a
    new checkpoint needs only what the newest needs, or what it writes itself, and the newest is never marked.

    Args:
        objects: what the marked checkpoints wrote, with the checkpoints that need each (`catalog.objects`).
        kept: the checkpoints that are not marked.
        marked: the checkpoints to delete, including those still waiting from earlier deletions.
        leased: whether what a checkpoint wrote is being read.
        running: whether a run is open, whose current step may restore what was replaced after it began
            (`ObjectRecord.may_be_restored`).
    """
    ordered = sorted(kept)
    waits: dict[int, int] = {}
    read: set[int] = set()
    free: list[ObjectRecord] = []
    for stored in objects:
        needed_by = _last_needing(stored, ordered, running)
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


def _last_needing(stored: "ObjectRecord", kept: Sequence[int], running: bool) -> int:
    """Return the last checkpoint that needs the object; 0 if none does."""
    if running and kept and stored.may_be_restored(kept[-1]):
        return kept[-1]
    first, end = bisect_left(kept, stored.checkpoint), bisect_right(kept, stored.until)
    return kept[end - 1] if end > first else 0
