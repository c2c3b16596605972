"""files: each checkpoint of a table is RocksDB's files, of which only new ones are written.

RocksDB merges its files in the background, so a restore reads about the live state, and what is not merged yet. There
are no deltas whose number would have to be decided, and no changes to log. Flink calls this an incremental checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from siltstone.chains import chain_rules as chain
from siltstone.chains.policy_rules import (
    CheckpointCost,
    Decision,
    PolicyOptions,
    PolicyState,
    RestoreBound,
    RestoreCost,
)
from siltstone.model import Form


@dataclass(frozen=True, slots=True)
class Files:
    """Every checkpoint is in form `files`, whatever it costs; it needs working state in RocksDB."""

    options: PolicyOptions

    def start(self) -> PolicyState:
        """Begin with nothing."""
        return PolicyState()

    def decide(self, state: PolicyState) -> Decision:
        """Decide for files."""
        return Decision(form=Form.FILES, tracking=False, d=0, reason="RocksDB's files, of which new ones are written")

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        """Account for a checkpoint."""
        return chain.account(state, cost, self.options)

    def observe_materialization(
        self, state: PolicyState, base: CheckpointCost, deltas: Sequence[CheckpointCost]
    ) -> PolicyState:
        """Begin the chain anew."""
        return chain.rebase(state, base, deltas)

    def observe_restore(self, state: PolicyState, cost: RestoreCost) -> PolicyState:
        """Learn the restore factors, by `chain.account_restore`."""
        return chain.account_restore(state, cost)

    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """Return what a restore reads and takes now: there will be no deltas."""
        return chain.worst_restore(state, self.options, 0)
