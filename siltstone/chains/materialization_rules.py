"""Pure decisions: when a chain is due to be materialized, and whether materialization keeps up (FLIP-158).

[materialization]
interval_s = 600
chain_bytes = 1_000_000_000
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from siltstone.chains.policy_rules import PolicyOptions

RETRY_S = 10.0
"""seconds before a retry after the first failure; doubled for each further failure in a row"""
RETRY_MAX_S = 600.0
_LONG = 10
"""deltas: chains with fewer are meant to be short, so bases come with checkpoints"""


class MaterializationOptions(BaseModel):
    """When runs materialize in the background, and when lack of success is an error; unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="whether runs materialize in the background")
    interval_s: float | None = Field(
        default=600,
        ge=0,
        le=1e9,
        description="seconds after which a chain with deltas is consolidated; 0 turns it off",
    )
    chain_bytes: int | None = Field(
        default=None, ge=1, description="bytes of deltas from which on a chain is consolidated; no limit by default"
    )
    early: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="the fraction of d_max, restore_budget_s and space_amplification_max at which a chain is "
        "consolidated",
    )
    max_failures_allowed: int = Field(default=3, ge=1, description="failures in a row that are an error")
    stalled_intervals: int = Field(default=3, ge=1, le=1000, description="intervals without success that are an error")

    @property
    def interval(self) -> timedelta | None:
        """The interval; None if it is turned off."""
        return timedelta(seconds=self.interval_s) if self.interval_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """One operator's chain at the newest checkpoint, and the outcome of its materializations.

    Attributes:
        checkpoint: the newest checkpoint.
        deltas: the number of deltas after the chain's base; `deltas_bytes` is their size, including indexes.
        chain_bytes: the size of the whole chain.
        amplification: `chain_bytes` per byte of live state; None without state. A delta adds about
            `delta_amplification` to it.
        restore_s: the predicted seconds of a restore, and `base_restore_s`, those after a materialization.
        base: the manifest of the newest materialization that the chain begins with; None if there is none.
        since: when the chain got its base, or the materialization that it begins with was completed.
        newest_at: when the newest checkpoint was committed.
        succeeded_at: when the newest materialization was completed; None if none was.
        failures: how many failed since `since`; `failed_at` is when the last failed, and `error` why.
    """

    operator: str
    checkpoint: int
    deltas: int
    deltas_bytes: int
    chain_bytes: int
    amplification: float | None
    restore_s: float
    base_restore_s: float
    since: datetime
    newest_at: datetime
    delta_amplification: float = 0.0
    base: str | None = None
    succeeded_at: datetime | None = None
    failures: int = 0
    failed_at: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """A chain that is due to be materialized at a checkpoint; `reason` is for people."""

    operator: str
    checkpoint: int
    reason: str


class Health(StrEnum):
    """Whether materialization keeps up with an operator; later values are worse."""

    FINE = "fine"
    FAILING = "failing"
    """`max_failures_allowed` failures in a row"""
    STALLED = "stalled"
    """no success and no base for `stalled_intervals` intervals"""


def decide_trigger(
    facts: ChainFacts,
    now: datetime,
    options: MaterializationOptions,
    policy_options: PolicyOptions,
    postponed: str | None = None,
) -> Trigger | None:
    """Decide whether to materialize now, and why. A chain without deltas is never due, nor one that waits for a retry.

    Predictions trigger at the fraction `early` of the bounds at which the checkpoint policy takes a base, so that it
    seldom has to, and only if a materialization helps.

    Args:
        postponed: why a run leaves its next base to the materialization (`postpone_rules`); None if it does not.
    """
    if not facts.deltas or (facts.failed_at is not None and now < facts.failed_at + retry_delay(facts.failures)):
        return None
    reason = _reason(facts, now, options, policy_options) or postponed
    return None if reason is None else Trigger(facts.operator, facts.checkpoint, reason)


def _reason(
    facts: ChainFacts, now: datetime, options: MaterializationOptions, policy_options: PolicyOptions
) -> str | None:
    waited, interval = now - facts.since, options.interval
    if interval is not None and waited >= interval:
        return f"{waited.total_seconds():.0f} s since its chain began, the interval is {options.interval_s:g} s"
    if options.chain_bytes is not None and facts.deltas_bytes >= options.chain_bytes:
        return f"its deltas take {facts.deltas_bytes:,} bytes, {options.chain_bytes:,} or more are consolidated"
    longest = policy_options.d_max
    if longest >= _LONG and facts.deltas >= max(options.early, 0.5) * longest:
        return f"its chain has {facts.deltas} deltas, at most {longest} are allowed"
    budget = policy_options.restore_budget_s
    if budget is not None and facts.base_restore_s < options.early * budget <= facts.restore_s:
        return f"a restore is predicted to take {facts.restore_s:.1f} s of its {budget:g} s"
    cap = policy_options.space_amplification_max
    if cap is not None and (facts.amplification or 0) >= _space_level(cap, facts.delta_amplification, options.early):
        return f"its chain takes {facts.amplification:.2f} times its live state, at most {cap:g} is allowed"
    return None


def _space_level(cap: float, delta: float, early: float) -> float:
    """Return the amplification from which on to act: `early` of the way to the cap, and before two more deltas would
    pass it, since the policy would choose a base by then; but at least half of the way."""
    return max(1 + min(early, 0.5) * (cap - 1), min(1 + early * (cap - 1), cap - 2 * delta))


def retry_delay(failures: int) -> timedelta:
    """Return how long to wait after the last of `failures` in a row before the next attempt."""
    return timedelta(seconds=min(RETRY_MAX_S, RETRY_S * 2 ** min(failures - 1, 30)) if failures else 0)


def health(facts: ChainFacts, now: datetime, options: MaterializationOptions, running: bool) -> Health:
    """Decide whether materialization keeps up.

    Time counts while a run is open, otherwise only up to the newest checkpoint: an idle stream needs none.
    """
    waited, interval = (now if running else facts.newest_at) - facts.since, options.interval
    if facts.deltas and interval is not None and waited >= options.stalled_intervals * interval:
        return Health.STALLED
    return Health.FAILING if facts.failures >= options.max_failures_allowed else Health.FINE
