"""Ranks order rows as their key groups and keys do, whatever integers the keys are."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siltstone.state.ranks import first_of_each, ranks

KINDS = {
    pa.int8(): (-(2**7), 2**7 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint64(): (0, 2**64 - 1),
    pa.date32(): (-(2**31), 2**31 - 1),
    pa.timestamp("us"): (-(2**63), 2**63 - 1),
}


@given(st.data(), st.sampled_from(list(KINDS)), st.integers(1, 60))
def test_ranks_are_in_the_order_of_key_group_and_key(data, kind, rows):
    least, most = KINDS[kind]
    begin = data.draw(st.integers(least, most))
    near = st.integers(begin, min(most, begin + data.draw(st.sampled_from([3, 2**20, 2**48 - 1]))))
    keys = data.draw(st.lists(st.none() | near, min_size=rows, max_size=rows))
    groups = data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=rows, max_size=rows))
    array = pa.array(keys, pa.uint64() if kind == pa.uint64() else pa.int64()).cast(
        pa.int32() if kind == pa.date32() else kind
    )
    rank = ranks(np.array(groups, np.uint16), array.cast(kind))
    known = [key for key in keys if key is not None]
    if known and None in keys and max(known) - min(known) == 2**48 - 1:
        assert rank is None  # no number is left for null
        return
    assert rank is not None
    pairs = [(group, key is None, key or 0) for group, key in zip(groups, keys, strict=True)]
    assert sorted(range(rows), key=pairs.__getitem__) == np.argsort(rank, kind="stable").tolist()
    assert len(np.unique(rank)) == len(set(pairs))


def test_keys_that_leave_no_room_or_are_no_integers_have_no_ranks():
    groups = np.zeros(2, np.uint16)
    for keys in ([0, 2**48], [-(2**63), 2**63 - 1], ["a", "b"], [0.0, 1.0], [None, 2**48 - 1, 0]):
        assert ranks(np.zeros(len(keys), np.uint16), pa.array(keys)) is None
    assert len(ranks(groups[:0], pa.array([], pa.int64()))) == 0  # pyright: ignore[reportArgumentType]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=120))
def test_the_first_of_each_is_the_first(values):
    found = first_of_each(np.array(values, np.uint64))
    assert found.tolist() == [values.index(value) for value in sorted(set(values))]
