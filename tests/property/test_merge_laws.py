"""A base merged with its deltas is what a dictionary makes of them."""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.model import KeyGroupRange
from siltstone.restore import merge
from siltstone.restore.merge import Changes, Delta, newest_changes
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import TableSchema
from tests.examples import examples

SCHEMA = TableSchema(
    pa.schema([("k", pa.string())]), pa.schema([("s", pa.int32())]), pa.schema([("v", pa.int64()), ("t", pa.string())])
)
NUMBERED = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), SCHEMA.value)
GROUPS = 8
NAMES = [None, "", "a", "b", "c", "d", "ü"]
KEYS = st.tuples(st.sampled_from(NAMES), st.integers(-2, 2))
VALUES = st.tuples(st.none() | st.integers(-5, 5), st.none() | st.text(max_size=3))
Key = tuple[str | None, int]
Rows = dict[Key, tuple[int | None, str | None] | None]


def _k(key: Key, schema: TableSchema) -> str | int | None:
    """The first key column; where it is the only one, a number for both, and null for one of them."""
    if schema is SCHEMA:
        return key[0]
    return None if key == ("a", 1) else 5 * NAMES.index(key[0]) + key[1]


def _owners(keys: list[Any], schema: TableSchema) -> np.ndarray:
    return key_groups(xxhash64([pa.array(keys, schema.key.field("k").type)]), GROUPS)


def _table(rows: Rows, table: TableSchema, schema: pa.Schema) -> tuple[pa.Table, np.ndarray]:
    """The rows by key group; None stands for a delete."""
    columns = {
        "k": [_k(key, table) for key in rows],
        "s": [s for _, s in rows],
        "v": [v[0] if v else None for v in rows.values()],
        "t": [v[1] if v else None for v in rows.values()],
        "__deleted": [v is None for v in rows.values()],
    }
    made = pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
    owners = key_groups(xxhash64([made.column("k")]), GROUPS) if rows else np.zeros(0, np.uint16)
    order = np.argsort(owners, kind="stable")
    return made.take(pa.array(order)), owners[order]


@settings(max_examples=examples(150))
@given(
    st.dictionaries(KEYS, VALUES, max_size=25),
    st.lists(st.dictionaries(KEYS, st.none() | VALUES, max_size=12), max_size=4),
    st.integers(1, 7),
    st.tuples(st.integers(0, GROUPS), st.integers(0, GROUPS)).map(sorted),
    st.sampled_from([1, 10, merge.TOGETHER_ROWS]),
    st.sampled_from([1, 3, merge.MERGED_ROWS]),
    st.sampled_from([1, 40, merge.MERGED_BYTES]),
    st.booleans(),
    st.sampled_from([SCHEMA, NUMBERED]),
)
def test_the_newest_change_wins_and_deletes_drop(
    base: Rows,
    deltas: list[Rows],
    size: int,
    bounds: list[int],
    together: int,
    at_once: int,
    bytes_at_once: int,
    spilled: bool,
    schema: TableSchema,
) -> None:
    groups = KeyGroupRange(*bounds)
    inside = lambda rows: {  # noqa: E731
        key: value for key, value in rows.items() if _owners([_k(key, schema)], schema)[0] in groups
    }
    expected: Rows = inside(base)
    changes = Changes(schema, GROUPS, Path(tempfile.gettempdir()) if spilled else None)
    with patch.object(merge, "TOGETHER_ROWS", together), patch.object(merge, "TOGETHER_BYTES", bytes_at_once):
        for delta in reversed(deltas):
            changes.add(*_table(inside(delta), schema, schema.changes))
    for delta in map(inside, deltas):
        expected |= delta
    rows, owners = _table(inside(base), schema, schema.rows)
    batches = [(rows.slice(i, size), owners[i : i + size]) for i in range(0, len(owners), size)]
    with patch.object(merge, "MERGED_ROWS", at_once), patch.object(merge, "MERGED_BYTES", bytes_at_once):
        merged = list(changes.merge(batches, groups))
    seen = np.concatenate([np.zeros(0, np.uint16), *(owner for _, owner in merged)])
    assert (np.diff(seen.astype(int)) >= 0).all()
    found: dict[tuple[str | int | None, int | None], tuple[int | None, str | None]] = {}
    for table, owner in merged:
        assert table.schema == schema.rows
        assert (key_groups(xxhash64([table.column("k")]), GROUPS) == owner).all() if len(owner) else True
        for row in table.to_pylist():
            key = row["k"], row.get("s")
            assert key not in found
            found[key] = (row["v"], row["t"])
    live = {key: value for key, value in expected.items() if value is not None}
    assert found == {(_k(key, schema), key[1] if schema is SCHEMA else None): value for key, value in live.items()}


@settings(max_examples=examples(80))
@given(
    st.lists(st.dictionaries(KEYS, st.none() | VALUES, max_size=12), max_size=4),
    st.tuples(st.integers(0, GROUPS), st.integers(0, GROUPS)).map(sorted),
    st.sampled_from([1, 3, merge.NEWEST_ROWS]),
    st.sampled_from([1, 40, merge.MERGED_BYTES]),
    st.sampled_from([SCHEMA, NUMBERED]),
)
def test_of_many_deltas_each_key_has_its_newest_change(
    deltas: list[Rows], bounds: list[int], at_once: int, bytes_at_once: int, schema: TableSchema
) -> None:
    groups, expected = KeyGroupRange(*bounds), Rows()
    decoded: set[int] = set()
    keys = schema.primary_key.names

    def delta(i: int) -> Delta:
        table, owners = _table(deltas[i], schema, schema.changes)
        return Delta(table.select(keys), owners, lambda: decoded.add(i) or table)

    with patch.object(merge, "NEWEST_ROWS", at_once), patch.object(merge, "MERGED_BYTES", bytes_at_once):
        newest = list(newest_changes([*map(delta, reversed(range(len(deltas))))], schema, groups, GROUPS))
    inside = lambda rows: {key for key in rows if _owners([_k(key, schema)], schema)[0] in groups}  # noqa: E731
    newer: set[Key] = set()
    for i in reversed(range(len(deltas))):
        own = inside(deltas[i])
        assert (i in decoded) == bool(own - newer), "a delta is decoded exactly if one of its changes is the newest"
        newer |= own
    for delta in deltas:
        expected |= delta
    whole, owners = _table(expected, schema, schema.changes)
    mine = pa.array([owner in groups for owner in owners.tolist()], pa.bool_())
    found = pa.concat_tables([schema.changes.empty_table(), *(table for table, _ in newest)])
    order = [(name, "ascending") for name in keys]
    assert found.sort_by(order).equals(whole.filter(mine).sort_by(order))
    seen = np.concatenate([np.zeros(0, np.uint16), *(owner for _, owner in newest)])
    assert (np.diff(seen.astype(int)) >= 0).all() and all(len(table) == len(owner) for table, owner in newest)
