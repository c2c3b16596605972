"""Rows are cut into the same calls of `process`, however they come in batches."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.run import processing
from siltstone.run.processing import calls


def cut(rows: int, ends: list[int]) -> list[pa.RecordBatch]:
    edges = [0, *sorted(min(end, rows) for end in ends), rows]
    whole = pa.record_batch({"n": pa.array(np.arange(rows))})
    return [whole.slice(first, last - first) for first, last in pairwise(edges)]


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9), st.booleans())
def test_calls_do_not_depend_on_batches(rows: int, ends: list[int], most: int, at_once: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing, "ROWS_A_CALL", most)
        made = list(calls(iter(cut(rows, ends)), at_once=at_once))
    found = [table.column("n").to_pylist() for table in made]
    assert all(len(chunk) for table in made for chunk in table.column("n").chunks), "no empty chunk"
    size = rows if at_once else most
    assert found == [list(range(first, min(first + size, rows))) for first in range(0, rows, size or 1)]
