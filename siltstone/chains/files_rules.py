"""files: each checkpoint of a table is RocksDB's files, of which only new ones are written.

RocksDB merges its files in the background, so a restore reads about the live state, and what is not merged yet. There
are no deltas, so no D to decide, and no changes to log. Flink calls this an incremental checkpoint.
"""

from siltstone.chains import chain_rules as chain
from siltstone.chains.policy_rules import Decision, PolicyState, RestoreBound
from siltstone.model import Form


class Files(chain.Policy):
    """Every checkpoint is in form `files`, whatever it costs; it needs working state in RocksDB."""

    def decide(self, state: PolicyState) -> Decision:
        """Decide for files."""
        return Decision(form=Form.FILES, tracking=False, d=0, reason="RocksDB's files, of which new ones are written")

    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """Return what a restore reads and takes now: there will be no deltas."""
        return chain.worst_restore(state, self.options, 0)
