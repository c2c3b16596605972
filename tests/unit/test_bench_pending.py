"""The benchmark of pending checkpoints: its ratios, taken within each round and over the sizes."""

import pytest

from benchmarks.pending import BLOCKING, PENDING, Steps, report_of


def test_waits_are_compared_within_each_round_and_over_the_sizes() -> None:
    def steps(*waits: float) -> Steps:
        return Steps(list(waits), [1.0] * len(waits))

    small = {BLOCKING: [steps(0.4, 0.6), steps(1.0)], PENDING: [steps(0.02, 0.08), steps(0.3)]}
    great = {BLOCKING: [steps(1.0), steps(1.0)], PENDING: [steps(0.2), steps(0.6)]}
    one, other, growth = report_of({"300k, 10k": small, "10M, 10k": great}).goals
    assert (one.measured, one.low, one.verdict) == (pytest.approx(0.2), pytest.approx(0.1), "within the spread")
    assert (other.measured, other.is_kept) == (pytest.approx(0.4), False)
    assert (growth.measured, growth.low, growth.is_kept) == (pytest.approx(3.0), pytest.approx(2.0), False)
    assert len(report_of({"300k, 10k": small}).goals) == 1
