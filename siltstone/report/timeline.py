"""When micro-batches were processed, and checkpoints stored, committed and delivered, as their runs noted it.

    drain     the checkpoint's last micro-batch is being processed
    waiting   every task has handed over its changes, and nothing is on its way yet
    storing   changes, staged outputs and at last the manifest are on their way to the store
    commit    the manifest is in the store, and the catalog is asked
    delivery  the checkpoint is complete, and its outputs are on their way to sinks

Several checkpoints may be on their way at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.run.coordinator import EVENTS

PHASES = ("drain", "waiting", "storing", "commit", "delivery")
"""what is between two events of a checkpoint (`run.coordinator.EVENTS`), in order"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A step, and the time from its beginning to the acknowledgement of its last task, in UTC."""

    step: int
    began_at: datetime
    ended_at: datetime

    def to_dict(self) -> dict[str, Any]:
        """Return the micro-batch as JSON values."""
        return {"step": self.step, "began_at": _text(self.began_at), "ended_at": _text(self.ended_at)}


@dataclass(frozen=True, slots=True)
class CheckpointSpan:
    """A checkpoint on its way: event -> when it happened, in UTC, of those events that are known."""

    id: int
    epoch: int
    at: Mapping[str, datetime]

    @property
    def began_at(self) -> datetime:
        """The first event that is known."""
        return min(self.at.values())

    @property
    def ended_at(self) -> datetime:
        """The last event that is known."""
        return max(self.at.values())

    def phases(self) -> list[tuple[str, datetime, datetime]]:
        """Return phase, beginning and end of each phase that is known, in order.

        Where an event is not known, the phase before it lasts until the next one that is.
        """
        known = [(event, self.at[event]) for event in EVENTS if event in self.at]
        return [(PHASES[EVENTS.index(event)], at, max(at, then)) for (event, at), (_, then) in pairwise(known)]

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as JSON values."""
        seconds = {phase: round((last - first).total_seconds(), 3) for phase, first, last in self.phases()}
        return {"id": self.id, "epoch": self.epoch, "seconds": seconds} | {
            f"{event}_at": _text(self.at[event]) if event in self.at else None for event in EVENTS
        }


@dataclass(frozen=True, slots=True)
class Timeline:
    """Checkpoints and micro-batches with recorded times, oldest first."""

    checkpoints: Sequence[CheckpointSpan] = field(default_factory=tuple)
    steps: Sequence[MicroBatch] = field(default_factory=tuple)

    def select_newest(self, count: int) -> "Timeline":
        """Return at most `count` of the newest epoch's newest checkpoints, and the micro-batches from the first of them
        on."""
        epoch = self.checkpoints[-1].epoch if self.checkpoints else 0
        shown = [span for span in self.checkpoints if span.epoch == epoch][-count:]
        if not shown:
            return Timeline()
        # Those before its last one are its own, or of a checkpoint that is not shown.
        begin = shown[0].began_at if len(self.checkpoints) > len(shown) else datetime.min.replace(tzinfo=UTC)
        return Timeline(shown, [step for step in self.steps if step.ended_at > begin])

    def lanes(self) -> list[int]:
        """Return the lane of each checkpoint: the lowest in which the one before it has ended by then."""
        ends: list[datetime] = []
        lanes = []
        for span in self.checkpoints:
            lane = next((lane for lane, end in enumerate(ends) if end <= span.began_at), len(ends))
            ends[lane:] = [span.ended_at, *ends[lane + 1 :]]
            lanes.append(lane)
        return lanes

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON values."""
        return {
            "checkpoints": [span.to_dict() for span in self.checkpoints],
            "steps": [step.to_dict() for step in self.steps],
        }


def timeline_of(records: Iterable[CheckpointRecord]) -> Timeline:
    """Gather the timeline of some checkpoints, oldest first, from their statistics (`run.coordinator`).

    The time of commit of the newest one is the catalog's. Those without times are left out.
    """
    timed = [record for record in records if record.statistics.get("times")]
    spans = {record.id: CheckpointSpan(record.id, record.epoch, {}) for record in timed}
    steps: dict[int, MicroBatch] = {}
    for record in timed:
        noted: Mapping[str, Any] = record.statistics["times"]
        start = datetime.fromtimestamp(noted["from"] / 1000, UTC)
        for id, *events in noted["checkpoints"]:
            # A manifest also lists checkpoints before and after it. One of the same id and another epoch was given up.
            if id in spans and spans[id].epoch == record.epoch:
                known = {
                    event: start + timedelta(milliseconds=at)
                    for event, at in zip(EVENTS, events, strict=False)
                    if at is not None
                }
                spans[id] = replace(spans[id], at={**spans[id].at, **known})
        for number, began, ended in noted["steps"]:
            both = (start + timedelta(milliseconds=at) for at in (began, ended))
            steps[number] = MicroBatch(number, *both)
    if timed and "complete" not in spans[timed[-1].id].at:
        last = spans[timed[-1].id]
        spans[last.id] = replace(last, at={**last.at, "complete": timed[-1].committed_at})
    return Timeline(tuple(span for span in spans.values() if span.at), tuple(steps.values()))


def _text(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
