"""The benchmark of rolling forward: each way opens the state as it says, and a ratio is the median of the turns'."""

import shutil
from pathlib import Path

import pytest

from benchmarks import rolling
from benchmarks.rolling import FORWARD, RESTORE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same", "logged"), [(True, True), (False, False)], ids=["same keys, logged", "other keys, in checkpoints"]
)
def test_each_way_opens_the_state_that_the_steps_made(tmp_path: Path, same: bool, logged: bool) -> None:
    turns = rolling.measure(tmp_path, 400, 30, 2, same=same, logged=logged)
    assert len(turns) == 2 and all(turn[FORWARD] > 0 < turn[RESTORE] for turn in turns)


@pytest.mark.slow
def test_a_restore_does_not_pass_for_rolling_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without usable working state the engine restores, and the two sides would measure the same."""

    def copy_nothing(_: Path, target: Path) -> None:
        target.mkdir(parents=True)

    monkeypatch.setattr(shutil, "copytree", copy_nothing)
    with pytest.raises(RuntimeError, match="was opened by restore"):
        rolling.measure(tmp_path, 400, 30, 1, same=True, logged=False)


def test_the_ratio_is_taken_within_each_turn() -> None:
    turns = [{FORWARD: 0.1, RESTORE: 1.0}, {FORWARD: 1.0, RESTORE: 5.0}, {FORWARD: 0.1, RESTORE: 2.0}]
    met, free = rolling.report_of({rolling.SAME: turns, rolling.OTHER: turns}, "3M, 10 steps of 100k").goals
    assert (met.measured, met.at_most, met.is_kept) == (0.1, 0.1, True)
    assert (free.measured, free.at_most, free.is_kept) == (0.1, None, None)
    (missed,) = rolling.report_of({rolling.SAME: turns[1:2]}, "3M, 10 steps of 100k").goals
    assert missed.measured == pytest.approx(0.2) and missed.is_kept is False
