"""What all policies share: their methods, the current chain, the average delta, and the bounds on restores
(promise 7)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from siltstone.chains.policy_rules import (
    RESTORE_FACTOR,
    CheckpointCost,
    Decision,
    PolicyOptions,
    PolicyState,
    RestoreBound,
    RestoreCost,
)
from siltstone.errors import StateError
from siltstone.model import Form

_WEIGHT = 0.3
"""of the newest delta in the averages"""
_LOGGED_SHARE = 0.5
"""of an operator's bytes, the least that are of tables whose deltas pay where all of them are logged"""
_SPENT_SHARE = 0.8
"""of the seconds that the budget leaves after the newest checkpoint, those that the log may take. The interval's last
step adds to it, and writes a delta only while the chain keeps the budget."""
_LEAST_POWER = 1e-12
"""seconds squared: a restore of less than a microsecond says nothing about the factors"""
_LEAST_FACTOR = 0.01
_MOST_FACTOR = 1e6


@dataclass(frozen=True)
class Policy(ABC):
    """Decides the form of each checkpoint of one table. Policies are stateless, so one serves all tables.

    Every policy keeps restores within the bounds (promise 7). With the base b and the deltas of any one chain:
      1. a chain never has more than `d_max` deltas;
      2. if the writer respects `delta_limit_bytes`, deltas never sum to more than `size_ratio_max` x b bytes;
      3. a delta is chosen only if the chain with it is predicted to keep every bound; the next delta is assumed
         to be the larger of the average and the last one. Only the very first delta, and a probe (one delta after
         several bases, to find out whether deltas have changed), go without this forecast; rules 1 and 2 hold for
         them too;
      4. once a chain is at or past a bound, the next checkpoint is a base. So a writer that does not respect
         `delta_limit_bytes` passes a bound by at most one delta's forecast error, for one checkpoint;
      5. the same holds for the bound on space: base, deltas and indexes of a chain take at most
         `space_amplification_max` times the size of a base of the live state, which is the last base scaled by the
         number of rows. If that number fell, it is expected to fall by the same proportion again. Live state that
         shrinks faster passes the bound for one checkpoint, and the next is a base.
    The bound in seconds is base_factor x TckptBase + delta_factor x sum of TckptDelta <= `restore_budget_s`;
    both factors are 1.2 at first and then learned. If a base alone takes longer than the budget, every checkpoint
    is a base.
    """

    options: PolicyOptions

    def start(self) -> PolicyState:
        """Return the state before the first checkpoint."""
        return PolicyState()

    @abstractmethod
    def decide(self, state: PolicyState) -> Decision:
        """Decide the form of the next checkpoint."""

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        """Fold in a completed checkpoint, whatever was decided (a base may be forced at any time).

        Raises:
            StateError: a delta before any base.
        """
        return account(state, cost)

    def observe_materialization(
        self, state: PolicyState, base: CheckpointCost, deltas: Sequence[CheckpointCost]
    ) -> PolicyState:
        """Fold in a materialization: the current chain is now that base and the deltas after it."""
        return rebase(state, base, deltas)

    def observe_restore(self, state: PolicyState, cost: RestoreCost) -> PolicyState:
        """Learn both restore factors from a measured restore."""
        return account_restore(state, cost)

    @abstractmethod
    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """Return the most a restore may read and take before the next base."""


def account(state: PolicyState, cost: CheckpointCost) -> PolicyState:
    """Return `state` after a completed checkpoint: the chain's sums, and the averages if a delta was seen.

    A delta after two or more bases restarts the averages, which are older than those bases.
    """
    rows = state.rows if cost.rows is None else cost.rows
    after = replace(
        state,
        checkpoints=state.checkpoints + 1,
        rows=rows,
        rows_before=state.rows,
        index_bytes=state.index_bytes + cost.index_bytes,
        last_index_bytes=float(cost.index_bytes),
    )
    if cost.form is Form.DELTA:
        if not state.checkpoints:
            raise StateError("a delta checkpoint needs a base before it", advice="take a base first")
        size = cost.bytes if cost.tracked_bytes is None else cost.tracked_bytes
        after = _see(after, size, cost.seconds)
        if cost.log_s is not None and cost.seconds > 0:
            new = cost.log_s / cost.seconds
            old = new if state.log_ratio is None else state.log_ratio
            after = replace(after, log_ratio=old + _WEIGHT * (new - old))
        return replace(
            after,
            deltas=state.deltas + 1,
            deltas_bytes=state.deltas_bytes + cost.bytes,
            deltas_s=state.deltas_s + cost.seconds,
            untracked=0,
        )
    if cost.tracked_bytes is not None:
        after = _see(after, cost.tracked_bytes, cost.tracked_bytes * _seconds_per_byte(state))
    return replace(
        after,
        base_bytes=float(cost.bytes),
        base_s=float(cost.seconds),
        base_rows=cost.rows or 0,
        rows=cost.rows or 0,
        deltas=0,
        deltas_bytes=0.0,
        deltas_s=0.0,
        index_bytes=float(cost.index_bytes),
        untracked=state.untracked + 1 if cost.tracked_bytes is None else 0,
    )


