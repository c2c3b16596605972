"""The timeline: what the protocol did, as the manifests carry it, whatever overlaps; and how it is drawn."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.report import ReportData, report_data
from siltstone.report.timeline import PHASES, Timeline, timeline_of
from siltstone.report.timeline_panel import SHOWN, panel_height
from siltstone.run import protocol_rules as rules
from siltstone.run.coordinator import EVENTS, STEPS_MAX, CheckpointTimes
from tests.orphans import filesystem
from tests.region_run import RegionRun
from tests.report_chain import drawn, record_chain, report_catalog
from tests.sums import NAME, POLICY, STREAM, rows

START = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with filesystem(tmp_path) as place:
        yield place


class Played:
    """A region whose moves are made one after the other, each some milliseconds after the one before; what its
    manifests carry, and what really happened."""

    def __init__(self, max_pending: int) -> None:
        self.region = replace(rules.open_region(3, ["a", "b"], 10, 20), max_pending=max_pending)
        self.ms = 0
        self.times = CheckpointTimes(lambda: START.timestamp() + self.ms / 1000)
        self.happened: dict[int, dict[str, int]] = {}
        self.steps: dict[int, list[int]] = {}
        self.records: list[CheckpointRecord] = []
        self.taken: dict[int, dict[str, Any]] = {}

    def move(self, after_ms: int, region: rules.Region) -> None:
        self.ms += after_ms
        before, self.region = self.region, region
        self.times.observe(before, region)

    def note(self, checkpoint: int, event: str) -> None:
        self.happened.setdefault(checkpoint, {})[event] = self.ms

    def choices(self) -> list[str]:
        """What the protocol allows now."""
        region, found = self.region, list[str]()
        if region.running is not None:
            found.append("acknowledge")
        else:
            found += ["begin", "end"] if region.has_room else ["begin"]
        states = [each.state for each in region.pending]
        if rules.CheckpointState.PREPARED in states:
            found.append("store")
        if any(each.state is rules.CheckpointState.PENDING and not each.durable for each in region.pending):
            found.append("durable")
        if region.running is None and region.pending and rules.may_commit(region, region.pending[0].id):
            found.append("commit")
        return [*found, "deliver"] if region.delivered < region.completed > 10 else found

    def play(self, choice: str, after_ms: int) -> None:
        region = self.region
        if choice in ("begin", "end"):
            self.move(after_ms, rules.begin_step(region, ends=choice == "end"))
            self.steps[self.region.step] = [self.ms]
            if choice == "end":
                self.note(region.next_checkpoint, "drain")
        elif choice == "acknowledge":
            assert region.running is not None
            last = len(region.running.awaited) == 1
            self.move(after_ms, rules.acknowledge(region, min(region.running.awaited)))
            if last:
                self.steps[region.step].append(self.ms)
                if region.running.ends:
                    self.note(self.region.pending[-1].id, "prepared")
        elif choice == "store":
            id = next(c.id for c in region.pending if c.state is rules.CheckpointState.PREPARED)
            self.move(after_ms, rules.begin_storing(region, id))
            self.note(id, "storing")
        elif choice == "durable":
            id = next(c.id for c in region.pending if c.state is rules.CheckpointState.PENDING and not c.durable)
            self.taken[id] = self.times.take()  # for its manifest
            self.move(after_ms, rules.note_durable(region, id))
            self.note(id, "durable")
        elif choice == "commit":
            id = region.pending[0].id
            self.move(after_ms, rules.note_committed(rules.begin_commit(region), id))
            self.note(id, "complete")
            at = START + timedelta(milliseconds=self.ms)
            record = SimpleNamespace(id=id, epoch=3, statistics={"times": self.taken[id]}, committed_at=at)
            self.records.append(cast(CheckpointRecord, record))
        else:
            self.move(after_ms, rules.note_delivered(region, region.completed))
            for id in range(11, region.completed + 1):
                self.happened[id].setdefault("delivered", self.ms)


def relative(timeline: Timeline) -> dict[int, dict[str, int]]:
    return {
        span.id: {event: round((at - START) / timedelta(milliseconds=1)) for event, at in span.at.items()}
        for span in timeline.checkpoints
    }


@settings(phases=[Phase.explicit, Phase.generate], max_examples=30)
@given(st.data(), st.integers(1, 3))
def test_a_timeline_is_what_happened_whatever_overlaps(data: st.DataObject, max_pending: int) -> None:
    played = Played(max_pending)
    for _ in range(data.draw(st.integers(10, 80))):
        played.play(data.draw(st.sampled_from(played.choices())), data.draw(st.integers(0, 900)))
    timeline = timeline_of(played.records)
    known = relative(timeline)
    assert list(known) == [record.id for record in played.records]
    for id, events in known.items():
        happened = played.happened[id]
        assert events.items() <= happened.items(), "nothing else"
        # What became of it after its manifest is in the later ones; of the newest, the catalog knows the commit.
        assert {"drain", "prepared", "storing", "complete"} <= events.keys() or id != max(known)
        assert {"drain", "prepared", "storing"} <= events.keys()
    for step in timeline.steps:
        began, ended = ((at - START) / timedelta(milliseconds=1) for at in (step.began_at, step.ended_at))
        assert [round(began), round(ended)] == played.steps[step.step]
    lanes = timeline.lanes()
    assert max(lanes, default=0) <= max_pending + 1
    for i, span in enumerate(timeline.checkpoints):
        for j, other in enumerate(timeline.checkpoints[:i]):
            assert lanes[i] != lanes[j] or other.ended_at <= span.began_at, "bars of one lane do not overlap"
    for span in timeline.checkpoints:
        phases = span.phases()
        assert [phase for phase, _, _ in phases] == sorted({p for p, _, _ in phases}, key=PHASES.index)
        assert all(a[2] == b[1] for a, b in pairwise(phases)), "without a gap"


def test_a_run_records_its_times(place: OpenWarehouse) -> None:
    run = RegionRun(place, STREAM, POLICY, checkpoint_steps=2)
    before = datetime.now(UTC)
    for n in range(1, 7):
        run.step(rows(n))
    timeline = report_data(place.catalog, NAME).timeline
    assert [span.id for span in timeline.checkpoints] == [1, 2, 3]
    assert [step.step for step in timeline.steps] == [1, 2, 3, 4, 5, 6]
    first, second, last = timeline.checkpoints
    assert [*first.at] == [*second.at] == [*EVENTS] and "durable" not in last.at and "complete" in last.at
    moments = [span.at[event] for span in (first, second) for event in EVENTS]
    assert moments == sorted(moments) and before - timedelta(milliseconds=1) <= moments[0] <= datetime.now(UTC)
    assert timeline.steps[1].began_at == first.at["drain"] and timeline.steps[1].ended_at == first.at["prepared"]
    run.step(rows(7))
    run.step(rows(8))
    again = report_data(place.catalog, NAME).timeline
    assert "delivered" in again.checkpoints[2].at and "durable" in again.checkpoints[2].at


def test_only_the_newest_steps_of_a_long_interval_are_kept() -> None:
    played = Played(1)
    for _ in range(3 * STEPS_MAX):
        for choice in ("begin", "acknowledge", "acknowledge"):
            played.play(choice, 5)
    taken = played.times.take()
    assert [step[0] for step in taken["steps"]] == [*range(21 + 2 * STEPS_MAX, 21 + 3 * STEPS_MAX)]
    assert played.times.take()["steps"] == [], "those that are left out do not come with the next"


def test_another_epochs_times_are_not_this_ones() -> None:
    """A checkpoint that was given up and made again has the times of the second."""

    def record(id: int, epoch: int, *checkpoints: list[int | None]) -> CheckpointRecord:
        times = {"from": 1000 * id, "steps": [], "checkpoints": list(checkpoints)}
        return cast(
            CheckpointRecord, SimpleNamespace(id=id, epoch=epoch, statistics={"times": times}, committed_at=START)
        )

    kept, made_again = record(5, 1, [5, 0, 1, 2, None, None, None]), record(6, 2, [5, 7, 7, 7, 7, 7, 7], [6, 0, 1, 2])
    spans = timeline_of([kept, made_again]).checkpoints
    assert [len(span.at) for span in spans] == [3, 4]


def test_what_older_versions_recorded_has_no_timeline(tmp_path: Path) -> None:
    with report_catalog(tmp_path) as catalog:
        data = record_chain(catalog)
    assert data.timeline == Timeline() and panel_height(data.timeline) == 0
    assert data.to_dict()["timeline"] == {"checkpoints": [], "steps": []}


@pytest.fixture
def overlapping(tmp_path: Path) -> ReportData:
    """A chain whose checkpoints take as long as three steps to become complete."""
    with report_catalog(tmp_path) as catalog:
        data = record_chain(catalog)
    played = Played(3)
    for _ in range(2 * SHOWN):
        for choice in ("end", "acknowledge", "acknowledge", "store"):
            played.play(choice, 60)
        if len(played.region.pending) == 3:
            for choice in ("durable", "commit", "deliver"):
                played.play(choice, 15)
    return replace(data, timeline=timeline_of(played.records))


def test_pending_checkpoints_are_drawn_above_each_other(overlapping: ReportData) -> None:
    shown = overlapping.timeline.select_newest(SHOWN)
    assert len(shown.checkpoints) == SHOWN and max(shown.lanes()) == 2
    figure = drawn(overlapping)
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left").startswith("Timeline"))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["micro-batches", "checkpoints", "2 at once", "3 at once"]
    numbers = {text.get_text() for text in ax.texts}
    assert {str(span.id) for span in shown.checkpoints} <= numbers
    legend = ax.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [*PHASES, "micro-batch"]


def test_the_timeline_is_part_of_the_json(overlapping: ReportData) -> None:
    found = overlapping.to_dict()["timeline"]
    span = found["checkpoints"][0]
    assert list(span)[:3] == ["id", "epoch", "seconds"] and list(span["seconds"]) == [*PHASES]
    assert span["delivered_at"].startswith("2026-11-20T12:00:0")
