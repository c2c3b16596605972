"""Laws of when a chain is due to be materialized, and of whether materialization keeps up."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from siltstone.chains.materialization_rules import (
    ChainFacts,
    Health,
    MaterializationOptions,
    decide_trigger,
    health,
    retry_delay,
)
from siltstone.chains.policy_rules import PolicyOptions

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
seconds = st.floats(0, 1e6).map(lambda s: timedelta(seconds=s))
options = st.builds(
    MaterializationOptions,
    interval_s=st.none() | st.floats(0, 5000),
    chain_bytes=st.none() | st.integers(1, 10**9),
    early=st.floats(0.01, 1),
    max_failures_allowed=st.integers(1, 6),
    stalled_intervals=st.integers(1, 6),
)
policies = st.builds(
    PolicyOptions,
    restore_budget_s=st.none() | st.floats(0.1, 100),
    space_amplification_max=st.none() | st.floats(1.01, 10),
)


@st.composite
def facts(draw: st.DrawFn) -> ChainFacts:
    since = NOON - draw(seconds)
    failures = draw(st.integers(0, 8))
    deltas = draw(st.integers(0, 100))
    deltas_bytes = draw(st.integers(0, 10**9)) if deltas else 0
    return ChainFacts(
        operator="totals",
        checkpoint=deltas + 1,
        deltas=deltas,
        deltas_bytes=deltas_bytes,
        chain_bytes=deltas_bytes + draw(st.integers(1, 10**9)),
        amplification=draw(st.none() | st.floats(1, 50)),
        delta_amplification=draw(st.floats(0, 5)),
        restore_s=draw(st.floats(0, 200)),
        base_restore_s=draw(st.floats(0, 200)),
        since=since,
        newest_at=since + (NOON - since) * draw(st.floats(0, 1)),
        failures=failures,
        failed_at=NOON - draw(seconds) if failures else None,
    )


@given(facts(), options, policies, seconds)
def test_nothing_is_due_without_deltas_or_before_its_delay_is_over(chain, opts, policy, later):
    now = NOON + later
    trigger = decide_trigger(chain, now, opts, policy)
    assert decide_trigger(replace(chain, deltas=0), now, opts, policy) is None
    if trigger is not None:
        assert (trigger.operator, trigger.checkpoint) == (chain.operator, chain.checkpoint)
        assert trigger.reason
        assert chain.failed_at is None or now >= chain.failed_at + retry_delay(chain.failures)


@given(facts(), options, policies, seconds)
def test_what_is_due_stays_due_until_somebody_acts(chain, opts, policy, later):
    if decide_trigger(chain, NOON, opts, policy) is not None:
        assert decide_trigger(chain, NOON + later, opts, policy) is not None
        # More deltas make it no less due.
        more = replace(chain, deltas=chain.deltas + 1, deltas_bytes=chain.deltas_bytes + 5)
        assert decide_trigger(more, NOON, opts, policy) is not None


@given(facts(), options, policies)
def test_the_interval_alone_makes_any_chain_with_deltas_due_in_time(chain, opts, policy):
    if opts.interval is None or not chain.deltas:
        return
    waits = max(opts.interval, retry_delay(chain.failures))
    at = max(chain.since, chain.failed_at or chain.since) + waits + timedelta(milliseconds=1)
    assert decide_trigger(chain, at, opts, policy) is not None


@given(facts(), options, policies)
def test_a_success_makes_it_quiet_but_for_a_trigger_of_bytes(chain, opts, policy):
    """Where materializing does not mend what a trigger sees, that trigger must not fire."""
    fresh = replace(
        chain,
        deltas=0,
        deltas_bytes=0,
        amplification=1.0,
        restore_s=chain.base_restore_s,
        since=NOON,
        failures=0,
        failed_at=None,
    )
    assert decide_trigger(fresh, NOON, opts, policy) is None
    # With a delta of no size behind it, neither.
    assert decide_trigger(replace(fresh, deltas=1), NOON, replace_interval(opts), policy) is None


def replace_interval(opts: MaterializationOptions) -> MaterializationOptions:
    """The same with an interval that has not passed."""
    return opts.model_copy(update={"interval_s": 10.0})


@given(st.integers(0, 200))
def test_the_delay_grows_and_is_bounded(failures):
    assert timedelta(0) <= retry_delay(failures) <= retry_delay(failures + 1) <= timedelta(minutes=10)
    assert (retry_delay(failures) == timedelta(0)) is (failures == 0)


@given(facts(), options, st.booleans(), seconds)
def test_health(chain, opts, running, later):
    found = health(chain, NOON, opts, running)
    order = list(Health)
    # Running time makes it worse only; a chain without deltas never stalls, one at rest does not get worse.
    assert order.index(health(chain, NOON, opts, False)) <= order.index(health(chain, NOON, opts, True))
    assert order.index(found) <= order.index(health(chain, NOON + later, opts, running))
    assert health(chain, NOON + later, opts, False) is health(chain, NOON, opts, False)
    assert health(replace(chain, deltas=0), NOON, opts, running) is not Health.STALLED
    if found is not Health.STALLED:
        assert (found is Health.FAILING) is (chain.failures >= opts.max_failures_allowed)
    waited = (NOON if running else chain.newest_at) - chain.since
    if chain.deltas and opts.interval is not None:
        assert (found is Health.STALLED) is (waited >= opts.stalled_intervals * opts.interval)
    else:
        assert found is not Health.STALLED
