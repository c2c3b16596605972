"""When a chain is due to be materialized, and whether materialization keeps up: pure decisions (FLIP-158).

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
"""how long the first failure is waited for; each further one in a row twice as long"""
RETRY_MAX_S = 600.0


class MaterializationOptions(BaseModel):
    """When runs materialize by themselves, and what is said of one that does not succeed; unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="whether runs materialize in the background")
    interval_s: float | None = Field(
        default=600,
        ge=0,
        le=1e9,
        description="seconds after which a chain with deltas is consolidated; 0 turns it off",
    )
    chain_bytes: int | None = Field(
        default=None, ge=1, description="bytes of deltas from which on a chain is consolidated; none without it"
    )
    early: float = Field(
        default=0.8, gt=0, le=1, description="how much of restore_budget_s and space_amplification_max is waited for"
    )
    max_failures_allowed: int = Field(default=3, ge=1, description="failures in a row that are an error")
    stalled_intervals: int = Field(default=3, ge=1, le=1000, description="so many without a success are an error")

    @property
    def interval(self) -> timedelta | None:
        """The interval, None where it is turned off."""
        return timedelta(seconds=self.interval_s) if self.interval_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """One operator's chain at the newest checkpoint, and what became of materializing it.

    Attributes:
        checkpoint: the newest.
        deltas: how many follow the chain's base; `deltas_bytes` is what they take, indexes and all.
        chain_bytes: what the whole chain takes.
        amplification: `chain_bytes` per byte of live state; None while there is none. A delta adds about
            `delta_amplification` to it.
        restore_s: what restoring it is predicted to take, and `base_restore_s`, if it were materialized.
        since: when the chain got its base, or the materialization that it begins with was completed.
        newest_at: when the newest checkpoint was committed.
        succeeded_at: when the newest materialization was completed; None if none was.
        failures: how many failed since `since`; `failed_at` is when the last of them did, and `error` why.
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
    succeeded_at: datetime | None = None
    failures: int = 0
    failed_at: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """An operator's chain is due at a checkpoint; `reason` is for people."""

    operator: str
    checkpoint: int
    reason: str


class Health(StrEnum):
    """Whether materialization keeps up with an operator; the worse, the later."""

    FINE = "fine"
    FAILING = "failing"
    """so many failures in a row as are not allowed"""
    STALLED = "stalled"
    """no success, and no base, for so many intervals as are not allowed"""


def due(
    facts: ChainFacts, now: datetime, options: MaterializationOptions, policy_options: PolicyOptions
) -> Trigger | None:
    """Whether to materialize now, and why. Never a chain without deltas; after failures not before their delay is over.

    A trigger by prediction waits for the part `early` of what the checkpoint policy would take a base for, so that it
    seldom has to, and fires only where a materialization mends it.
    """
    if not facts.deltas or (facts.failed_at is not None and now < facts.failed_at + retry_delay(facts.failures)):
        return None
    reason = _reason(facts, now, options, policy_options)
    return None if reason is None else Trigger(facts.operator, facts.checkpoint, reason)


def _reason(
    facts: ChainFacts, now: datetime, options: MaterializationOptions, policy_options: PolicyOptions
) -> str | None:
    waited, interval = now - facts.since, options.interval
    if interval is not None and waited >= interval:
        return f"{waited.total_seconds():.0f} s since its chain began, the interval is {options.interval_s:g} s"
    if options.chain_bytes is not None and facts.deltas_bytes >= options.chain_bytes:
        return f"its deltas take {facts.deltas_bytes:,} bytes, {options.chain_bytes:,} or more are consolidated"
    budget = policy_options.restore_budget_s
    if budget is not None and facts.base_restore_s < options.early * budget <= facts.restore_s:
        return f"a restore is predicted to take {facts.restore_s:.1f} s of its {budget:g} s"
    cap = policy_options.space_amplification_max
    if cap is not None and (facts.amplification or 0) >= _space_level(cap, facts.delta_amplification, options.early):
        return f"its chain takes {facts.amplification:.2f} times its live state, at most {cap:g} is allowed"
    return None


def _space_level(cap: float, delta: float, early: float) -> float:
    """The amplification from which on to act: `early` of the way, and before a second delta more would pass the cap,
    since by then the policy has chosen a base; but for that, not before half of the way."""
    return max(1 + min(early, 0.5) * (cap - 1), min(1 + early * (cap - 1), cap - 2 * delta))


def retry_delay(failures: int) -> timedelta:
    """How long after the last of so many failures in a row the next attempt is due."""
    return timedelta(seconds=min(RETRY_MAX_S, RETRY_S * 2 ** min(failures - 1, 30)) if failures else 0)


def health(facts: ChainFacts, now: datetime, options: MaterializationOptions, running: bool) -> Health:
    """Whether materialization keeps up.

    Time counts while a run is open, and else only up to the newest checkpoint: a stream at rest needs none.
    """
    waited, interval = (now if running else facts.newest_at) - facts.since, options.interval
    if facts.deltas and interval is not None and waited >= options.stalled_intervals * interval:
        return Health.STALLED
    return Health.FAILING if facts.failures >= options.max_failures_allowed else Health.FINE
