"""How near the default policy comes to the optimum in hindsight: `make bench-policy` in small."""

import numpy as np

from benchmarks import policy
from siltstone.chains.policies import DEFAULT_POLICY


def test_the_default_policy_is_near_the_optimum() -> None:
    """Loosely: few and short traces vary, and a chain's beginning weighs more in them."""
    _, ratios = policy.measure(1, 150, {DEFAULT_POLICY: policy.POLICIES[DEFAULT_POLICY]})
    average, worst = policy.goals(ratios[DEFAULT_POLICY])
    assert 1 <= average.measured < 1.06 and 1 <= worst.measured < 1.25


def test_the_goals_are_of_thirteen_traces() -> None:
    ratios = np.ones((15, 4, 2))
    ratios[7:9] = 9
    ratios[14, 3] = 1.13
    average, worst = policy.goals(ratios)
    assert average.is_kept and not worst.is_kept and worst.measured == 1.13
