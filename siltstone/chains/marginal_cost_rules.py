"""marginal-cost: ends a chain when one more delta costs more than starting afresh; needs no D in advance.

A checkpoint costs what it writes (a delta grown by the logging ratio) plus lambda times what its restore
would read. Chains are regeneration cycles, so by the renewal-reward theorem the best steady rule goes on
while the next delta costs no more than the least average cost per checkpoint that a fresh chain can reach
(the marginal value theorem). Four refinements keep that near the optimum when the changes are not steady:

* the next delta is forecast with a first-order autoregression about a slow mean, so that the policy learns
  whether a burst is over at once or stays;
* an expensive delta is still taken if the cheap deltas expected after it make up for it;
* a delta is planned before its size is known, and written only if it is worth its actual size: with a larger
  one, which the rule finds too expensive, the writer takes a base instead (`Decision.delta_limit_bytes`). Only the
  logging is lost then, so large changes need no forecast to be based: alternating, periodic or heavy-tailed;
* when deltas do not pay, the wait for the next probe is sqrt(2 c a) checkpoints, for a probe that costs c
  bases too much and a condition that has lasted a checkpoints: the wait that costs least if the condition is
  as likely to end as its age suggests (one end in a checkpoints), as in economic lot sizing.
"""

import math
from dataclasses import dataclass, replace

from siltstone.chains import chain_rules as chain
from siltstone.chains.policy_rules import CheckpointCost, Decision, PolicyState, RestoreBound
from siltstone.model import Form

