"""Laws of the checkpoint policies over any history (promise 7)."""

import math
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.chains import chain_rules as chain
from siltstone.chains.policies import POLICIES, CheckpointCost, PolicyOptions, PolicyState, RestoreCost, policy_by_name
from siltstone.chains.postpone_rules import postpone_bases
from siltstone.chains.restore_rules import share_restore
from siltstone.model import Form

MB = 1_000_000
INDEX = 10_000
names = st.sampled_from(sorted(POLICIES))
options = st.builds(
    PolicyOptions,
    d0=st.integers(0, 12),
    d_max=st.integers(0, 30),
    size_ratio_max=st.none() | st.floats(0.05, 4),
    restore_budget_s=st.none() | st.floats(1, 400),
    space_amplification_max=st.none() | st.floats(1.05, 6),
    logging_ratio=st.floats(0, 1),
    probe_after=st.integers(1, 12),
    restore_weight=st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0]),
)
steps = st.lists(
    st.tuples(
        st.integers(0, 200 * MB),  # base
        st.integers(0, 300 * MB),  # delta
        st.floats(0.1, 3),  # seconds per MB
        st.none() | st.floats(0, 100),  # logging
        st.booleans(),  # whether rows are known
    ),
    min_size=1,
    max_size=60,
)


def take(policy, state, base, delta, rate=1.0, log_s=None, rows=True, keeps_limit=True):
    """One checkpoint as decided; (decision, form written, state after)."""
    decision = policy.decide(state)
    form, tracked = decision.form, None
    limit = decision.delta_limit_bytes
    if keeps_limit and form is Form.DELTA and limit is not None and delta > limit:
        form, tracked = Form.BASE, delta
    size = base if form is Form.BASE else delta
    cost = CheckpointCost(
        form=form,
        bytes=size,
        seconds=rate * size / MB,
        log_s=log_s,
        rows=base // 100 if rows else None,
        tracked_bytes=tracked,
        index_bytes=INDEX,
    )
    return decision, form, policy.observe(state, cost)


@given(names, options, steps)
def test_chains_keep_count_and_size_where_the_limit_is_kept(name, opts, history):
    policy = policy_by_name(name, opts)
    state = policy.start()
    for base, delta, rate, log_s, rows in history:
        decision, _, state = take(policy, state, base, delta, rate, log_s, rows)
        assert decision.tracking is (decision.form is Form.DELTA)
        assert state.deltas <= opts.d_max
        if opts.size_ratio_max is not None:
            assert state.deltas_bytes <= opts.size_ratio_max * state.base_bytes


@given(names, options, steps)
def test_a_delta_is_predicted_to_fit_or_is_a_probe_and_a_passed_bound_ends_the_chain(name, opts, history):
    policy = policy_by_name(name, opts)
    state = policy.start()
    for base, delta, rate, log_s, rows in history:
        passed = (
            state.deltas >= opts.d_max
            or (opts.size_ratio_max is not None and state.deltas_bytes >= opts.size_ratio_max * state.base_bytes)
            or (opts.restore_budget_s is not None and chain.restore_s(state) > opts.restore_budget_s)
            or (opts.space_amplification_max or math.inf) < (chain.amplification([state]) or 0)
        )
        before = state
        decision, _, state = take(policy, state, base, delta, rate, log_s, rows, keeps_limit=False)
        if passed:
            assert decision.form is Form.BASE
        if decision.form is Form.BASE:
            continue
        assert state.deltas <= opts.d_max
        if before.seen and before.deltas:  # neither the first delta nor right after a base
            predicted_bytes, predicted_s = chain.next_delta(before)
            if opts.size_ratio_max is not None:
                assert before.deltas_bytes + predicted_bytes <= opts.size_ratio_max * before.base_bytes + 1
            if opts.restore_budget_s is not None:
                after_s = chain.restore_s(before) + before.delta_factor * predicted_s
                assert after_s <= opts.restore_budget_s * (1 + 1e-9)


@given(names, options, steps)
def test_chains_keep_the_cap_on_space_where_the_limit_is_kept(name, opts, history):
    policy = policy_by_name(name, opts)
    state = policy.start()
    for base, delta, rate, log_s, rows in history:
        before = state
        _, form, state = take(policy, state, base, delta, rate, log_s, rows)
        cap = opts.space_amplification_max
        if form is Form.DELTA and cap is not None:
            live = chain.next_base(before)[0]
            assert chain.stored_bytes(state) <= cap * live + 1
            if state.rows >= before.rows:
                assert (chain.amplification([state]) or 0) <= cap * (1 + 1e-9)


