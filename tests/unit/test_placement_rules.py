"""Subtasks are spread over cores evenly, and as few as possible move."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.spark.placement_rules import assign_subtasks
from tests.examples import examples

EXECUTORS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1)
CURRENT = st.lists(st.one_of(st.none(), st.sampled_from("abcdx")), min_size=1, max_size=24)


def is_even(assigned: list[str], cores: dict[str, int]) -> bool:
    """Whether each executor's subtasks can be divided among its cores so that cores differ by at most one."""
    least, further = divmod(len(assigned), sum(cores.values()))
    held = Counter(assigned)
    return all(least * n <= held[e] <= (least + bool(further)) * n for e, n in cores.items())


@settings(max_examples=examples(200))
@given(CURRENT, EXECUTORS)
def test_every_subtask_has_an_executor_and_cores_differ_by_at_most_one(
    current: list[str | None], cores: dict[str, int]
) -> None:
    assigned = assign_subtasks(current, cores)
    assert len(assigned) == len(current) and set(assigned) <= cores.keys()
    assert is_even(assigned, cores)
    assert assign_subtasks(assigned, cores) == assigned, "what is even stays"


@settings(max_examples=examples(60))
@given(st.lists(st.one_of(st.none(), st.sampled_from("abx")), min_size=1, max_size=5), st.integers(1, 2))
def test_no_even_assignment_moves_fewer(current: list[str | None], more: int) -> None:
    cores = {"a": 1, "b": more, "c": 1}
    kept = [
        sum(map(str.__eq__, map(str, current), each))
        for each in product(cores, repeat=len(current))
        if is_even(list(each), cores)
    ]
    assigned = assign_subtasks(current, cores)
    assert sum(old == new for old, new in zip(current, assigned, strict=True)) == max(kept)


@pytest.mark.parametrize(
    ("current", "cores", "assigned"),
    [
        (["a", "a"], {"a": 1, "b": 1}, ["a", "b"]),  # persisted before the second executor came
        (["a", "b", "a", "b"], {"a": 1, "b": 1, "c": 1}, ["a", "b", "a", "c"]),
        (["a", "x"], {"a": 1}, ["a", "a"]),
        ([None, None, None], {"a": 2, "b": 1}, ["a", "a", "b"]),
        (["a"], {}, []),
    ],
)
def test_executors_that_come_and_go(current: list[str | None], cores: dict[str, int], assigned: list[str]) -> None:
    assert assign_subtasks(current, cores) == assigned
