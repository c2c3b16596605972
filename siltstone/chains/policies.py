"""The policies by name: adaptive ones for base and delta, and `files`; and the types needed to use them.

One policy serves every table; each table has its own `PolicyState`:

    policy = policy_by_name(DEFAULT_POLICY, PolicyOptions(restore_budget_s=30))
    state = policy.start()
    decision = policy.decide(state)               # before the interval: form, and whether to track changes
    state = policy.observe(state, CheckpointCost(form=..., bytes=..., seconds=...))
"""

from siltstone.chains.adjust_d_rules import AdjustD
from siltstone.chains.chain_rules import Policy
from siltstone.chains.files_rules import Files
from siltstone.chains.marginal_cost_rules import MarginalCost
from siltstone.chains.policy_rules import (
    CheckpointCost,
    Decision,
    PolicyOptions,
    PolicyState,
    RestoreBound,
    RestoreCost,
)
from siltstone.errors import UsageError

__all__ = [
    "DEFAULT_POLICY",
    "FILES_BACKEND",
    "FILES_POLICY",
    "POLICIES",
    "AdjustD",
    "CheckpointCost",
    "Decision",
    "Files",
    "MarginalCost",
    "Policy",
    "PolicyOptions",
    "PolicyState",
    "RestoreBound",
    "RestoreCost",
    "check_backend",
    "policy_by_name",
]

POLICIES: dict[str, type[Policy]] = {"marginal-cost": MarginalCost, "adjust-d": AdjustD}
"""the policies that choose between base and delta"""
FILES_POLICY = "files"
"""the policy whose checkpoints are files of RocksDB"""
DEFAULT_POLICY = "marginal-cost"
"""the policy nearest to the optimum in hindsight: see `make bench-policy`"""


def policy_by_name(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return the policy of this name; `options` default to `PolicyOptions()`.

    Raises:
        UsageError: no policy has this name.
    """
    if name == FILES_POLICY:
        return Files(options or PolicyOptions())
    if name not in POLICIES:
        known = ", ".join((*POLICIES, FILES_POLICY))
        raise UsageError(f"{name!r} is not a checkpoint policy: use one of {known}")
    return POLICIES[name](options or PolicyOptions())


FILES_BACKEND = "rocksdb"
"""the backend whose working state lies in files that a checkpoint can consist of"""


def check_backend(policy: Policy, backend: str) -> None:
    """Check that a policy can be had with a backend of working state.

    Raises:
        UsageError: it cannot.
    """
    if isinstance(policy, Files) and backend != FILES_BACKEND:
        raise UsageError(
            f"the policy files stores RocksDB's files, and the working state is in backend {backend!r}: add "
            f"--backend {FILES_BACKEND}, or use another policy"
        )
