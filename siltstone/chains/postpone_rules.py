"""Pure decisions: leave the bases that end chains to a materialization, so that the stream does not stop for them.

A base is a copy of a table's whole state. Where checkpoints may be pending, a step must not wait until it is written.
So a chain that the policy would end goes on with deltas while the bounds leave room, and the run's background
materializes it meanwhile (FLIP-158): the chain then begins with that base. The bounds stay as they are (promise 7). A
chain without room gets its base from the step.
"""

from collections.abc import Mapping
from dataclasses import replace

from siltstone.chains import chain_rules as chain
from siltstone.chains.policy_rules import Decision, PolicyOptions, PolicyState
from siltstone.model import Form

_LEAST_SHARE = 0.5
"""of an operator's bases, the part that a materialization must be wanted for, since it consolidates all its tables"""
_MOST_DELTA = 0.5
"""of a base, the largest delta to go on with: a step that writes a larger one might as well write the base"""


def postpone_bases(
    decisions: Mapping[str, Decision], states: Mapping[str, PolicyState], options: Mapping[str, PolicyOptions]
) -> tuple[dict[str, Decision], str | None]:
    """Turn the bases of an operator's next checkpoint into deltas, if a materialization is to make them.

    Args:
        decisions: table -> what the policy decided; `states` and `options` are those that it decided by.

    Returns:
        Table -> the decision to go by; and why the operator is to be materialized, None if it is not.
    """
    reasons = {
        table: decision.reason
        for table, decision in decisions.items()
        if decision.form is Form.BASE and _goes_on(states[table], options[table])
    }
    wanted = sum(chain.next_base(states[table])[0] for table in reasons)
    if not reasons or wanted < _LEAST_SHARE * sum(chain.next_base(state)[0] for state in states.values()):
        return dict(decisions), None
    postponed = {
        table: replace(
            decisions[table],
            form=Form.DELTA,
            tracking=True,
            reason=f"{reason}: a base is made beside the stream",
            delta_limit_bytes=chain.delta_limit_bytes(states[table], options[table]),
        )
        for table, reason in reasons.items()
    }
    return {**decisions, **postponed}, next(iter(reasons.values()))


def _goes_on(state: PolicyState, options: PolicyOptions) -> bool:
    small = chain.next_delta(state)[0] <= _MOST_DELTA * chain.next_base(state)[0]
    return state.deltas > 0 and small and chain.fits(state, options)
