"""Steps of the input log, and what a query needs to continue after them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from siltstone.catalog.records.source_entries import NO_ENTRIES

if TYPE_CHECKING:
    from sqlalchemy import Row

BEFORE_FIRST = -1
"""the batch id of step 0, which holds the initial offsets of a stream's sources"""


class StepKind(StrEnum):
    """What a step is."""

    BATCH = "batch"
    """a micro-batch"""
    EMPTY = "empty"
    """a step without rows, which ends an interval as a micro-batch does: operators drain"""
    CHANGE = "change"
    """a change of the stream between two runs, such as an edit or a rescale: operators do not drain"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with what it read: a row of the input log.

    Attributes:
        batch_id: Spark's micro-batch; None for a step without one.
        offsets: the batch's text in Spark's offset log; empty without a batch.
        sources: the batch's text in the sources' logs.
        digests: what was read and made of it, as text (`run.step_digests`); empty if that is not known.
        clock: the step's clock, as text (`run.clock`); empty if none was recorded.
    """

    step: int
    batch_id: int | None
    offsets: str = ""
    sources: str = NO_ENTRIES
    kind: StepKind = StepKind.BATCH
    digests: str = ""
    clock: str = ""

    @classmethod
    def without_rows(cls, step: int, kind: StepKind = StepKind.EMPTY) -> "Step":
        """Make a step that reads nothing."""
        return cls(step, None, kind=kind)

    @property
    def batch(self) -> int:
        """Spark's micro-batch, of a step that has one."""
        if self.batch_id is None:
            raise ValueError(f"step {self.step} has no batch")
        return self.batch_id


@dataclass(frozen=True, slots=True)
class StepRecord(Step):
    """A recorded step and its checkpoint, which may have been deleted since."""

    checkpoint: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class InputPosition:
    """What a query needs to continue after a checkpoint.

    Attributes:
        beginning: where the sources begin: a step of batch `BEFORE_FIRST`, with each source's initial offset (`-` if it
            has none, or keeps it in its own log) and the entries of sources' logs so far. None for a stream that has
            not begun a batch, or began before this was recorded.
        entries: the steps up to the checkpoint with entries of sources' logs, oldest first.
        newest: the newest two steps with a batch up to the checkpoint, oldest first.
    """

    beginning: Step | None
    entries: Sequence[Step]
    newest: Sequence[StepRecord]

    @property
    def next_batch(self) -> int:
        """The id of the next batch."""
        return self.newest[-1].batch + 1 if self.newest else 0


def with_ends(steps: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, bool]]:
    """Yield steps of whole checkpoints, in order, each with whether it is the last one of its checkpoint."""
    for n, step in enumerate(steps, 1):
        yield step, n == len(steps) or steps[n].checkpoint != step.checkpoint


def to_step(row: "Row[Any]") -> StepRecord:
    """Convert a row of table step to a record."""
    kind = StepKind(row.kind)
    return StepRecord(
        *(row.step, row.batch_id, row.offsets, row.sources or NO_ENTRIES, kind, row.digests or "", row.clock or ""),
        checkpoint=row.checkpoint,
    )


def step_values(step: Step) -> dict[str, Any]:
    """Return the values of table step for what was read."""
    sources = None if step.sources == NO_ENTRIES else step.sources
    values = {"step": step.step, "kind": step.kind, "batch_id": step.batch_id, "offsets": step.offsets}
    return values | {"sources": sources, "digests": step.digests or None, "clock": step.clock or None}
