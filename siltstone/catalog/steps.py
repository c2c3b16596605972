"""Steps of the input log, and what a query needs to continue after them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from siltstone.catalog.source_entries import NO_ENTRIES

if TYPE_CHECKING:
    from sqlalchemy import Row

BEFORE_FIRST = -1
"""the batch id of step 0, which holds the initial offsets of a stream's sources"""


@dataclass(frozen=True, slots=True)
class Step:
    """One input step, Spark's batch `batch_id`: its text in the offset log and in the sources' logs."""

    step: int
    batch_id: int
    offsets: str
    sources: str = "{}"


@dataclass(frozen=True, slots=True)
class StepRecord(Step):
    """A recorded input step and its checkpoint, which may have been deleted since."""

    checkpoint: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class InputPosition:
    """What a query needs to continue after a checkpoint.

    Attributes:
        beginning: where the sources begin: a step of batch `BEFORE_FIRST`, with each source's initial offset (`-` if it
            has none, or keeps it in its own log) and the entries of sources' logs so far. None for a stream that has
            not begun a batch, or began before this was recorded.
        entries: the steps up to the checkpoint with entries of sources' logs, oldest first.
        newest: the newest two steps up to the checkpoint, oldest first.
    """

    beginning: Step | None
    entries: Sequence[Step]
    newest: Sequence[Step]

    @property
    def next_batch(self) -> int:
        """The id of the next batch."""
        return self.newest[-1].batch_id + 1 if self.newest else 0


def to_step(row: "Row[Any]") -> StepRecord:
    """Convert a row of table step to a record."""
    return StepRecord(row.step, row.batch_id, row.offsets, row.sources or NO_ENTRIES, checkpoint=row.checkpoint)


def step_values(step: Step) -> dict[str, Any]:
    """Return the values of table step for what was read."""
    sources = None if step.sources == NO_ENTRIES else step.sources
    return {"step": step.step, "batch_id": step.batch_id, "offsets": step.offsets, "sources": sources}
