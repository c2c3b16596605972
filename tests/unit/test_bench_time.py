"""The benchmarks of time at tiny sizes: what they compare and how they put it, not their speed."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import timers, ttl, windows
from benchmarks.rounds import Run
from benchmarks.windows import SIZE_US, WindowWorkload


def test_a_ttl_is_compared_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttl, "STATE_ROWS", 3000)
    monkeypatch.setattr(ttl, "STEP_ROWS", 300)
    report = ttl.run(tmp_path, quick=True)
    expected = []
    for backend in ttl.BACKENDS:
        plain, kept = (report.numbers[backend][side] for side in (ttl.PLAIN, ttl.KEPT))
        assert len(plain["s"]) == len(kept["s"]) == 4
        assert all(one > other for one, other in zip(kept["bytes"], plain["bytes"], strict=True))  # the stamps
        for what in ("s", "bytes"):
            expected.append(median(one / other for one, other in zip(kept[what], plain[what], strict=True)))
    assert [goal.measured for goal in report.goals] == expected


def test_a_restore_and_steps_that_fire_are_measured(tmp_path: Path) -> None:
    found, parts = timers.measure(tmp_path / "w", "heap", 300, 30, turns=2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"touches": 2, "sets": 2, "fires": 2}
    assert len(parts) == 2 and all(0 < part < 1 for part in parts)


@pytest.mark.parametrize(("apart", "open_steps"), [(1, 11), (4, 4)])
def test_each_step_opens_windows_and_a_watermark_later_closes_as_many(apart: int, open_steps: int) -> None:
    workload = WindowWorkload.of(50, warm_up=1, measured=2, apart=apart)
    minutes = []
    for keys, times in workload.draw():
        assert sorted(keys) == list(range(50))
        assert times.max() % SIZE_US == SIZE_US - 1 and len({*(times // SIZE_US)}) == 1
        minutes.append(int(times[0] // SIZE_US))
    assert minutes == list(range(minutes[0], minutes[0] + apart * workload.batches, apart))
    assert workload.first_measured == open_steps + 1 and workload.state_rows == 50 * open_steps


def test_systems_that_close_other_windows_are_no_comparison() -> None:
    workload = WindowWorkload.of(50, warm_up=0, measured=2, apart=4)
    steps = [{"batch": 4 + number, "rows": 50, "closed": 50} for number in range(2)]
    run = Run("heap", workload, steps, {}, {}, 0, 0.0)
    windows.check_closed(run)
    for changed in ([{**steps[0], "closed": 49}, steps[1]], steps[:1]):
        with pytest.raises(RuntimeError, match="heap: steps have"):
            windows.check_closed(replace(run, steps=changed))