_LEVEL_WEIGHT = 0.05
_PAIR_WEIGHT = 0.1
_PERSISTENCE_MAX = 0.98
_FEW = 3
_HALVINGS = 7
_PERSISTENCE_AT_FIRST = 0.5


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What the policy expects, in bytes."""

    base: float
    """cost of a base now"""
    delta: float
    """next delta"""
    typical: float
    """average of the deltas of the chain to come"""
    grown: float
    """1 + logging ratio"""
    chain_base: float
    chain_deltas: float


class MarginalCost(chain.Policy):
    """The policy of this module. The bounds are those of every policy; `probe_after` is the longest wait for a
    probe."""

    def decide(self, state: PolicyState) -> Decision:
        """Decide by the rule of the module."""
        options = self.options
        if not state.checkpoints:
            return Decision(form=Form.BASE, tracking=False, d=0, reason="the first checkpoint")
        may = chain.open_for_probe(state, options)
        if state.seen == 0:
            if may:
                return self._decision(state, Form.DELTA, 0, "to see what a delta costs")
            return self._decision(state, Form.BASE, 0, "no room for a delta")
        look = self._outlook(state)
        mean, length = self._fresh_chain(look)
        d = 0 if state.dear_for else length - 1
        fits = chain.fits(state, options)
        after_base = state.deltas == 0
        if fits and not (after_base and state.dear_for) and self._excess(state, look, mean) <= 0:
            return self._decision(state, Form.DELTA, d, "one more delta costs less than a fresh chain")
        if after_base:
            wait = self._probe_wait(state) if fits else options.probe_after
            if may and state.untracked >= wait:
                return self._decision(state, Form.DELTA, d, f"a probe after {state.untracked} bases")
            reason = f"deltas do not pay or do not fit; a probe after {wait} bases"
            return self._decision(state, Form.BASE, d, reason)
        reason = "cost more than a fresh chain" if fits else "pass a bound"
        return self._decision(state, Form.BASE, d, f"one more delta would {reason}")

    def _decision(self, state: PolicyState, form: Form, d: int, reason: str) -> Decision:
        delta = form is Form.DELTA
        limit = chain.delta_limit_bytes(state, self.options) if delta else None
        if limit is not None and state.seen:
            limit = min(limit, self._worth_bytes(state, limit))
        return Decision(form=form, tracking=delta, d=d, reason=reason, delta_limit_bytes=limit)

    def _worth_bytes(self, state: PolicyState, limit_bytes: int) -> int:
        """Return the size, at most `limit_bytes`, above which a base is cheaper than a delta that has been tracked."""
        low, high = 0.0, float(limit_bytes)
        for _ in range(_HALVINGS):
            size = (low + high) / 2
            # Its changes have been tracked by then, whatever is written.
            look = self._outlook(replace(state, last_bytes=size))
            mean, _ = self._fresh_chain(look)
            if self._excess(state, replace(look, delta=size), mean, logged=True) <= 0:
                low = size
            else:
                high = size
        return int(high)

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        """Account for a checkpoint, and learn from a delta how deltas vary and persist."""
        after = chain.account(state, cost)
        if after.seen == state.seen:
            return replace(after, dear_for=state.dear_for + 1 if state.dear_for else 0)
        new, old = after.last_bytes, state.last_bytes
        level = state.level if state.seen else new
        variance, covariance = state.variance, state.covariance
        if state.seen and not state.untracked:
            was, now = old - level, new - level
            variance += _PAIR_WEIGHT * ((was * was + now * now) / 2 - variance)
            covariance += _PAIR_WEIGHT * (was * now - covariance)
        level += max(_LEVEL_WEIGHT, 1 / after.seen) * (new - level)
        dear_for = state.dear_for + 1 if self._predict_surcharge(after) >= 0 else 0
        return replace(after, level=level, variance=variance, covariance=covariance, dear_for=dear_for)

    def _predict_surcharge(self, state: PolicyState) -> float:
        """Return how much more than a base a delta like the last would cost after a base, in bases."""
        base, _ = chain.next_base(state)
        if base <= 0:
            return 0.0
        return (self._growth(state) + self.options.restore_weight) * state.last_bytes / base - 1

    def _growth(self, state: PolicyState) -> float:
        return 1 + chain.logging_ratio(state, self.options)

    def _outlook(self, state: PolicyState) -> _Outlook:
        last = state.last_bytes
        persistence = _PERSISTENCE_AT_FIRST
        if state.seen >= _FEW and state.variance > 0:
            persistence = min(_PERSISTENCE_MAX, max(0.0, state.covariance / state.variance))
        delta = max(0.0, state.level + persistence * (last - state.level))
        look = _Outlook(
            base=chain.next_base(state)[0],
            delta=delta,
            typical=delta,
            grown=self._growth(state),
            chain_base=state.base_bytes,
            chain_deltas=state.deltas_bytes,
        )
        length = self._fresh_chain(look)[1]
        fading = persistence * (1 - persistence**length) / (1 - persistence) / length
        return replace(look, typical=max(0.0, state.level + fading * (last - state.level)))

    def _fresh_chain(self, look: _Outlook) -> tuple[float, int]:
        """Return (least average cost per checkpoint, checkpoints) of a chain of typical deltas begun now.

        The average of m checkpoints is lambda b + (b + (m - 1) w d) / m + lambda d (m - 1) / 2, least near
        m = sqrt(2 (b - w d) / (lambda d)).
        """
        weight, d, base = self.options.restore_weight, look.typical, look.base
        carried = weight * d
        most = 1 + self._chain_room(d, self.options.d_max, base, 0.0, base)
        gain = base - look.grown * d
        best = float(most)
        if gain <= 0:
            best = 1.0
        elif carried > 0:
            best = min(best, math.sqrt(2 * gain / carried))

        def average(m: int) -> float:
            return weight * base + (base + (m - 1) * look.grown * d) / m + carried * (m - 1) / 2

        return min((average(m), m) for m in {max(1, math.floor(best)), max(1, min(most, math.ceil(best)))})

    def _chain_room(self, delta: float, count: int, base: float, deltas: float, live: float) -> int:
        """Return how many more deltas of size `delta` the count, the size ratio and the cap on space allow."""
        ratio, cap = self.options.size_ratio_max, self.options.space_amplification_max
        if delta <= 0:
            return count
        by_ratio = math.inf if ratio is None else ratio * base - deltas
        by_space = math.inf if cap is None else cap * live - base - deltas
        return max(0, int(min(count, by_ratio / delta, by_space / delta)))

    def _excess(self, state: PolicyState, look: _Outlook, mean: float, *, logged: bool = False) -> float:
        """Return what the next delta, and the deltas after it that pay, cost beyond `mean` per checkpoint.

        Delta i after the next costs w d + lambda (read + i d); a restore of the next checkpoint reads `read`.
        """
        weight, d = self.options.restore_weight, look.typical
        deltas = look.chain_deltas + look.delta
        read = look.chain_base + deltas
        excess = (1 if logged else look.grown) * look.delta + weight * read - mean
        carried = weight * d
        first = look.grown * d + weight * read - mean
        left = self._chain_room(d, self.options.d_max - state.deltas - 1, look.chain_base, deltas, look.base)
        more = left if carried <= 0 else max(0, int(min(left, -first / carried)))
        return excess + min(0.0, more * first + carried * more * (more + 1) / 2)

    def _probe_wait(self, state: PolicyState) -> int:
        """Return the number of untracked bases in a row before the next probe, by the rule of the module."""
        if not state.dear_for:
            return self.options.probe_after
        wait = int(math.sqrt(2 * max(0.0, self._predict_surcharge(state)) * state.dear_for))
        return min(self.options.probe_after, wait)

    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """Return the most a restore may read and take before the next base.

        Bytes are all that the bounds leave; seconds are those of the chain that deltas of the predicted size get.
        """
        expected = chain.worst_restore(state, self.options, state.deltas + self._steady_deltas(state))
        return replace(expected, bytes=chain.worst_restore(state, self.options, self.options.d_max).bytes)

    def _steady_deltas(self, state: PolicyState) -> int:
        """Return how many more deltas of the predicted size the chain gets, at least one: found by bisection."""
        size_bytes, seconds = chain.next_delta(state)
        low, high = 1, max(1, self.options.d_max - state.deltas)

        def goes_on(after: int) -> bool:
            later = replace(
                state,
                deltas=state.deltas + after,
                deltas_bytes=state.deltas_bytes + after * size_bytes,
                deltas_s=state.deltas_s + after * seconds,
                index_bytes=state.index_bytes + after * state.last_index_bytes,
                last_bytes=size_bytes,
                last_s=seconds,
                rows_before=0,
            )
            look = self._outlook(later)
            return chain.fits(later, self.options) and self._excess(later, look, self._fresh_chain(look)[0]) <= 0

        while low < high:
            middle = (low + high) // 2
            if goes_on(middle):
                low = middle + 1
            else:
                high = middle
        return low
