"""Rows are put in the order that `lexsort` would put them in."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from siltstone.state import ordering
from siltstone.state.ordering import stable_order

KINDS = (np.int8, np.int64, np.uint16, np.uint64, np.int32, np.bool_)


@st.composite
def some_columns(draw: st.DrawFn) -> list[np.ndarray]:
    """Few distinct numbers or any, near each other or at the bounds of their type."""
    rows = draw(st.integers(1, 60))
    columns = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)):
        elements = hnp.from_dtype(np.dtype(kind))
        if kind is not np.bool_ and draw(st.booleans()):
            low = draw(elements) // 2
            elements = st.integers(int(low), int(low) + 3).map(kind)
        columns.append(draw(hnp.arrays(kind, rows, elements=elements)))
    return columns


@given(some_columns())
def test_the_order_is_that_of_a_stable_sort(columns: list[np.ndarray]):
    with patch.object(ordering, "_FEW_ROWS", 0):
        found = stable_order(*columns)
    assert found.dtype == np.int64
    assert np.array_equal(found, np.lexsort(columns[::-1]))


@pytest.mark.parametrize("rows", [0, 1, 5, 1024, 1025, 4096, 70_000])
def test_few_rows_and_many(rows: int):
    draw = np.random.default_rng(rows)
    columns = [
        draw.integers(0, 7, rows),
        draw.integers(0, 2**64, rows, np.uint64, endpoint=False),
        draw.random(rows) < 0.5,
    ]
    for some in ([columns[0]], [columns[1]], columns[::-1], columns * 3):
        assert np.array_equal(stable_order(*some), np.lexsort(some[::-1]))


def test_floats_are_refused():
    with pytest.raises(TypeError, match="by integers"):
        stable_order(np.zeros(3), np.zeros(3, np.int64))