def _see(state: PolicyState, size_bytes: float, seconds: float) -> PolicyState:
    restart = state.seen == 0 or state.untracked > 1
    weight = 1.0 if restart else _WEIGHT
    return replace(
        state,
        seen=state.seen + 1,
        last_bytes=float(size_bytes),
        last_s=float(seconds),
        mean_bytes=state.mean_bytes + weight * (size_bytes - state.mean_bytes),
        mean_s=state.mean_s + weight * (seconds - state.mean_s),
    )


def _seconds_per_byte(state: PolicyState) -> float:
    return state.mean_s / state.mean_bytes if state.mean_bytes > 0 else 0.0


def rebase(state: PolicyState, base: CheckpointCost, deltas: Sequence[CheckpointCost]) -> PolicyState:
    """Return `state` after a materialization: the current chain is that base and the deltas after it.

    A materialization also reads, so its seconds are not those of a checkpoint's base; these are predicted from bytes.
    """
    rate = state.base_s / state.base_bytes if state.base_bytes > 0 else 0.0
    return replace(
        state,
        base_bytes=float(base.bytes),
        base_s=base.bytes * rate,
        base_rows=base.rows or 0,
        deltas=len(deltas),
        deltas_bytes=float(sum(delta.bytes for delta in deltas)),
        deltas_s=float(sum(delta.seconds for delta in deltas)),
        index_bytes=float(sum(delta.index_bytes for delta in deltas)),
    )


def logging_ratio(state: PolicyState, options: PolicyOptions) -> float:
    """Return what tracking a delta's changes costs, per unit of the delta: as measured, or the option until then."""
    return options.logging_ratio if state.log_ratio is None else state.log_ratio


def account_restore(state: PolicyState, cost: RestoreCost) -> PolicyState:
    """Learn both restore factors from one restore.

    The first restores mostly say how fast this store and these machines read, which holds for bases and deltas alike:
    the n-th scales both factors by 1/n of what they were wrong. What is left goes to each by its part of the chain: a
    normalised least-mean-squares step all of the way, so that the same chain is predicted to take what it took.
    """
    power = cost.base_s**2 + cost.deltas_s**2
    if power < _LEAST_POWER:
        return state
    count = state.restores + 1
    predicted = state.base_factor * cost.base_s + state.delta_factor * cost.deltas_s
    scale = 1 + (cost.restore_s / predicted - 1) / count
    base, delta = _factor(state.base_factor * scale), _factor(state.delta_factor * scale)
    error = cost.restore_s - base * cost.base_s - delta * cost.deltas_s
    step = error / power
    base, delta = _factor(base + step * cost.base_s), _factor(delta + step * cost.deltas_s)
    return replace(state, base_factor=base, delta_factor=delta, restores=count)


def _factor(value: float) -> float:
    return min(_MOST_FACTOR, max(_LEAST_FACTOR, value))


def next_base(state: PolicyState) -> tuple[float, float]:
    """Predict (bytes, seconds) of a base taken now: the last base, scaled by the growth in rows."""
    if state.base_rows:
        growth = max(state.rows, 1) / state.base_rows
    elif state.base_bytes > 0:
        growth = 1.0
    else:
        return state.deltas_bytes, state.deltas_s
    return state.base_bytes * growth, state.base_s * growth


def next_delta(state: PolicyState) -> tuple[float, float]:
    """Predict (bytes, seconds) of the next delta: the larger of the average and the last."""
    return max(state.mean_bytes, state.last_bytes), max(state.mean_s, state.last_s)


def stored_bytes(state: PolicyState) -> float:
    """Return the bytes of the current chain in the store: base, deltas and indexes."""
    return state.base_bytes + state.deltas_bytes + state.index_bytes


def amplification(states: Collection[PolicyState]) -> float | None:
    """Return the bytes of these chains per byte of live state (what bases would take now); None if there is none."""
    live = sum(next_base(state)[0] for state in states)
    return sum(map(stored_bytes, states)) / live if live > 0 else None


