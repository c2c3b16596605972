"""`verify --deep`: what differs between two tables is found, all of it and nothing else, and named by its keys."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siltstone.restore.compare import differences
from siltstone.state.schema import TableSchema

SCHEMA = TableSchema(
    pa.schema([("k", pa.string())]),
    pa.schema([("p", pa.int64())]),
    pa.schema([("n", pa.int64()), ("x", pa.float64())]),
)
KEYS = st.tuples(st.sampled_from([None, "a", "b", "c"]), st.none() | st.integers(0, 5))
VALUES = st.tuples(st.none() | st.integers(0, 2), st.sampled_from([None, 0.0, -0.0, 1.5, float("nan")]))


def table(rows: dict) -> pa.Table:
    columns = list(zip(*[(*key, *value) for key, value in rows.items()], strict=True)) or [[], [], [], []]
    return pa.table([list(c) for c in columns], schema=SCHEMA.rows)


def same(left: tuple, right: tuple) -> bool:
    return repr(left) == repr(right)  # tells -0.0 from 0.0, and NaN is itself


@given(st.dictionaries(KEYS, VALUES), st.dictionaries(KEYS, VALUES), st.randoms())
def test_exactly_the_differing_keys_are_found(left: dict, right: dict, chance) -> None:
    shuffled = list(right.items())
    chance.shuffle(shuffled)
    mine, others = table(left), table(dict(shuffled))
    found = differences(SCHEMA, mine, others)
    keys = SCHEMA.primary_key.names
    named = pa.concat_tables(
        [
            mine.select(keys).take(pa.array(np.concatenate([found.only_left, found.unequal]))),
            others.select(keys).take(pa.array(found.only_right)),
        ]
    )
    expected = {k for k in left.keys() | right.keys() if k not in left or k not in right or not same(left[k], right[k])}
    assert sorted(map(repr, (tuple(row.values()) for row in named.to_pylist()))) == sorted(map(repr, expected))


def test_keys_that_differ_in_which_column_is_null_are_told_apart() -> None:
    schema = TableSchema(pa.schema([("k", pa.string())]), pa.schema([("p", pa.string())]), pa.schema([]))
    rows = pa.table([["a", None], [None, "a"]], schema=schema.rows)
    found = differences(schema, rows, rows.slice(1))
    assert (found.only_left.tolist(), found.only_right.tolist(), found.unequal.tolist()) == ([0], [], [])


def test_a_key_that_is_there_twice_is_a_difference() -> None:
    once = table({("a", 1): (1, 1.0)})
    assert len(differences(SCHEMA, once, pa.concat_tables([once, once])).unequal)
