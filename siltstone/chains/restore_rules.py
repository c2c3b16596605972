"""Divide the measured time of a whole checkpoint's restore among the operators' chains.

A command, a proof or a backfill measures the slowest of its units, each with one core, over all operators together
(`restore.proof`). The catalog keeps the newest measurement of each checkpoint; runs learn from it.
"""

from collections.abc import Mapping

from siltstone.chains.policy_rules import PolicyState, RestoreCost

NEWEST = 10
"""from how many measured checkpoints a run learns"""
_SAME_BYTES = 1.25
"""a restore that read fewer bytes than this part of what the chain had, or more, read another chain"""


def share_restore(
    chains: Mapping[str, PolicyState], learned: Mapping[str, PolicyState], seconds: float, size_bytes: int
) -> dict[str, RestoreCost]:
    """Return operator -> its part of a measured restore, by the part of the seconds that is predicted for it.

    The parts sum to all that was measured, as the bounds of a stream's operators do. Nothing comes of a restore that
    read less than the chains held, since they have been materialized meanwhile, or much more.

    Args:
        chains: operator -> the sizes and seconds of its chain at the checkpoint.
        learned: operator -> the state of its policy now, whose factors predict.
        seconds: what the restore took.
        size_bytes: the bytes that it read.
    """
    held = sum(state.base_bytes + state.deltas_bytes for state in chains.values())
    if not held / _SAME_BYTES <= size_bytes <= held * _SAME_BYTES:
        return {}
    predicted = {
        operator: learned[operator].base_factor * state.base_s + learned[operator].delta_factor * state.deltas_s
        for operator, state in chains.items()
        if operator in learned
    }
    total = sum(predicted.values())
    if total <= 0:
        return {}
    return {
        operator: RestoreCost(
            base_s=chains[operator].base_s,
            deltas_s=chains[operator].deltas_s,
            restore_s=seconds * part / total,
        )
        for operator, part in predicted.items()
    }
