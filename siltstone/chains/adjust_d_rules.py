"""adjust-d: a number D of deltas between two bases, adjusted at each base.

Source: US 9471438, method adjustD and the claims on TckptBase > TckptDelta + Tlog and on the worst-case
restoration cost.
"""

from collections.abc import Sequence
from dataclasses import replace

from siltstone.chains import chain_rules as chain
from siltstone.chains.policy_rules import CheckpointCost, Decision, PolicyState, RestoreBound
from siltstone.model import Form


class AdjustD(chain.Policy):
    """D starts at `d0`. After a base come D deltas, then a base, at which D is adjusted.

    At a base or a materialization that ends a chain with deltas (or after a probe, at once): if a base costs more than
    the average delta and its logging, in bytes, D doubles; else it is halved. Then D is cut to what the bounds allow:
    `d_max`; D x average delta <= `size_ratio_max` x base; base_factor x TckptBase + D x delta_factor x average
    TckptDelta <= `restore_budget_s`. D = 0 turns tracking off: every checkpoint is a base, until after `probe_after`
    bases in a row a probe makes the next one a delta; if that was cheap, D is 1 again.
    """

    def start(self) -> PolicyState:
        """Begin with D = d0, or d_max if that is less."""
        return PolicyState(d=min(self.options.d0, self.options.d_max))

    def decide(self, state: PolicyState) -> Decision:
        """Decide by the rule of the class."""
        options = self.options
        if not state.checkpoints:
            return Decision(form=Form.BASE, tracking=False, d=state.d, reason="the first checkpoint")
        if state.deltas < state.d and (state.seen == 0 or chain.fits(state, options)):
            if chain.open_for_probe(state, options):
                return self._delta(state, f"delta {state.deltas + 1} of D = {state.d}")
        elif state.untracked >= options.probe_after and chain.open_for_probe(state, options):
            return self._delta(state, f"a probe after {state.untracked} bases")
        if state.d == 0:
            reason = "D = 0: deltas do not pay or do not fit"
        elif state.deltas >= state.d:
            reason = f"the chain has its D = {state.d} deltas"
        else:
            reason = "one more delta would pass a bound"
        return Decision(form=Form.BASE, tracking=False, d=state.d, reason=reason)

    def _delta(self, state: PolicyState, reason: str) -> Decision:
        limit = chain.delta_limit_bytes(state, self.options)
        return Decision(form=Form.DELTA, tracking=True, d=state.d, reason=reason, delta_limit_bytes=limit)

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        """Account for a checkpoint; adjust D at a base that ends a chain, and at a probe."""
        after = chain.account(state, cost)
        saw_delta = cost.form is Form.DELTA or cost.tracked_bytes is not None
        ends_chain = cost.form is Form.BASE and (state.deltas > 0 or saw_delta)
        probed = saw_delta and state.d == 0
        if not ends_chain and not probed:
            return after
        return replace(after, d=self._adjust_d(after))

    def _adjust_d(self, state: PolicyState) -> int:
        options = self.options
        d = state.d
        if self._pays(state):
            d = max(1, 2 * d)
        else:
            d //= 2
        fresh = replace(state, deltas=0, deltas_bytes=0.0, deltas_s=0.0, index_bytes=0.0, rows_before=0)
        count, size, seconds = chain.room(fresh, options)
        d = min(d, count)
        if state.mean_bytes > 0:
            d = int(min(d, size / state.mean_bytes))
        if state.mean_s > 0:
            d = int(min(d, seconds / state.mean_s))
        return d

    def _pays(self, state: PolicyState) -> bool:
        """Whether a base costs more than a delta and its logging (TckptBase > TckptDelta + Tlog, here in bytes)."""
        return state.base_bytes > state.mean_bytes * (1 + chain.logging_ratio(state, self.options))

    def observe_materialization(
        self, state: PolicyState, base: CheckpointCost, deltas: Sequence[CheckpointCost]
    ) -> PolicyState:
        """Begin the chain anew; adjust D, as at a base, if this made the chain shorter."""
        after = chain.rebase(state, base, deltas)
        if after.deltas >= state.deltas or not state.d:
            return after
        return replace(after, d=self._adjust_d(after))

    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """Return the most a restore may read and take before the next base, after D deltas."""
        return chain.worst_restore(state, self.options, max(state.d, 1))
