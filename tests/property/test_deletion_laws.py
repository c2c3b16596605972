"""Laws of deletion over any history of bases and deltas, deleted in any order."""

from hypothesis import given
from hypothesis import strategies as st

from siltstone.retention.deletion_rules import plan_deletion


@st.composite
def histories(draw):
    """checkpoint -> the first that its restore reads; operators begin and are based at checkpoints of their own."""
    operators = draw(st.integers(1, 3))
    first, out = [0] * operators, {}
    for checkpoint in range(1, draw(st.integers(1, 16)) + 1):
        for operator in range(operators):
            if not first[operator] or draw(st.integers(0, 3)) == 0:
                first[operator] = checkpoint
        out[checkpoint] = min(first)
    return out


class Stored:
    """What is left of a history while it is deleted, and what deletions did."""

    def __init__(self, first):
        self.first, self.marked = dict(first), set()

    def delete(self, *ids):
        self.marked |= {id for id in ids if id in self.first}
        plan = plan_deletion({c: f for c, f in self.first.items() if c not in self.marked}, self.marked)
        assert {*plan.goes, *plan.waits} == self.marked
        assert list(plan.goes) == sorted(plan.goes) and list(plan.waits) == sorted(plan.waits)
        for id in plan.goes:
            del self.first[id]
            self.marked.remove(id)
        return plan

    @property
    def needed(self):
        """All that restores of visible checkpoints read, one by one."""
        return {c for id, first in self.first.items() if id not in self.marked for c in range(first, id + 1)}


@given(histories(), st.data())
def test_at_any_time_exactly_what_visible_checkpoints_need_is_left(first, data):
    left = Stored(first)
    order = data.draw(st.permutations(sorted(first)))
    while order:
        some = data.draw(st.integers(1, 3))
        left.delete(*order[:some])
        order = order[some:]
        assert set(left.first) == left.needed
        assert set(left.first) - left.marked == set(order)
    assert not left.first


@given(histories(), st.data())
def test_the_order_of_deletions_does_not_matter(first, data):
    ids = sorted(data.draw(st.sets(st.sampled_from(sorted(first)))))
    at_once, one_by_one = Stored(first), Stored(first)
    at_once.delete(*ids)
    for id in data.draw(st.permutations(ids)):
        one_by_one.delete(id)
    assert (at_once.first, at_once.marked) == (one_by_one.first, one_by_one.marked)


@given(histories(), st.data())
def test_with_the_last_dependant_goes_every_marked_predecessor_that_nothing_else_needs(first, data):
    left = Stored(first)
    left.delete(*data.draw(st.sets(st.sampled_from(sorted(first)))))
    visible = sorted(set(left.first) - left.marked)
    if not visible:
        return
    last = data.draw(st.sampled_from(visible))
    needed_by_others = {c for id in visible if id != last for c in range(left.first[id], id + 1)}
    alone = {c for c in range(left.first[last], last + 1) if c in left.marked} - needed_by_others
    waits = last in needed_by_others
    assert set(left.delete(last).goes) == alone | (set() if waits else {last})


@given(histories(), st.data())
def test_what_may_go_once_may_go_for_good_while_the_stream_runs_on(first, data):
    """Between the decision and the deletion a run may commit checkpoints, which build on the newest one's chain."""
    newest = max(first)
    marked = data.draw(st.sets(st.integers(1, newest))) - {newest}
    goes = plan_deletion({c: f for c, f in first.items() if c not in marked}, marked).goes
    for checkpoint in range(newest + 1, newest + 4):
        first[checkpoint] = data.draw(st.integers(first[checkpoint - 1], checkpoint))
    later = plan_deletion({c: f for c, f in first.items() if c not in marked}, marked).goes
    assert set(goes) <= set(later)


def test_one_chain_by_hand():
    """1 is a base, 2 to 4 build on it; 5 is a base again."""
    first = {1: 1, 2: 1, 3: 1, 4: 1, 5: 5}
    left = Stored(first)
    assert (left.delete(1).goes, left.marked) == ((), {1})
    assert (left.delete(4).goes, left.marked) == ((4,), {1})
    assert (left.delete(2).goes, left.marked) == ((), {1, 2})
    assert (left.delete(3).goes, left.marked) == ((1, 2, 3), set())
    assert set(left.first) == {5}
