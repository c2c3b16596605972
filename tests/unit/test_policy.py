"""Decisions of the checkpoint policies on small histories worked out by hand."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from siltstone.chains import chain_rules as chain
from siltstone.chains.policies import (
    DEFAULT_POLICY,
    POLICIES,
    CheckpointCost,
    Policy,
    PolicyOptions,
    PolicyState,
    RestoreCost,
    policy_by_name,
)
from siltstone.errors import StateError, UsageError
from siltstone.model import Form

MB = 1_000_000


def drive(policy: Policy, sizes, state: PolicyState | None = None, log_s: float | None = None):
    """Take a checkpoint for each (base bytes, delta bytes); 1 MB takes 1 s. Returns (forms as text, last
    state)."""
    state = policy.start() if state is None else state
    forms = ""
    for base, delta in sizes:
        decision = policy.decide(state)
        assert decision.tracking is (decision.form is Form.DELTA)
        size = base if decision.form is Form.BASE else delta
        forms += decision.form.value[0]
        cost = CheckpointCost(form=decision.form, bytes=size, seconds=size / MB, rows=base // 100, log_s=log_s)
        state = policy.observe(state, cost)
    return forms, state


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match=r"'always'.*marginal-cost, adjust-d"):
        policy_by_name("always")
    assert type(policy_by_name(DEFAULT_POLICY)).__name__ == "MarginalCost"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("d0", -1),
        ("d_max", 2.5),
        ("probe_after", 0),
        ("size_ratio_max", 0),
        ("space_amplification_max", 1),
        ("restore_budget_s", float("nan")),
        ("logging_ratio", -0.1),
        ("restore_weight", float("inf")),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option, value):
    with pytest.raises(ValidationError, match=rf"^1 validation error for PolicyOptions\n{option}\n"):
        PolicyOptions(**{option: value})


@pytest.mark.parametrize("name", POLICIES)
def test_a_state_read_back_from_json_decides_the_same(name):
    policy = policy_by_name(name)
    _, state = drive(policy, [(10 * MB, 3 * MB), (11 * MB, MB), (12 * MB, 2 * MB), (9 * MB, MB)], log_s=0.1)
    again = PolicyState.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state
    assert policy.decide(again) == policy.decide(state)


@pytest.mark.parametrize(
    ("field", "value"),
    [("deltas", 1.5), ("base_s", float("nan")), ("rows", "7"), ("d", None), ("deltas", True)],
)
def test_a_damaged_state_is_refused_by_field(field, value):
    with pytest.raises(StateError, match=f"policy state: {field}"):
        PolicyState.from_json({**PolicyState().to_json(), field: value})


def test_a_state_of_another_version_takes_defaults_and_leaves_out_what_it_does_not_know():
    assert PolicyState.from_json({"deltas": 3, "colour": "blue"}) == PolicyState(deltas=3)


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_checkpoint_is_a_base_and_a_delta_before_it_is_an_error(name):
    policy = policy_by_name(name)
    decision = policy.decide(policy.start())
    assert (decision.form, decision.tracking) == (Form.BASE, False)
    with pytest.raises(StateError, match="needs a base before it"):
        policy.observe(policy.start(), CheckpointCost(form=Form.DELTA, bytes=1, seconds=1))


@pytest.mark.parametrize("name", POLICIES)
def test_with_no_deltas_allowed_every_checkpoint_is_a_base(name):
    forms, _ = drive(policy_by_name(name, PolicyOptions(d_max=0)), [(10 * MB, 1)] * 40)
    assert forms == "b" * 40


def test_adjust_d_doubles_while_deltas_are_cheap():
    policy = policy_by_name("adjust-d", PolicyOptions(d0=1, size_ratio_max=None))
    forms, state = drive(policy, [(100 * MB, MB)] * 15)
    assert forms == "bd" + "bdd" + "bdddd" + "bdddd"
    assert state.d == 8


def test_adjust_d_grows_up_to_its_maximum():
    policy = policy_by_name("adjust-d", PolicyOptions(d0=1, d_max=3, size_ratio_max=None))
    forms, state = drive(policy, [(100 * MB, MB)] * 10)
    assert forms == "bd" + "bdd" + "bddd" + "b"
    assert state.d == 3


def test_adjust_d_cuts_d_to_the_size_ratio_and_to_the_restore_budget():
    _, state = drive(policy_by_name("adjust-d", PolicyOptions(d0=4, size_ratio_max=0.5)), [(100 * MB, 10 * MB)] * 6)
    assert state.d == 5  # 5 x 10 MB = 0.5 x 100 MB
    options = PolicyOptions(d0=4, size_ratio_max=None, restore_budget_s=200)
    _, state = drive(policy_by_name("adjust-d", options), [(100 * MB, 10 * MB)] * 6)
    assert state.d == 6  # 1.2 x 100 s + 6 x 1.2 x 10 s = 192 s, and 8 would be 216 s


def test_adjust_d_shrinks_where_deltas_are_dear():
    policy = policy_by_name("adjust-d", PolicyOptions(d0=4, size_ratio_max=None, space_amplification_max=None))
    _, state = drive(policy, [(100 * MB, 95 * MB)] * 6)  # 95 grown by 10 % is more than 100
    assert state.d == 2


def test_adjust_d_counts_the_measured_logging_time():
    options = PolicyOptions(d0=1, size_ratio_max=None)
    cheap = drive(policy_by_name("adjust-d", options), [(100 * MB, 60 * MB)] * 3)[1]
    dear = drive(policy_by_name("adjust-d", options), [(100 * MB, 60 * MB)] * 3, log_s=50.0)[1]  # 60 + 50 > 100
    assert (cheap.d, dear.d) == (2, 0)


def test_adjust_d_at_zero_tracks_nothing_but_probes_and_comes_back():
    policy = policy_by_name("adjust-d", PolicyOptions(d0=1, probe_after=4, size_ratio_max=None))
    forms, state = drive(policy, [(100 * MB, 100 * MB)] * 20)
    assert state.d == 0
    assert forms == "bd" + "bbbbd" * 3 + "bbb"
    forms, state = drive(policy, [(100 * MB, MB)] * 10, state)
    assert forms == "bd" + "bdd" + "bdddd"


def test_marginal_cost_meets_the_best_steady_chain():
    # b = 100, d = 1, w = 1.1, lambda = 0.05: the average cost is least at m = sqrt(2 (b - w d) / (lambda d))
    # = 62.9
    policy = policy_by_name("marginal-cost")
    forms, state = drive(policy, [(100 * MB, MB)] * 400)
    lengths = {len(c) + 1 for c in forms.split("b")[2:-1]}
    assert lengths <= {62, 63, 64}
    assert policy.decide(state).d in (61, 62)


def test_marginal_cost_without_restores_goes_on_to_the_bound():
    options = PolicyOptions(restore_weight=0.0, d_max=20, size_ratio_max=None, space_amplification_max=None)
    policy = policy_by_name("marginal-cost", options)
    forms, _ = drive(policy, [(100 * MB, 50 * MB)] * 63)
    assert forms == ("b" + "d" * 20) * 3


def test_marginal_cost_with_dear_logging_takes_bases():
    policy = policy_by_name("marginal-cost")
    forms, _ = drive(policy, [(100 * MB, 60 * MB)] * 150, log_s=60.0)
    assert 0 < forms[-60:].count("d") <= 10
    forms, _ = drive(policy, [(100 * MB, 20 * MB)] * 150, log_s=0.1)
    assert forms[-60:].count("d") >= 50


def test_marginal_cost_takes_the_growth_of_the_state_from_its_rows():
    policy = policy_by_name("marginal-cost", PolicyOptions(restore_weight=0.2))
    _, state = drive(policy, [(10 * MB, 8 * MB), (10 * MB, 8 * MB)])
    assert chain.next_base(state)[0] == 10 * MB
    assert policy.decide(state).form is Form.BASE
    grown = replace(state, rows=state.rows * 10)
    assert chain.next_base(grown)[0] == 100 * MB
    assert policy.decide(grown).form is Form.DELTA


@pytest.mark.parametrize("name", POLICIES)
def test_a_base_forced_from_outside_begins_a_new_chain(name):
    policy = policy_by_name(name)
    _, state = drive(policy, [(100 * MB, MB)] * 4)
    assert state.deltas == 3
    state = policy.observe(state, CheckpointCost(form=Form.BASE, bytes=90 * MB, seconds=90, rows=900_000))
    assert (state.deltas, state.deltas_bytes, state.base_bytes, state.base_rows) == (0, 0, 90 * MB, 900_000)
    assert policy.decide(state).form is Form.DELTA


@pytest.mark.parametrize("name", POLICIES)
def test_a_delta_that_was_too_large_and_became_a_base_is_learned_from(name):
    policy = policy_by_name(name, PolicyOptions(size_ratio_max=0.5, probe_after=100))
    _, state = drive(policy, [(100 * MB, MB)] * 2)
    decision = policy.decide(state)
    assert decision.form is Form.DELTA
    assert decision.delta_limit_bytes is not None
    if name == "adjust-d":
        assert decision.delta_limit_bytes == 49 * MB
    else:  # a delta of that size would still fit, but a base costs less
        assert 10 * MB < decision.delta_limit_bytes < 49 * MB
    state = policy.observe(
        state, CheckpointCost(form=Form.BASE, bytes=100 * MB, seconds=100, tracked_bytes=80 * MB, rows=10**6)
    )
    assert (state.last_bytes, state.last_s) == (80 * MB, 80.0)
    assert policy.decide(state).form is Form.BASE


@pytest.mark.parametrize("name", POLICIES)
def test_no_delta_larger_than_a_base_is_asked_for(name):
    policy = policy_by_name(name, PolicyOptions(size_ratio_max=None))
    _, state = drive(policy, [(100 * MB, MB)] * 4)
    limit = policy.decide(state).delta_limit_bytes
    assert limit is not None
    assert MB < limit <= 100 * MB


@pytest.mark.parametrize("name", POLICIES)
def test_probes_that_become_bases_are_still_apart(name):
    policy = policy_by_name(name, PolicyOptions(probe_after=5))
    state = policy.start()
    tracked = ""
    for _ in range(300):
        decision = policy.decide(state)
        tracked += "t" if decision.tracking else "-"
        cost = CheckpointCost(
            form=Form.BASE,
            bytes=100 * MB,
            seconds=100,
            tracked_bytes=150 * MB if decision.tracking else None,
        )
        state = policy.observe(state, cost)
    assert "tt" not in tracked[60:]
    assert tracked[-60:].count("t") == 10


@pytest.mark.parametrize("name", POLICIES)
def test_a_base_that_alone_exceeds_the_budget_leaves_only_bases(name):
    forms, _ = drive(policy_by_name(name, PolicyOptions(restore_budget_s=100)), [(90 * MB, 1)] * 40)
    assert forms == "b" * 40  # 1.2 x 90 s


@pytest.mark.parametrize("name", POLICIES)
def test_measured_restores_replace_both_factors(name):
    policy = policy_by_name(name)
    _, state = drive(policy, [(100 * MB, 10 * MB)] * 4)
    assert (state.base_factor, state.delta_factor) == (1.2, 1.2)
    assert chain.restore_s(state) == pytest.approx(1.2 * 130)
    for i in range(150):  # truth: 0.5 s per second of base, 2 s per second of deltas
        deltas_s = (0.0, 30.0, 90.0)[i % 3]
        state = policy.observe_restore(
            state, RestoreCost(base_s=100, deltas_s=deltas_s, restore_s=0.5 * 100 + 2.0 * deltas_s)
        )
    assert state.base_factor == pytest.approx(0.5, rel=0.02)
    assert state.delta_factor == pytest.approx(2.0, rel=0.02)
    assert policy.observe_restore(state, RestoreCost(base_s=0, deltas_s=0, restore_s=1)) == state


@pytest.mark.parametrize("name", POLICIES)
def test_a_restore_slower_than_predicted_is_never_predicted_to_be_faster_again(name):
    policy = policy_by_name(name)
    _, state = drive(policy, [(100 * MB, 10 * MB)] * 4)
    for restore_s in (3.0, 3.0, 500.0, 2.0, 700.0):
        cost = RestoreCost(base_s=state.base_s, deltas_s=state.deltas_s, restore_s=restore_s)
        predicted, state = chain.restore_s(state), policy.observe_restore(state, cost)
        assert chain.restore_s(state) >= restore_s * (1 - 1e-9)
        assert chain.restore_s(state) <= max(restore_s, predicted) * (1 + 1e-9)  # nor jumps beyond it


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("delta", [MB // 10, MB, 20 * MB])
def test_after_ten_restores_the_bound_is_within_twice_what_the_longest_takes(name, delta):
    policy = policy_by_name(name, PolicyOptions(d0=4))
    _, state = drive(policy, [(100 * MB, delta)] * 200)
    for i in range(10):
        # truth: a hundredth of what it took to write, three hundredths for deltas; measured anywhere in the chain
        restore_s = 0.01 * state.base_s + 0.03 * state.deltas_s
        cost = RestoreCost(base_s=state.base_s, deltas_s=state.deltas_s, restore_s=restore_s)
        state = policy.observe_restore(state, cost)
        _, state = drive(policy, [(100 * MB, delta)] * (5 + i), state)
    bounds, taken = [], []
    for _ in range(200):
        _, state = drive(policy, [(100 * MB, delta)], state)
        bounds.append(policy.restore_bound(state).seconds)
        taken.append(0.01 * state.base_s + 0.03 * state.deltas_s)
    assert max(taken) / 2 <= min(bounds)
    assert max(bounds) <= 2 * max(taken)


def test_adjust_d_grows_where_materializations_end_the_chains():
    policy = policy_by_name("adjust-d", PolicyOptions(d0=6))
    _, state = drive(policy, [(100 * MB, MB)])
    base = CheckpointCost(form=Form.BASE, bytes=100 * MB, seconds=0, rows=MB)
    wanted = []
    for _ in range(6):
        forms, state = drive(policy, [(100 * MB, MB)] * 5, state)
        assert forms == "ddddd"
        state = policy.observe_materialization(state, base, [])
        wanted.append(state.d)
    assert wanted == [12, 24, 48, 96, 100, 100]
    _, state = drive(policy, [(100 * MB, 95 * MB)], state)
    assert policy.observe_materialization(replace(state, mean_bytes=95.0 * MB), base, []).d <= 50


@pytest.mark.parametrize("name", POLICIES)
def test_measured_tracking_replaces_the_logging_ratio(name):
    policy = policy_by_name(name, PolicyOptions(d0=1, size_ratio_max=None))
    cheap = drive(policy, [(100 * MB, 60 * MB)] * 60, log_s=0.0)[0]
    dear = drive(policy, [(100 * MB, 60 * MB)] * 60, log_s=60.0)[0]  # 60 + 60 > 100
    assert cheap.count("d") > 25
    assert dear.count("d") < 20


def test_the_restore_bound_is_what_the_bounds_still_allow():
    options = PolicyOptions(d0=4, size_ratio_max=None)
    _, state = drive(policy_by_name("adjust-d", options), [(100 * MB, 10 * MB)] * 2)
    bound = policy_by_name("adjust-d", options).restore_bound(state)
    assert bound.bytes == 140 * MB
    assert bound.seconds == pytest.approx(1.2 * 140)
    bound = policy_by_name("marginal-cost", PolicyOptions(size_ratio_max=0.5)).restore_bound(state)
    assert bound.bytes == 150 * MB
    bound = policy_by_name("marginal-cost", PolicyOptions(restore_budget_s=150)).restore_bound(state)
    assert bound.seconds == pytest.approx(144)  # of (150 - 132) / 1.2 = 15 s, one more delta of 10 s


@pytest.mark.parametrize("name", POLICIES)
def test_a_window_that_shrinks_is_based_before_its_chain_passes_the_cap_on_space(name):
    policy = policy_by_name(name, PolicyOptions(d0=50, restore_weight=0.0))
    state, amplified = policy.start(), []
    for step in range(40):
        rows = max(int(1_000_000 * 0.8**step), 100)
        decision = policy.decide(state)
        size = rows * 100 if decision.form is Form.BASE else rows * 5
        state = policy.observe(
            state, CheckpointCost(form=decision.form, bytes=size, seconds=1.0, rows=rows, index_bytes=100)
        )
        amplified.append((decision.form, chain.stored_bytes(state) / (rows * 100)))
    assert max(found for _, found in amplified) <= 3 + 1e-9
    assert max(found for _, found in amplified) > 2.2  # and yet deltas are made use of
    assert sum(form is Form.BASE for form, _ in amplified) < 12


def test_live_state_that_vanishes_makes_the_next_checkpoint_a_base():
    policy = policy_by_name("marginal-cost")
    _, state = drive(policy, [(100 * MB, MB)] * 4)
    assert chain.amplification([state]) == pytest.approx(1.03)
    state = policy.observe(state, CheckpointCost(form=Form.DELTA, bytes=MB, seconds=1, rows=0))
    assert chain.amplification([state]) == pytest.approx(1.04 * MB)  # a row is counted as the least there is
    assert policy.decide(state).form is Form.BASE
    assert chain.amplification([policy.start()]) is None


def test_indexes_count_where_space_does():
    lean, rich = (
        drive_with_index(policy_by_name("adjust-d", PolicyOptions(d0=90, size_ratio_max=None)), index)
        for index in (0, MB)
    )
    assert lean > 1.9 * rich


def drive_with_index(policy: Policy, index_bytes: int) -> int:
    """How many deltas of 1 MB a chain takes behind a base of 40 MB."""
    state = policy.observe(policy.start(), CheckpointCost(form=Form.BASE, bytes=40 * MB, seconds=1, rows=1000))
    while policy.decide(state).form is Form.DELTA:
        cost = CheckpointCost(form=Form.DELTA, bytes=MB, seconds=1, rows=1000, index_bytes=index_bytes)
        state = policy.observe(state, cost)
    return state.deltas
