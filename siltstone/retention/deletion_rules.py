"""Decide which marked checkpoints can be deleted, and which others still build on: a pure decision.

As in US 9471438, a checkpoint that others depend on is only marked. It is deleted with the last of them, together with
every marked predecessor that nothing else needs. The result depends on what is marked, not on the order of marking.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """Marked checkpoints, ascending: `goes` are not needed, `waits` are needed by one that is not marked, `leased` by a
    reader."""

    goes: tuple[int, ...]
    waits: tuple[int, ...]
    leased: tuple[int, ...] = ()


def plan_deletion(
    first: Mapping[int, int], marked: Set[int], leased: Callable[[int], bool] = lambda _: False
) -> DeletionPlan:
    """Decide which of the marked checkpoints can be deleted.

    A marked checkpoint is never restored, so only the chains of the others count. A checkpoint that can be deleted
    stays so: a new checkpoint builds on what the newest builds on, or on nothing, and the newest is never marked.

    Args:
        first: each unmarked checkpoint -> the first one that its restore reads, the earliest of all operators; it reads
            every checkpoint from there to itself.
        marked: the checkpoints to delete, including those still waiting from earlier deletions.
        leased: whether a checkpoint is being read.
    """
    goes, waits, read = [], [], []
    earliest = math.inf
    for checkpoint in sorted({*first, *marked}, reverse=True):
        if checkpoint not in marked:
            earliest = min(earliest, first[checkpoint])
        elif checkpoint >= earliest:
            waits.append(checkpoint)
        elif leased(checkpoint):
            read.append(checkpoint)
        else:
            goes.append(checkpoint)
    return DeletionPlan(tuple(reversed(goes)), tuple(reversed(waits)), tuple(reversed(read)))
