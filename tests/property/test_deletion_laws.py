"""Laws of deletion over any history of bases and deltas, deleted in any order."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.records.objects import ObjectKind, ObjectRecord
from siltstone.retention.deletion_rules import plan_deletion


@st.composite
def histories(draw):
    """checkpoint -> operator -> the first that its restore reads; operators are based at checkpoints of their own."""
    operators = draw(st.integers(1, 3))
    first, out = [0] * operators, {}
    for checkpoint in range(1, draw(st.integers(1, 16)) + 1):
        for operator in range(operators):
            if not first[operator] or draw(st.integers(0, 3)) == 0:
                first[operator] = checkpoint
        out[checkpoint] = tuple(first)
    return out


def reads(first, checkpoint):
    """The objects, by checkpoint and operator, that a restore reads."""
    return {(c, o) for o, begins in enumerate(first[checkpoint]) for c in range(begins, checkpoint + 1)}


def recorded(first):
    """One object per checkpoint and operator, with the last checkpoint that needs it."""
    return [
        ObjectRecord(f"{c}/{o}", ObjectKind.SEGMENT, c, 1, 1, "", max(id for id in first if (c, o) in reads(first, id)))
        for c in first
        for o in range(len(first[c]))
    ]


def objects_of(stored):
    return {tuple(int(part) for part in each.name.split("/")) for each in stored}


class Stored:
    """What is left of a history while it is deleted, and what deletions did."""

    def __init__(self, first):
        self.first, self.kept, self.marked = first, set(first), set()
        self.objects = recorded(first)

    def delete(self, *ids):
        self.marked |= self.kept & set(ids)
        self.kept -= set(ids)
        plan = plan_deletion([o for o in self.objects if o.checkpoint in self.marked], self.kept, self.marked)
        assert {*plan.goes, *plan.waits} == self.marked
        assert list(plan.goes) == sorted(plan.goes) and list(plan.waits) == sorted(plan.waits) == sorted(plan.needed_by)
        for id, by in plan.needed_by.items():
            assert by == max(c for c in self.kept if any(at == id for at, _ in reads(self.first, c)))
        self.objects = [each for each in self.objects if each not in plan.objects]
        self.marked -= set(plan.goes)
        return plan

    @property
    def needed(self):
        """All that restores of visible checkpoints read, one by one."""
        return {each for id in self.kept for each in reads(self.first, id)}


@given(histories(), st.data())
def test_at_any_time_exactly_what_visible_checkpoints_need_is_left(first, data):
    left = Stored(first)
    order = data.draw(st.permutations(sorted(first)))
    while order:
        some = data.draw(st.integers(1, 3))
        left.delete(*order[:some])
        order = order[some:]
        assert objects_of(left.objects) == left.needed
        assert left.kept == set(order)
    assert not left.objects and not left.marked


@given(histories(), st.data())
def test_the_order_of_deletions_does_not_matter(first, data):
    ids = sorted(data.draw(st.sets(st.sampled_from(sorted(first)))))
    at_once, one_by_one = Stored(first), Stored(first)
    at_once.delete(*ids)
    for id in data.draw(st.permutations(ids)):
        one_by_one.delete(id)
    assert (at_once.objects, at_once.marked) == (one_by_one.objects, one_by_one.marked)


@given(histories(), st.data())
def test_what_may_go_once_may_go_for_good_while_the_stream_runs_on(first, data):
    """Between the decision and the deletion a run may commit checkpoints, which build on the newest one's chains."""
    newest = max(first)
    marked = data.draw(st.sets(st.integers(1, newest))) - {newest}
    plans = []
    for more in range(4):
        if more:
            last = first[newest + more - 1]
            at = newest + more
            first[at] = tuple(data.draw(st.sampled_from(sorted({begins, at}))) for begins in last)
        objects = [each for each in recorded(first) if each.checkpoint in marked]
        plans.append(plan_deletion(objects, set(first) - marked, marked))
    for before, after in pairwise(plans):
        assert set(before.goes) <= set(after.goes)
        assert objects_of(before.objects) <= objects_of(after.objects)


@given(histories(), st.data())
def test_what_is_read_stays_and_goes_afterwards(first, data):
    newest = max(first)
    marked = data.draw(st.sets(st.integers(1, newest))) - {newest}
    read = data.draw(st.sets(st.integers(1, newest)))
    running, late = data.draw(st.booleans()), data.draw(st.sets(st.integers(1, newest)))
    replaced = [replace(o, replaced_at=newest if o.checkpoint in late else newest - 1) for o in recorded(first)]
    objects, kept = [o for o in replaced if o.checkpoint in marked], set(first) - marked
    free = plan_deletion(objects, kept, marked)
    held = plan_deletion(objects, kept, marked, lambda id: id in read, running)
    spared = read | late if running else read
    assert {*held.goes, *held.waits, *held.leased} == marked
    assert objects_of(held.objects) == {(c, o) for c, o in objects_of(free.objects) if c not in spared}
    assert set(held.goes) == {c for c in free.goes if c not in spared}


def test_one_chain_by_hand():
    """1 is a base, 2 to 4 build on it; 5 is a base again."""
    left = Stored({1: (1,), 2: (1,), 3: (1,), 4: (1,), 5: (5,)})
    assert (left.delete(1).goes, left.marked) == ((), {1})
    assert (left.delete(4).goes, left.marked) == ((4,), {1})
    assert (left.delete(2).goes, left.marked) == ((), {1, 2})
    assert (left.delete(3).goes, left.marked) == ((1, 2, 3), set())
    assert left.kept == {5}


def test_of_two_operators_the_objects_go_as_each_begins_anew():
    """Operator 0 is based at 3: its objects of 1 and 2 go, though the checkpoints stay for operator 1."""
    left = Stored({1: (1, 1), 2: (1, 1), 3: (3, 1)})
    plan = left.delete(1, 2)
    assert (plan.goes, plan.needed_by, objects_of(plan.objects)) == ((), {1: 3, 2: 3}, {(1, 0), (2, 0)})
