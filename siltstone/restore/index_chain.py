"""Follow one variable back to its base through the indexes, as US 9471438 restores from a key-value store.

Field iii of an entry is the checkpoint with the variable's previous version, field iv the position of its entry in
that checkpoint's index. So a variable is restored from its own chain alone, and variables with bases at different
checkpoints can be restored together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from siltstone.errors import CorruptObject
from siltstone.format.index import IndexEntry
from siltstone.model import Form


@dataclass(frozen=True, eq=False)
class Link:
    """One version of a variable: the checkpoint that holds it, its entry there, and the entry's position in the index
    of its step."""

    checkpoint: int
    entry: IndexEntry
    place: int


def follow(index_of: Callable[[int], Sequence[IndexEntry] | None], checkpoint: int, variable: str) -> list[Link]:
    """Return the chain of `variable`, a table, at `checkpoint`: its base, then every delta, in order.

    A checkpoint has an index for each of its steps. An index leaves out the tables that did not change, so that an
    entry may lie before the position that its table has among all tables, which is what links name.

    Args:
        index_of: returns a subtask's entries at a checkpoint of the chain; None if the key groups belonged to other
            subtasks then, which ends the chain there, as does an index without the variable: its writer had other key
            groups in the step that changed it.

    Raises:
        CorruptObject: the variable is not in the index of `checkpoint`, or a link leads to another variable.
    """
    links = _versions(index_of(checkpoint) or (), checkpoint, variable)
    if not links:
        raise CorruptObject(f"the index of checkpoint {checkpoint} has no variable {variable}")
    while (oldest := links[-1]).entry.form is Form.DELTA:
        before, place = oldest.entry.previous_checkpoint, oldest.entry.previous_entry
        entries = index_of(before)
        if entries is None:
            break
        older = _versions(entries, before, variable)
        if not older:
            break
        if place < older[0].place:
            raise CorruptObject(
                f"the index of checkpoint {oldest.checkpoint} says that {variable} builds on entry {place} of "
                f"checkpoint {before}, which is not its own"
            )
        links += older
    return links[::-1]


def _versions(entries: Sequence[IndexEntry], checkpoint: int, variable: str) -> list[Link]:
    """A variable's entries at one checkpoint, the newest step's first, back to a base."""
    links: list[Link] = []
    by_step = sorted(entries, key=lambda entry: -entry.sqn)
    for _, index in groupby(by_step, key=lambda entry: entry.sqn):
        for place, entry in enumerate(index):
            if entry.variable == variable:
                links.append(Link(checkpoint, entry, place))
                if entry.form is Form.BASE:
                    return links
    return links
