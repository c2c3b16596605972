import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.errors import CorruptObject
from siltstone.format.index import IndexEntry, decode_index, encode_index
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.restore.index_chain import follow
from siltstone.restore.live_rules import LiveHandles


def _index(bases: set[str], variables: list[str], checkpoint: int, before: list[IndexEntry]) -> list[IndexEntry]:
    """One checkpoint: what is in `bases` is a base, the rest builds on the entry before, wherever that stands."""
    entries, end = [], 0
    for variable in variables:
        base = variable in bases
        previous = 0 if base else next(i for i, e in enumerate(before) if e.variable == variable)
        entries.append(
            IndexEntry(
                variable=variable,
                form=Form.BASE if base else Form.DELTA,
                offset=0 if base else end,
                previous_checkpoint=0 if base else checkpoint - 1,
                previous_entry=previous,
                length=10 + checkpoint,
                rows=1,
                checksum="xxh3-128:" + "ab" * 16,
                digest=checkpoint,
                source=f"base/{variable}/{checkpoint}" if base else "",
            )
        )
        end += 0 if base else 10 + checkpoint
    return decode_index(encode_index(checkpoint, entries))[1]


def _steps_of(checkpoint: int, base: bool, steps: int, before: list[IndexEntry]) -> list[IndexEntry]:
    """One checkpoint with an index per step, in each of which every table has the same place; or one with bases, which
    replace the changes of the steps before."""
    index = _index(set("abc") if base else set(), ["a", "b", "c"], checkpoint, before)
    numbers = [steps - 1] if base else range(steps)
    written = [replace(entry, sqn=10 * checkpoint + number) for number in numbers for entry in index]
    return decode_index(encode_index(checkpoint, written))[1]


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=10), st.randoms())
def test_of_checkpoints_of_several_steps_each_change_is_followed_once_and_in_order(
    checkpoints: list[tuple[bool, int]], draw: random.Random
) -> None:
    indexes: dict[int, list[IndexEntry]] = {}
    based = 1
    for checkpoint, (chosen, steps) in enumerate(checkpoints, 1):
        base = chosen or checkpoint == 1
        based = checkpoint if base else based
        of_steps = _steps_of(checkpoint, base, steps, indexes.get(checkpoint - 1, []))
        # Segments come in any order; within one, tables keep theirs.
        by_step = [[e for e in of_steps if e.sqn == sqn] for sqn in {e.sqn for e in of_steps}]
        draw.shuffle(by_step)
        indexes[checkpoint] = [entry for index in by_step for entry in index]
    for place, variable in enumerate("abc"):
        links = follow(indexes.get, len(checkpoints), variable)
        expected = sorted(
            (checkpoint, entry.sqn)
            for checkpoint, index in indexes.items()
            for entry in index
            if entry.variable == variable and checkpoint >= based
        )
        assert [(link.checkpoint, link.entry.sqn) for link in links] == expected
        assert {link.entry.variable for link in links} == {variable} and {link.place for link in links} == {place}
        assert [link.entry.form for link in links] == [Form.BASE] + [Form.DELTA] * (len(links) - 1)


def test_the_changes_before_a_base_of_their_own_checkpoint_are_not_followed() -> None:
    first = _index({"a", "b"}, ["a", "b"], 1, [])
    delta = [replace(entry, sqn=5) for entry in _index(set(), ["a", "b"], 2, first)]
    base = [replace(entry, sqn=6) for entry in _index({"a", "b"}, ["a", "b"], 2, [])]
    [link] = follow({1: first, 2: [*delta, *base]}.get, 2, "b")
    assert (link.entry.sqn, link.entry.form, link.place) == (6, Form.BASE, 1)


def test_a_step_whose_link_leads_elsewhere_is_noticed() -> None:
    """Only the oldest step's link is followed, which is where a chain leaves its checkpoint."""
    first = _index({"a", "b"}, ["a", "b"], 1, [])
    second = _index(set(), ["a", "b"], 2, first)
    wrong = [replace(entry, sqn=4, previous_entry=1 - entry.previous_entry) for entry in second]
    steps = [*(replace(entry, sqn=5) for entry in second), *wrong]
    with pytest.raises(CorruptObject, match="checkpoint 2 says that b builds on entry 0 of checkpoint 1"):
        follow({1: first, 2: steps}.get, 2, "b")