@given(
    names,
    st.floats(1.3, 6),
    st.floats(0.5, 1),
    st.floats(0.01, 2),
    st.integers(10, 60),
    st.booleans(),
)
def test_state_that_shrinks_steadily_never_passes_the_cap_on_space(name, cap, shrinks, part, n, limits):
    policy = policy_by_name(name, PolicyOptions(space_amplification_max=cap, size_ratio_max=2.0 if limits else None))
    state, rows = policy.start(), 10**9
    for _ in range(n):
        known = state.rows_before > 0
        _, form, state = take(policy, state, 100 * rows, int(100 * rows * part))
        if form is Form.DELTA and known:
            assert (chain.amplification([state]) or 0) <= cap * 1.01
        rows = max(1000, int(rows * shrinks))


@given(names, options, st.integers(10 * MB, 200 * MB), st.floats(0.01, 2), st.integers(20, 120))
def test_a_steady_trace_never_passes_the_restore_budget_once_deltas_are_known(name, opts, base, part, n):
    policy = policy_by_name(name, opts)
    state = policy.start()
    delta = int(base * part)
    for _ in range(n):
        known = state.seen > 0
        decision, form, state = take(policy, state, base, delta)
        if opts.restore_budget_s is not None and known and form is Form.DELTA:
            assert chain.restore_s(state) <= opts.restore_budget_s * (1 + 1e-9), decision


@given(names, options, steps)
def test_the_restore_bound_covers_the_newest_checkpoint_and_steady_going_on(name, opts, history):
    policy = policy_by_name(name, opts)
    state = policy.start()
    for base, delta, rate, log_s, rows in history:
        _, _, state = take(policy, state, base, delta, rate, log_s, rows)
    bound = policy.restore_bound(state)
    assert bound.bytes >= state.base_bytes + state.deltas_bytes
    assert bound.seconds >= chain.restore_s(state)
    steady_bytes, steady_s = chain.next_delta(state)
    for _ in range(opts.d_max):
        if policy.decide(state).form is Form.BASE:
            break
        index_bytes = int(state.last_index_bytes)
        cost = CheckpointCost(form=Form.DELTA, bytes=int(steady_bytes), seconds=steady_s, index_bytes=index_bytes)
        probe = state.deltas == 0
        state = policy.observe(state, cost)
        if not probe:
            assert state.base_bytes + state.deltas_bytes <= bound.bytes * (1 + 1e-9)


@given(names, options, steps, st.integers(0, 60))
def test_a_resumed_policy_goes_on_as_if_nothing_had_happened(name, opts, history, cut):
    policy = policy_by_name(name, opts)
    straight = resumed = policy.start()
    for i, (base, delta, rate, log_s, rows) in enumerate(history):
        if i == cut:
            resumed = PolicyState.from_json(resumed.to_json())
        first, _, straight = take(policy, straight, base, delta, rate, log_s, rows)
        second, _, resumed = take(policy, resumed, base, delta, rate, log_s, rows)
        assert first == second


@pytest.mark.slow
@settings(deadline=None)
@given(
    names,
    st.floats(1.0, 1.5),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]),
    st.integers(0, 20),
)
def test_a_state_that_changes_completely_ends_in_bases_and_probes(name, part, probe_after, weight, d0):
    policy = policy_by_name(name, PolicyOptions(d0=d0, probe_after=probe_after, restore_weight=weight))
    state = policy.start()
    for _ in range(400):
        _, _, state = take(policy, state, 100 * MB, int(100 * MB * part))
    late = []
    for _ in range(20 * (probe_after + 1)):
        decision, _, state = take(policy, state, 100 * MB, int(100 * MB * part))
        assert decision.d == 0
        late.append(decision)
    assert all(d.tracking is (d.form is Form.DELTA) for d in late)
    assert not any(a.tracking and b.tracking for a, b in pairwise(late))
    share = sum(d.tracking for d in late) / len(late)
    wait = probe_after
    if name == "marginal-cost":  # the wait grows as sqrt(2 c age), up to probe_after
        dear = (1.1 + weight) * part - 1
        wait = min(probe_after, int(math.sqrt(2 * dear * 400)))
    assert share <= 1.01 / wait
    assert share > 0


