"""Small batches of rows are joined to larger ones, in their order, and large ones are left alone."""

from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siltstone.run.processing import join_batches


def batch(first: int, count: int, text: str = "") -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(range(first, first + count), pa.int64()), pa.array([text] * count, pa.string())], ["n", "text"]
    )


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 12))
def test_rows_and_their_order_stay(counts: list[int], most: int) -> None:
    given, first = list[pa.RecordBatch](), 0
    for count in counts:
        given.append(batch(first, count))
        first += count
    joined = list(join_batches(iter(given), most))
    assert [n for each in joined for n in each.column("n").to_pylist()] == list(range(first))
    sizes = [each.num_rows for each in joined]
    assert all(size <= max(most, *counts) for size in sizes)
    assert all(one + other > most for one, other in pairwise(sizes))


def test_many_bytes_are_not_joined() -> None:
    wide = [batch(0, 2, "x" * (20 << 20)), batch(2, 1, "x" * (20 << 20)), batch(3, 1, "y" * (20 << 20))]
    assert [each.num_rows for each in join_batches(iter(wide))] == [3, 1]
