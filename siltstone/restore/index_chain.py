"""Follow one variable back to its base through the indexes, as US 9471438 restores from a key-value store.

Field iii of an entry is the checkpoint with the variable's previous version, field iv the position of its entry in
that checkpoint's index. So a variable is restored from its own chain alone, and variables with bases at different
checkpoints can be restored together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from siltstone.errors import CorruptObject
from siltstone.format.index import IndexEntry
from siltstone.model import Form


@dataclass(frozen=True, eq=False)
class Link:
    """One version of a variable: the checkpoint that holds it, and its entry there."""

    checkpoint: int
    entry: IndexEntry


def follow(index_of: Callable[[int], Sequence[IndexEntry] | None], checkpoint: int, variable: str) -> list[Link]:
    """Return the chain of `variable`, a table, at `checkpoint`: its base, then every delta, in order.

    Args:
        index_of: returns a subtask's index at a checkpoint of the chain; None if the key groups belonged to other
            subtasks then, which ends the chain there.

    Raises:
        CorruptObject: the variable is not in the index of `checkpoint`, or a link leads to another variable.
    """
    entry = next((e for e in index_of(checkpoint) or () if e.variable == variable), None)
    if entry is None:
        raise CorruptObject(f"the index of checkpoint {checkpoint} has no variable {variable}")
    links = [Link(checkpoint, entry)]
    while entry.form is Form.DELTA:
        before, place = entry.previous_checkpoint, entry.previous_entry
        entries = index_of(before)
        if entries is None:
            break
        if not 0 <= place < len(entries) or entries[place].variable != variable:
            raise CorruptObject(
                f"the index of checkpoint {links[-1].checkpoint} says that {variable} builds on entry {place} of "
                f"checkpoint {before}, which is not its own"
            )
        entry = entries[place]
        links.append(Link(before, entry))
    return links[::-1]
