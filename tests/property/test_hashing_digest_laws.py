"""Laws of hashing and digests over random tables of every type."""

import numpy as np
import pyarrow as pa
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import find_distinct, normalise_keys, xxhash64
from tests.arrow_strategies import arrays, tables


def identities(table: pa.Table) -> list[tuple]:
    """Rows as comparable tuples: NaN equal to itself, 0.0 equal to -0.0."""
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return [tuple("NaN" if value != value else value for value in row) for row in rows]  # noqa: PLR0124


@given(tables())
def test_a_row_hashes_alone_as_in_company(table):
    hashes = xxhash64(table.columns)
    for i in range(table.num_rows):
        assert xxhash64(table.slice(i, 1).columns).tolist() == [hashes[i]]


@given(st.integers(0, 30).flatmap(lambda n: arrays(pa.binary(), n, nulls=False)), st.integers(0, 2**64 - 1))
def test_bytes_hash_as_the_reference_does(array, seed):
    expected = [xxhash.xxh64_intdigest(value, seed) for value in array.to_pylist()]
    assert xxhash64([array], seed).tolist() == expected


@given(tables(max_columns=3, max_rows=20), st.sampled_from([1, 2, 2**64]), st.randoms())
def test_distinct_finds_the_keys_whatever_the_hash_is(table, buckets, random):
    rows = [random.randrange(table.num_rows) for _ in range(30)] if table.num_rows else []
    table = normalise_keys(table.take(pa.array(rows, pa.int64())))
    hashes = np.array([int(h) % buckets for h in xxhash64(table.columns)], np.uint64)
    first, group = find_distinct(hashes, table.columns)
    keys = identities(table)
    assert len(first) == len(set(keys))
    assert group[first].tolist() == list(range(len(first)))
    for i, key in enumerate(keys):
        assert first[group[i]] == keys.index(key)


@given(tables(), st.randoms())
def test_digests_follow_rows_and_do_not_see_order_or_null_columns(table, random):
    digests = row_digests(table)
    rows, columns = list(range(table.num_rows)), list(table.column_names)
    random.shuffle(rows)
    random.shuffle(columns)
    moved = table.take(pa.array(rows, pa.int64())).select(columns)
    moved = moved.append_column("added", pa.nulls(len(rows), pa.int64()))
    assert row_digests(moved).tolist() == digests[rows].tolist()


@given(tables(max_rows=20), st.randoms())
def test_sums_can_be_kept_change_by_change(table, random):
    digests = row_digests(table)
    groups = np.array([random.randrange(4) for _ in range(len(digests))], np.uint16)
    cut = random.randint(0, len(digests))
    whole, gone = group_sums(digests, groups, 4), group_sums(digests[:cut], groups[:cut], 4)
    assert (whole - gone).tolist() == group_sums(digests[cut:], groups[cut:], 4).tolist()


@given(tables(max_columns=3))
def test_rows_that_differ_digest_differently(table):
    digests = row_digests(table).tolist()
    rows = list(zip(*(map(repr, column.to_pylist()) for column in table.columns), strict=True))
    assert len(set(digests)) == len(set(rows))
