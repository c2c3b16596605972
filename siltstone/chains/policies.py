"""The adaptive base/delta policies by name, and the types needed to use them.

One policy serves every table; each table has its own `PolicyState`:

    policy = policy_by_name(DEFAULT_POLICY, PolicyOptions(restore_budget_s=30))
    state = policy.start()
    decision = policy.decide(state)               # before the interval: form, and whether to track changes
    state = policy.observe(state, CheckpointCost(form=..., bytes=..., seconds=...))
"""

from typing import Any, cast

from siltstone.chains.adjust_d_rules import AdjustD
from siltstone.chains.marginal_cost_rules import MarginalCost
from siltstone.chains.policy_rules import (
    CheckpointCost,
    Decision,
    Policy,
    PolicyOptions,
    PolicyState,
    RestoreBound,
    RestoreCost,
)
from siltstone.errors import UsageError

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "AdjustD",
    "CheckpointCost",
    "Decision",
    "MarginalCost",
    "Policy",
    "PolicyOptions",
    "PolicyState",
    "RestoreBound",
    "RestoreCost",
    "policy_by_name",
    "with_options",
]

POLICIES: dict[str, type[AdjustD] | type[MarginalCost]] = {"marginal-cost": MarginalCost, "adjust-d": AdjustD}
DEFAULT_POLICY = "marginal-cost"
"""the policy nearest to the optimum in hindsight: see `make bench-policy`"""


def policy_by_name(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return the policy of this name; `options` default to `PolicyOptions()`.

    Raises:
        UsageError: no policy has this name.
    """
    if name not in POLICIES:
        raise UsageError(f"{name!r} is not a checkpoint policy: use one of {', '.join(POLICIES)}")
    return POLICIES[name](options or PolicyOptions())


def with_options(policy: Policy, options: PolicyOptions) -> Policy:
    """Return the same policy with other options."""
    return cast("Any", type(policy))(options)