@pytest.mark.slow
@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.permutations("abc")), min_size=1, max_size=12))
def test_a_variable_is_followed_to_its_own_base_whatever_the_others_do(
    checkpoints: list[tuple[set[str], list[str]]],
) -> None:
    indexes: dict[int, list[IndexEntry]] = {}
    based: dict[str, int] = {}
    for checkpoint, (chosen, order) in enumerate(checkpoints, 1):
        bases = set("abc") if checkpoint == 1 else chosen
        indexes[checkpoint] = _index(bases, order, checkpoint, indexes.get(checkpoint - 1, []))
        based |= dict.fromkeys(bases, checkpoint)
        for variable in "abc":
            asked: list[int] = []
            links = follow(lambda c: asked.append(c) or indexes[c], checkpoint, variable)  # noqa: B023
            assert [link.checkpoint for link in links] == list(range(based[variable], checkpoint + 1))
            assert {link.entry.variable for link in links} == {variable}
            assert links[0].entry.form is Form.BASE and all(link.entry.form is Form.DELTA for link in links[1:])
            assert sorted(asked) == list(range(based[variable], checkpoint + 1))


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, "base"]), min_size=3, max_size=3), max_size=12))
def test_the_indexes_lead_to_the_handles_that_a_restore_reads(checkpoints: list[list[int | str]]) -> None:
    """Each table has a base, or no, one or two deltas at each checkpoint. Indexes share no code with `LiveHandles`."""
    indexes: dict[int, list[IndexEntry]] = {}
    last: dict[str, int] = {}
    live, groups = LiveHandles(), KeyGroupRange(0, 4)
    for checkpoint, written in enumerate([["base"] * 3, *checkpoints], 1):
        whole = IndexEntry("", Form.BASE, 0, 0, 0, 10, 1, "xxh3-128:" + "ab" * 16, 0)
        steps: dict[int, list[IndexEntry]] = {}
        for place, (variable, what) in enumerate(zip("abc", written, strict=True)):
            delta = replace(whole, form=Form.DELTA, previous_checkpoint=last.get(variable, 0), previous_entry=place)
            for step in (2,) if what == "base" else range(1, int(what) + 1):
                entry = replace(whole if what == "base" else delta, variable=variable, sqn=10 * checkpoint + step)
                steps.setdefault(step, []).append(entry)
            last |= {variable: checkpoint} if what else {}
        indexes[checkpoint] = [entry for _, index in sorted(steps.items()) for entry in index]
        handles = [
            Handle("o", e.variable, Kind.INCREMENTAL, e.form, "x", 0, 10, e.checksum, groups, 1, before, e.sqn)
            for e in indexes[checkpoint]
            for before in [e.previous_checkpoint]
        ]
        live.advance(checkpoint, handles, groups)
        for variable in "abc":
            followed = follow(indexes.get, last[variable], variable)
            [(_, chain)] = live.chains(("o", variable), groups)
            found = [(each.checkpoint, each.handle.sqn, each.handle.form) for each in chain.links]
            assert [(link.checkpoint, link.entry.sqn, link.entry.form) for link in followed] == found


def test_a_link_that_leads_elsewhere_is_noticed() -> None:
    first = _index({"a", "b"}, ["a", "b"], 1, [])
    second = _index(set(), ["a", "b"], 2, first)
    wrong = [second[0], replace(second[1], previous_entry=0)]
    with pytest.raises(CorruptObject, match="checkpoint 2 says that b builds on entry 0 of checkpoint 1"):
        follow({1: first, 2: wrong}.get, 2, "b")
    with pytest.raises(CorruptObject, match="checkpoint 2 has no variable c"):
        follow({1: first, 2: second}.get, 2, "c")


def test_tables_that_did_not_change_are_left_out_of_an_index() -> None:
    first = _index({"a", "b"}, ["a", "b"], 1, [])
    changed = [entry for entry in _index(set(), ["a", "b"], 4, first) if entry.variable == "b"]
    second = [replace(entry, previous_checkpoint=1) for entry in changed]
    links = follow({1: first, 3: _index({"a"}, ["a"], 3, []), 4: second}.get, 4, "b")
    assert [(link.checkpoint, link.place) for link in links] == [(1, 1), (4, 0)]


def test_a_chain_is_cut_where_other_subtasks_wrote() -> None:
    first = _index({"a"}, ["a"], 1, [])
    second = _index(set(), ["a"], 2, first)
    assert [link.checkpoint for link in follow({2: second}.get, 2, "a")] == [2]