def share_budget(states: Mapping[str, PolicyState], options: PolicyOptions) -> dict[str, PolicyOptions]:
    """Return table -> its options: the tables of an operator share `restore_budget_s`, as one restore reads them all.

    Each gets what its base takes, and of the rest a share by the seconds of its deltas. The other bounds hold for an
    operator if they hold for each of its tables.
    """
    budget = options.restore_budget_s
    if budget is None or len(states) <= 1:
        return dict.fromkeys(states, options)
    bases = {table: state.base_factor * state.base_s for table, state in states.items()}
    weights = {table: next_delta(state)[1] for table, state in states.items() if state.seen}
    mean = sum(weights.values()) / len(weights) if weights else 0.0
    # One that never changed may do so: by no more than its base, of which small ones may be many.
    weights |= {table: min(mean, state.base_s) for table, state in states.items() if not state.seen}
    known, total = sum(weights.values()), sum(bases.values())
    if not mean:
        weights, known = dict.fromkeys(states, 1.0), len(states)
    rest, fits = max(0.0, budget - total), min(1.0, budget / total) if total else 1.0
    shares = {table: bases[table] * fits + rest * weights[table] / known for table in states}
    # Options refuse a budget of 0 s, so a table without a share gets one that no delta fits into.
    return {table: options.model_copy(update={"restore_budget_s": share or 1e-9}) for table, share in shares.items()}


def begin_together(
    decisions: Mapping[str, Decision], states: Mapping[str, PolicyState], opaque: Collection[str]
) -> Mapping[str, Decision]:
    """Let an operator's opaque variables begin anew where its tables end their chains, unless together they are larger.

    Small values lie in the segments of what tables changed, which would have to stay for them.

    Args:
        decisions: table or opaque variable -> the decision on it in the next checkpoint; `states` are those of its
            policy.
    """
    tables = decisions.keys() - set(opaque)
    goes_on = any(decisions[table].form is Form.DELTA for table in tables)
    if goes_on or not any(states[table].deltas for table in tables):
        return decisions
    late = {variable for variable in opaque if decisions[variable].form is Form.DELTA}
    if sum(next_base(states[v])[0] for v in late) > sum(next_base(states[table])[0] for table in tables):
        return decisions
    base = {"form": Form.BASE, "tracking": False, "reason": "all tables begin anew", "delta_limit_bytes": None}
    return {v: replace(decision, **base) if v in late else decision for v, decision in decisions.items()}


def choose_tracked(
    decisions: Mapping[str, Decision], states: Mapping[str, PolicyState], *, ends: bool, whole: bool
) -> frozenset[str]:
    """Choose the tables of an operator of which a step logs what it changes.

    A table is tracked for itself, as in US 9471438: tracking costs nothing for one that always takes bases. Lost state
    can be rolled forward only by what was logged of all tables, though. So the steps between checkpoints log all, if
    those whose deltas pay have at least half of the bytes that bases would take.

    Args:
        decisions: table -> the decision on it in the next checkpoint; `states` are those of its policy.
        ends: whether the step ends in that checkpoint, which stores what is not tracked as bases.
        whole: whether the steps before it are to be logged whole in any case.
    """
    if ends:
        return frozenset(table for table, decision in decisions.items() if decision.tracking)
    pay = {table for table, decision in decisions.items() if decision.tracking or decision.d}
    size = {table: next_base(states[table])[0] for table in decisions}
    most = bool(pay) and sum(size[table] for table in pay) >= _LOGGED_SHARE * sum(size.values())
    return frozenset(decisions if whole or most else pay)


def add_chains(states: Collection[PolicyState]) -> PolicyState:
    """Return one chain as large as all of these together, with as many deltas as the longest.

    Its restore factors are the chains' averages, weighted by seconds written: it predicts the sum of their restores.
    """
    base_s, deltas_s = sum(s.base_s for s in states), sum(s.deltas_s for s in states)
    bases = sum(s.base_factor * s.base_s for s in states)
    deltas = sum(s.delta_factor * s.deltas_s for s in states)
    return PolicyState(
        checkpoints=max((s.checkpoints for s in states), default=0),
        rows=sum(s.rows for s in states),
        base_bytes=sum(s.base_bytes for s in states),
        base_s=base_s,
        base_rows=sum(s.base_rows for s in states),
        deltas=max((s.deltas for s in states), default=0),
        deltas_bytes=sum(s.deltas_bytes for s in states),
        deltas_s=deltas_s,
        index_bytes=sum(s.index_bytes for s in states),
        base_factor=bases / base_s if base_s else max((s.base_factor for s in states), default=RESTORE_FACTOR),
        delta_factor=deltas / deltas_s if deltas_s else max((s.delta_factor for s in states), default=RESTORE_FACTOR),
        restores=max((s.restores for s in states), default=0),
    )