@given(names, st.floats(1.0, 1.5), st.integers(1, 12), st.integers(30, 120))
def test_probing_recovers_when_the_changes_turn_small(name, part, probe_after, dear_for):
    policy = policy_by_name(name, PolicyOptions(probe_after=probe_after))
    state = policy.start()
    for _ in range(dear_for):
        _, _, state = take(policy, state, 100 * MB, int(100 * MB * part))
    forms = []
    for _ in range(probe_after + 60):
        decision, _, state = take(policy, state, 100 * MB, MB)
        forms.append(decision.form)
    assert Form.DELTA in forms[: probe_after + 2]
    assert forms[probe_after + 2 :].count(Form.BASE) <= 10


@given(names, steps, st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500), st.floats(0, 2000)), max_size=20))
def test_restore_factors_stay_positive_and_finite(name, history, restores):
    policy = policy_by_name(name, PolicyOptions(restore_budget_s=100))
    state = policy.start()
    for base, delta, rate, log_s, rows in history:
        _, _, state = take(policy, state, base, delta, rate, log_s, rows)
    for base_s, deltas_s, restore_s in restores:
        state = policy.observe_restore(state, RestoreCost(base_s=base_s, deltas_s=deltas_s, restore_s=restore_s))
        assert 0 < state.base_factor < math.inf
        assert 0 < state.delta_factor < math.inf
    policy.decide(state)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_state_of_a_policy_does_not_grow(name):
    policy = policy_by_name(name)
    state = policy.start()
    for i in range(300):
        _, _, state = take(policy, state, 100 * MB, (1 + i % 7) * MB)
    assert state.to_json().keys() <= {field.name for field in fields(PolicyState)}
    assert len(str(state.to_json())) < 1200


@given(st.floats(0.02, 5), st.floats(0.02, 5), st.floats(0.1, 20), st.floats(0.01, 2), st.integers(1, 40))
def test_ten_restores_of_one_chain_learn_what_it_takes(base_factor, delta_factor, base_s, delta_s, deltas):
    policy = policy_by_name("marginal-cost")
    state = policy.observe(policy.start(), CheckpointCost(form=Form.BASE, bytes=MB, seconds=base_s, rows=1000))
    for i in range(10):
        own = delta_s * (deltas if i % 2 else 1)
        took = base_factor * base_s + delta_factor * own
        state = policy.observe_restore(state, RestoreCost(base_s=base_s, deltas_s=own, restore_s=took))
        assert state.base_factor * base_s + state.delta_factor * own >= took * (1 - 1e-9)
    assert state.restores == 10
    longest = base_factor * base_s + delta_factor * delta_s * deltas
    predicted = state.base_factor * base_s + state.delta_factor * delta_s * deltas
    assert longest * (1 - 1e-9) <= predicted <= 2 * longest


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=5), st.floats(0, 100))
def test_the_parts_of_a_measured_restore_sum_to_all_of_it(chains, seconds):
    recorded = {str(i): PolicyState(base_s=b, deltas_s=d, base_bytes=10.0, rows=1) for i, (b, d) in enumerate(chains)}
    parts = share_restore(recorded, recorded, seconds, 10 * len(chains))
    if sum(b + d for b, d in chains) > 1e-6:
        assert sum(cost.restore_s for cost in parts.values()) == pytest.approx(seconds)
    assert share_restore(recorded, recorded, seconds, 5 * len(chains)) == {}


@given(names, options, st.lists(steps, min_size=1, max_size=3))
def test_a_base_is_postponed_only_while_the_bounds_leave_room(name, opts, histories):
    policy = policy_by_name(name, opts)
    states = {}
    for number, history in enumerate(histories):
        state = policy.start()
        for base, delta, rate, log_s, rows in history:
            state = take(policy, state, base, delta, rate, log_s, rows)[2]
        states[str(number)] = state
    decided = {table: policy.decide(state) for table, state in states.items()}
    found, reason = postpone_bases(decided, states, dict.fromkeys(states, opts))
    changed = {table for table in states if found[table] != decided[table]}
    assert (reason is None) == (not changed)
    for table in changed:
        assert (decided[table].form, found[table].form, found[table].tracking) == (Form.BASE, Form.DELTA, True)
        count, size, _ = chain.room(states[table], opts)
        assert chain.fits(states[table], opts) and count > 0
        assert 0 <= (found[table].delta_limit_bytes or 0) <= size
