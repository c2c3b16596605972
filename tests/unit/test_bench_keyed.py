"""The benchmark of a `KeyedProcessor`: both sides take the same steps, and a ratio is the median of the turns'."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import keyed


@pytest.mark.slow
def test_both_sides_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "SIZES", ((3000, 3000, 1), (3000, 3000, 10)))
    report = keyed.run(tmp_path, quick=True)
    assert [name for name in report.numbers if name != "load_average"] == ["300, 300, 1", "300, 300, 10"]
    ratios = []
    for size in ("300, 300, 1", "300, 300, 10"):
        sides = report.numbers[size]
        assert set(sides) == {keyed.KEYED, keyed.VECTORIZED}
        for what in ("seconds", "process_s"):
            one, other = (np.array(sides[name][what]) for name in (keyed.KEYED, keyed.VECTORIZED))
            assert len(one) == len(other) == 5 and (one > 0).all() and (other > 0).all()
            ratios.append(np.median(one / other))
        assert all(s > p for side in sides.values() for s, p in zip(side["seconds"], side["process_s"], strict=True))
    assert [goal.measured for goal in report.goals] == ratios and all(goal.is_kept is None for goal in report.goals)


def test_sides_that_differ_are_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(keyed.VectorizedSums):
        def process(self, rows, state):
            super().process(rows, state)
            super().process(rows, state)

    monkeypatch.setattr(keyed, "OPERATORS", {**keyed.OPERATORS, keyed.VECTORIZED: Twice})
    with pytest.raises(AssertionError, match="both keep the same state"):
        keyed.measure(tmp_path / "w", 20, 20, 1, 1)
