"""Which deleted checkpoints can go and which others still build on: a pure decision.

As in US 9471438: a checkpoint that others depend on is only marked; it goes when the last of them goes, and with it
every marked predecessor that nothing else needs. Whether it goes depends on what is marked, never on the order in
which it was marked.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """Marked checkpoints, ascending: `goes` are needed by none, `waits` by one that is not marked, `leased` by somebody
    who reads them right now."""

    goes: tuple[int, ...]
    waits: tuple[int, ...]
    leased: tuple[int, ...] = ()


def plan_deletion(
    first: Mapping[int, int], marked: Set[int], leased: Callable[[int], bool] = lambda _: False
) -> DeletionPlan:
    """Tell apart the marked checkpoints that can go.

    A marked checkpoint is never restored itself, so only the chains of the others count. Once a checkpoint can go it
    always can: a new checkpoint builds on what the newest builds on, or on nothing, and the newest is never marked.

    Args:
        first: each checkpoint that is not marked -> the first one that its restore reads, the earliest of any
            operator's; it reads every one from there to itself.
        marked: the checkpoints to delete, and those that waited for that already.
        leased: whether somebody reads a checkpoint.
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