def is_base_only(state: PolicyState) -> bool:
    """Whether the chain is a base and nothing else."""
    return state.checkpoints > 0 and not state.deltas


def _space(state: PolicyState, cap: float) -> float:
    """Return the bytes that the cap on space leaves for the next delta without its index (`Policy`, rule 5)."""
    kept = min(1.0, max(state.rows, 1) / state.rows_before) if state.rows_before else 1.0
    return cap * next_base(state)[0] * kept - stored_bytes(state) - state.last_index_bytes


def room(state: PolicyState, options: PolicyOptions) -> tuple[int, float, float]:
    """Return (deltas, bytes, seconds of writing) that the bounds leave in the current chain; inf if not bounded.

    No value is below 0. A budget in seconds bounds the bytes too, once the seconds per byte are known.
    """
    count = max(0, options.d_max - state.deltas)
    size, seconds = _bytes_left(state, options), math.inf
    if options.restore_budget_s is not None:
        seconds = (options.restore_budget_s - state.base_factor * state.base_s) / state.delta_factor - state.deltas_s
        if rate := _seconds_per_byte(state):
            size = min(size, seconds / rate)
    return count, max(0.0, size), max(0.0, seconds)


def _bytes_left(state: PolicyState, options: PolicyOptions) -> float:
    """Return the bytes that the bounds in bytes leave in the current chain."""
    size = math.inf
    if options.size_ratio_max is not None:
        size = options.size_ratio_max * state.base_bytes - state.deltas_bytes
    if options.space_amplification_max is not None:
        size = min(size, _space(state, options.space_amplification_max))
    return size


def open_for_probe(state: PolicyState, options: PolicyOptions) -> bool:
    """Whether the bounds leave room for any delta at all, however small."""
    return all(left > 0 for left in room(state, options))


def fits(state: PolicyState, options: PolicyOptions) -> bool:
    """Whether the chain with one more delta of the predicted size keeps every bound."""
    count, size, seconds = room(state, options)
    delta_bytes, delta_s = next_delta(state)
    return count > 0 and delta_bytes <= size and delta_s <= seconds and open_for_probe(state, options)


def delta_limit_bytes(state: PolicyState, options: PolicyOptions) -> int:
    """Return the bytes of the largest next delta that the bounds allow, at most those of a base."""
    return int(min(room(state, options)[1], next_base(state)[0]))


def restore_s(state: PolicyState) -> float:
    """Predict the seconds that restoring the newest checkpoint takes."""
    return state.base_factor * state.base_s + state.delta_factor * state.deltas_s


def spends_budget(states: Mapping[str, PolicyState], logged_bytes: Mapping[str, int], budget_s: float) -> bool:
    """Return whether an operator's interval is to end, so that state lost inside it comes back within the budget.

    Such state is restored at a checkpoint and rolled forward by the log since. A byte of the log is taken to need as
    long as one of the base or of the deltas, whichever is slower, as rolling forward is not measured. If a base alone
    takes nearly as long as the budget, no checkpoint helps.

    Args:
        states: table or opaque variable -> the state of its policy.
        logged_bytes: the same -> bytes of its changes since the newest checkpoint that is prepared, as the states are.
        budget_s: `restore_budget_s`.
    """
    log_s = 0.0
    for table, size in logged_bytes.items():
        state = states[table]
        base_pace = state.base_s / state.base_bytes if state.base_bytes else 0.0
        log_s += size * max(state.base_factor * base_pace, state.delta_factor * _seconds_per_byte(state))
    helps = sum(state.base_factor * next_base(state)[1] for state in states.values()) < _SPENT_SHARE * budget_s
    return helps and log_s > 0 and log_s >= _SPENT_SHARE * (budget_s - sum(map(restore_s, states.values())))


def worst_restore(state: PolicyState, options: PolicyOptions, longest: int) -> RestoreBound:
    """Return the most a restore may read and take, if the chain grows to `longest` deltas of the predicted size.

    If the number of rows fell, it is not expected to fall further, as that would underestimate the room left. Bytes are
    not predicted from seconds, since the average pace changes with every delta.
    """
    count, _, seconds = room(state, options)
    size = max(0.0, _bytes_left(replace(state, rows_before=0), options))
    delta_bytes, delta_s = next_delta(state)
    more = float(min(count, max(0, longest - state.deltas)))
    if delta_bytes > 0:
        more = min(more, size / delta_bytes)
    if delta_s > 0:
        more = min(more, seconds / delta_s)
    return RestoreBound(
        bytes=state.base_bytes + state.deltas_bytes + more * delta_bytes,
        seconds=restore_s(state) + state.delta_factor * more * delta_s,
    )
