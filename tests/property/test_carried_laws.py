"""What acknowledgements and tasks carry of the log is bounded in total, and checkpoints are the same all the same."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog import carried_rules
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.carried_rules import inline_limit_bytes
from siltstone.changelog.upload_options import UploadOptions
from siltstone.run.region import RegionOptions, bound_inline
from siltstone.run.task import StepTask
from tests.outbox_run import STREAM as WITH_SINK
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY, Counted, Sums, rows, stream_of

STREAM = stream_of(Counted(name="counted"), Sums(name="sums"), max_parallelism=16)


def inline_bytes(a: Acknowledgement) -> int:
    """What is inline in an acknowledgement."""
    return sum(map(len, a.inline)) + sum(len(staged.inline) for staged in a.outputs.values())


class Watched(RegionRun):
    """Notes what the newest step carried, both ways."""

    def begin(self) -> None:
        """Begin to note."""
        self.answered, self.carried, self.carried_inline, self.of_a_step = 0, 0, 0, 0

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """Note it."""
        self.of_a_step = max([self.of_a_step, *(len(step.packed) for step in task.log)])
        self.carried = max(self.carried, sum(len(step.packed) for step in task.log))
        parts = [step.part(subtask) for step in task.log for subtask in range(task.parallelism)]
        self.carried_inline += sum(map(inline_bytes, parts))
        output, received = super().attempt(task, rows)
        self.answered += sum(map(inline_bytes, received))
        return output, received


@given(st.integers(0, 1 << 30), st.integers(1, 5000), st.integers(1, 200))
def test_the_acknowledgements_of_a_step_are_bounded_together(option: int, subtasks: int, parts: int) -> None:
    limit = inline_limit_bytes(option, subtasks, parts)
    assert 0 <= limit <= option and limit * subtasks * parts <= carried_rules.STEP_BYTES
    assert limit == option or (limit + 1) * subtasks * parts > carried_rules.STEP_BYTES, "not less than it may be"


def test_each_part_of_an_acknowledgement_counts() -> None:
    of_eight = RegionOptions(parallelism=8)
    assert bound_inline(of_eight, WITH_SINK) == of_eight, "few subtasks keep what the options say"
    many = RegionOptions(parallelism=8192, upload=UploadOptions(inline_bytes=1 << 14))
    for stream, parts in (
        (replace(WITH_SINK, sinks={}), 1),
        (WITH_SINK, 2),
        (replace(WITH_SINK, on_bad_row="dead-letter"), 3),
        (STREAM, 2),
    ):
        assert bound_inline(many, stream).upload.inline_bytes == 1024 // parts


@pytest.mark.parametrize(
    ("step_bytes", "sent_bytes", "parallelism"), [(1500, 0, 3), (2000, 1 << 20, 3), (0, 0, 1)], ids=str
)
def test_no_step_hands_over_more_inline_and_the_state_is_the_same(
    tmp_path: Path, step_bytes: int, sent_bytes: int, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for bounded in (False, True):
        if bounded:
            monkeypatch.setattr(carried_rules, "STEP_BYTES", step_bytes)
            monkeypatch.setattr(carried_rules, "SENT_BYTES", sent_bytes)
            monkeypatch.setattr("siltstone.changelog.log.INLINE_BYTES", 0)
        with OpenWarehouse.open_writable(str(tmp_path / str(bounded))) as place:
            answered = 0
            # Another parallelism in the second run cuts key groups, so that a task has several writers.
            for subtasks, steps in ((parallelism, (1, 2)), (5, (3, 4, 5))):
                run = Watched(place, STREAM, POLICY, subtasks, checkpoint_steps=10)
                for n in steps:
                    run.begin()
                    run.step(rows(n, changed=20), last=n == steps[-1])
                    answered = max(answered, run.answered)
                    assert not bounded or sent_bytes or not run.carried_inline, "all was stored before"
                run.region.close("done")
            assert answered <= step_bytes if bounded else answered > step_bytes
            assert not failures(place, NAME)
            digests.append(restored_digest(place, NAME, run.region.completed))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("max_pending", [0, 2])
def test_an_interval_ends_once_its_tasks_carry_too_much(
    tmp_path: Path, max_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 3000
    monkeypatch.setattr(carried_rules, "INTERVAL_BYTES", bound)
    upload = UploadOptions(inline_bytes=0)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = Watched(place, STREAM, POLICY, 4, checkpoint_steps=1000, upload=upload, max_pending=max_pending)
        lengths = []
        for n in range(1, 16):
            before = run.region.protocol.pending
            run.begin()
            completed = run.step(rows(n))
            lengths += [] if completed is None else [completed.steps]
            assert run.carried <= (1 + len(before)) * (bound + 2 * run.of_a_step), "two steps at most exceed it"
        run.complete_pending()
        lengths += [completed.steps for completed in run.completed]
        assert len(lengths) > 2 and min(lengths) > 1 and not failures(place, NAME)
        digest = run.region.digest
        run.region.close("done")
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as place:
        still, newest = RegionRun(place, STREAM, POLICY, checkpoint_steps=1000), run.region.completed_step
        for n in range(1, newest + 1):
            still.step(rows(n), last=n == newest)
        assert still.region.digest == digest
