"""Laws of restore and verify plans over random chains, with a parallelism of its own for every checkpoint."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from siltstone.errors import StateError, UnknownCheckpoint
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.restore.live_rules import LiveHandles
from siltstone.restore.plan_rules import RestorePlan, VerifyChain, plan_proof, plan_restore

GROUPS = 24
WHOLE = KeyGroupRange(0, GROUPS)
TABLES = [("flights", "totals"), ("flights", "window"), ("routes", "totals")]


def handle(operator, variable, groups, checkpoint, previous, kind=Kind.INCREMENTAL):
    base = previous == 0
    name = f"{operator}/{checkpoint}/{groups.start}" + (f"/{variable}" if base else "")
    return Handle(
        operator=operator,
        variable=variable,
        kind=kind,
        form=Form.BASE if base else Form.DELTA,
        object=name,
        offset=0,
        length=100 + 7 * checkpoint + groups.start,
        checksum="",
        key_groups=groups,
        rows=1,
        previous=previous,
    )


@st.composite
def histories(draw):
    """checkpoint -> handles: ids with holes, any parallelism, each subtask with a base, files or a delta of a table."""
    ids = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=8)))
    out, previous = {}, 0
    for checkpoint in ids:
        handles = []
        for groups in WHOLE.split(draw(st.integers(1, 6))):
            for operator, variable in TABLES:
                base = previous == 0 or draw(st.integers(0, 3)) == 0
                one = handle(operator, variable, groups, checkpoint, 0 if base else previous)
                files = draw(st.integers(0, 3)) if base else 0
                handles += [replace(one, form=Form.FILES, object=f"{one.object}/{n}") for n in range(files)] or [one]
            whole = previous == 0 or draw(st.booleans())
            handles.append(handle("flights", "notes", groups, checkpoint, 0 if whole else previous, Kind.OPAQUE))
        out[checkpoint] = draw(st.permutations(handles))
        previous = checkpoint
    return out


def expected(history, checkpoint, name, group):
    """The handles one key group needs, oldest first, by following `previous` one step at a time."""
    out = []
    while True:
        found = [h for h in history[checkpoint] if (h.operator, h.variable) == name and group in h.key_groups]
        assert len(found) == 1 or all(h.form is Form.FILES for h in found)
        out = [(checkpoint, h) for h in found] + out
        if found[0].form is not Form.DELTA:
            return out
        checkpoint = found[0].previous


def walk(history):
    live = LiveHandles()
    for checkpoint, handles in history.items():
        live.advance(checkpoint, handles, WHOLE)
        yield checkpoint, live


def plan_written(history, checkpoint, parallelism, key_groups=None):
    """The plan for the variables that the checkpoint wrote."""
    variables = {(h.operator, h.variable): h.kind for h in history.get(checkpoint, ())}
    return plan_restore(history, checkpoint, GROUPS, parallelism, variables, key_groups)


def verify(history, proves=None):
    return plan_proof(walk(history), GROUPS, history.keys() if proves is None else proves)


def of_group(reads, group):
    return [(r.checkpoint, r.handle) for r in reads if any(group in g for g in r.key_groups)]


@given(histories(), st.integers(1, 30), st.data())
def test_every_key_group_of_every_table_gets_its_base_and_all_later_deltas_in_order(history, parallelism, data):
    checkpoint = data.draw(st.sampled_from(sorted(history)))
    plan = plan_written(history, checkpoint, parallelism)
    assert [(u.operator, u.key_groups) for u in plan.units] == [
        (operator, part) for operator in ("flights", "routes") for part in WHOLE.split(parallelism)
    ]
    for unit in plan.units:
        assert all(g for r in unit.reads for g in r.key_groups)
        for variable, table in unit.tables.items():
            assert all(r.handle.form is not Form.DELTA for r in table.bases)
            assert all(r.handle.form is Form.DELTA for r in table.deltas)
            for group in range(GROUPS):
                reads = [*of_group(table.bases, group), *of_group(table.deltas, group)]
                wanted = expected(history, checkpoint, (unit.operator, variable), group)
                assert reads == (wanted if group in unit.key_groups else [])
        for variable, reads in unit.opaque.items():
            for group in unit.key_groups.split(len(unit.key_groups) or 1):
                if group:
                    found = of_group(reads, group.start)
                    assert found == expected(history, checkpoint, (unit.operator, variable), group.start)
    assert {v for u in plan.units for v in u.tables if u.operator == "flights"} == {"totals", "window"}
    assert {v for u in plan.units for v in u.opaque} == {"notes"}


@given(histories(), st.integers(1, 6), st.data())
def test_bytes_count_every_needed_block_once_at_any_parallelism(history, parallelism, data):
    checkpoint = data.draw(st.sampled_from(sorted(history)))
    names = [*TABLES, ("flights", "notes")]
    needed = {b for name in names for g in range(GROUPS) for b in expected(history, checkpoint, name, g)}
    plan = plan_written(history, checkpoint, parallelism)
    assert plan.bytes == sum(h.length for _, h in needed)
    assert plan.checkpoints == tuple(sorted({c for c, _ in needed}))
    one = plan_written(history, checkpoint, 1)
    assert sum(u.bytes for u in one.units) == plan.bytes


@given(histories(), st.integers(0, GROUPS - 1), st.integers(1, GROUPS), st.integers(1, 4))
def test_a_part_of_the_key_groups_needs_only_what_holds_them(history, start, size, parallelism):
    part = KeyGroupRange(start, min(GROUPS, start + size))
    checkpoint = max(history)
    plan = plan_written(history, checkpoint, parallelism, part)
    needed = {
        b
        for name in [*TABLES, ("flights", "notes")]
        for g in range(part.start, part.end)
        for b in expected(history, checkpoint, name, g)
    }
    assert {(r.checkpoint, r.handle) for u in plan.units for r in u.reads} == needed


@given(histories(), st.data())
def test_a_missing_handle_is_a_gap_that_is_named(history, data):
    checkpoint = data.draw(st.sampled_from(sorted(history)))
    name = data.draw(st.sampled_from(TABLES))
    group = data.draw(st.integers(0, GROUPS - 1))
    at, lost = data.draw(st.sampled_from(expected(history, checkpoint, name, group)))
    # One of several files is missed by the digest.
    assume(not any(replace(h, object=lost.object) == lost and h != lost for h in history[at]))
    broken = {**history, at: [h for h in history[at] if h != lost]}
    assume(
        any((h.operator, h.variable) == name for h in broken[checkpoint])
    )  # else it is no variable of the checkpoint
    if at == checkpoint:
        # It may not have changed since an older one: whether that is so, the digest says.
        assume(any(group in h.key_groups for c in history if c < at for h in history[c]))
        plan = plan_written(broken, checkpoint, 3)
        assert not any(r.handle == lost for u in plan.units for r in u.reads)
        return
    with pytest.raises(
        StateError, match=rf"checkpoint \d+, operator {name[0]}, variable {name[1]}: .*needs checkpoint {at},"
    ):
        plan_written(broken, checkpoint, 3)
    with pytest.raises(StateError, match=rf"operator {name[0]}, variable {name[1]}"):
        verify(broken)


@given(histories(), st.data())
def test_a_missing_manifest_is_a_gap_where_it_is_needed(history, data):
    checkpoint = data.draw(st.sampled_from(sorted(history)))
    needed = plan_written(history, checkpoint, 1).checkpoints
    lost = data.draw(st.sampled_from(sorted(history)))
    broken = {c: h for c, h in history.items() if c != lost}
    if lost == checkpoint:
        with pytest.raises(UnknownCheckpoint, match=f"checkpoint {lost} "):
            plan_written(broken, checkpoint, 2)
    elif lost in needed:
        with pytest.raises(StateError, match=f"needs checkpoint {lost},"):
            plan_written(broken, checkpoint, 2)
    else:
        assert plan_written(broken, checkpoint, 2) == plan_written(history, checkpoint, 2)


@given(histories(), st.data())
def test_two_handles_for_one_key_group_are_refused(history, data):
    checkpoint = max(history)
    extra = data.draw(st.sampled_from([h for h in history[checkpoint] if h.kind is Kind.INCREMENTAL]))
    form = Form.BASE if extra.form is Form.FILES else extra.form  # several files are one
    twice = {**history, checkpoint: [*history[checkpoint], replace(extra, object="other", form=form)]}
    with pytest.raises(StateError, match="two handles hold key group"):
        plan_written(twice, checkpoint, 2)
    with pytest.raises(StateError, match="two handles hold key group"):
        verify(twice)


def test_a_delta_that_builds_on_itself_is_refused():
    loop = {5: [handle("flights", "totals", WHOLE, 5, 5)]}
    with pytest.raises(StateError, match="checkpoint 5, operator flights, variable totals: its chain needs"):
        plan_written(loop, 5, 1)
    with pytest.raises(StateError, match="checkpoint 5, operator flights, variable totals: its chain needs"):
        verify(loop)


@given(histories())
def test_verifying_all_reads_every_object_once_and_meets_every_state(history):
    chains = verify(history)
    read = [(s.checkpoint, h) for chain in chains for s in chain.steps for h in s.handles]
    assert len(read) == len(set(read))
    assert set(read) == {(c, h) for c, handles in history.items() for h in handles}
    homes = {}
    proven = set()
    for i, chain in enumerate(chains):
        version = {}
        for step in chain.steps:
            for h in step.handles:
                assert homes.setdefault(h.object, (i, step.checkpoint)) == (i, step.checkpoint)
                assert h.key_groups.intersect(chain.key_groups) == h.key_groups
                for group in range(h.key_groups.start, h.key_groups.end):
                    if h.form is Form.DELTA:
                        assert version[h.variable, group] == h.previous
                    version[h.variable, group] = step.checkpoint
            assert set(version.values()) == {step.checkpoint}
            variables = {v for v, _ in version}
            assert len(version) == len(variables) * len(chain.key_groups)
            if step.proves:
                proven |= {(step.checkpoint, chain.operator, v, g) for v, g in version}
    names = [*TABLES, ("flights", "notes")]
    assert proven == {(c, o, v, g) for c in history for o, v in names for g in range(GROUPS)}


@given(histories(), st.data())
def test_verifying_some_walks_no_further_than_they_need(history, data):
    some = data.draw(st.sets(st.sampled_from(sorted(history)), min_size=1))
    chains = verify(history, some)
    for chain in chains:
        assert chain.steps[-1].proves
        assert all(step.proves is (step.checkpoint in some) for step in chain.steps)
    assert {s.checkpoint for chain in chains for s in chain.steps if s.proves} == some
    with pytest.raises(UnknownCheckpoint, match="checkpoint 99 "):
        verify(history, {99})


@given(histories(), st.data())
def test_verifying_some_reads_what_they_need_though_everything_else_was_deleted(history, data):
    some = data.draw(st.sets(st.sampled_from(sorted(history)), min_size=1, max_size=2))
    names = [*TABLES, ("flights", "notes")]
    needed = {b for c in some for name in names for g in range(GROUPS) for b in expected(history, c, name, g)}
    left = {c: handles for c, handles in history.items() if any(c == at for at, _ in needed)}
    for manifests in history, left:
        chains = verify(manifests, some)
        assert {(s.checkpoint, h) for chain in chains for s in chain.steps for h in s.handles} == needed


def test_chains_are_cut_where_everything_is_a_base_and_split_where_no_object_straddles():
    halves, thirds = WHOLE.split(2), WHOLE.split(3)
    history = {
        1: [handle("flights", "totals", g, 1, 0) for g in halves],
        2: [handle("flights", "totals", g, 2, 1) for g in halves],
        3: [handle("flights", "totals", g, 3, 0) for g in halves],
        4: [handle("flights", "totals", g, 4, 3) for g in thirds],
    }
    shapes = [(c.key_groups, tuple(s.checkpoint for s in c.steps)) for c in verify(history)]
    assert shapes == [(halves[0], (1, 2)), (halves[1], (1, 2)), (WHOLE, (3, 4))]


def test_a_chain_is_copied_only_where_a_handle_cuts_it():
    """Copied at each checkpoint after a change of parallelism, it would take a time that is quadratic in its length."""
    live = LiveHandles()
    for checkpoint, parts in enumerate([2, 3, 3], 1):
        before = [chain for _, chain in live.chains(TABLES[0], WHOLE)] if checkpoint == 3 else []
        live.advance(checkpoint, [handle(*TABLES[0], g, checkpoint, checkpoint - 1) for g in WHOLE.split(parts)], WHOLE)
    after = [chain for _, chain in live.chains(TABLES[0], WHOLE)]
    assert len(before) == len(after) == 4 and all(a is b for a, b in zip(before, after, strict=True))


def test_plans_are_values():
    history = {1: [handle("flights", "totals", WHOLE, 1, 0)]}
    assert isinstance(plan_written(history, 1, 2), RestorePlan)
    assert plan_written(history, 1, 2) == plan_written(history, 1, 2)
    assert verify(history) == [VerifyChain("flights", WHOLE, verify(history)[0].steps)]
