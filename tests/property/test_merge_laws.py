"""A base merged with its deltas is what a dictionary makes of them."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.lifecycle import merge
from siltstone.lifecycle.merge import Changes
from siltstone.model import KeyGroupRange
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import TableSchema

SCHEMA = TableSchema(
    pa.schema([("k", pa.string())]), pa.schema([("s", pa.int32())]), pa.schema([("v", pa.int64()), ("t", pa.string())])
)
GROUPS = 8
KEYS = st.tuples(st.sampled_from(["", "a", "b", "c", "d", "e", "ü"]), st.integers(-2, 2))
VALUES = st.tuples(st.none() | st.integers(-5, 5), st.none() | st.text(max_size=3))
Rows = dict[tuple[str, int], tuple[int | None, str | None] | None]


def _table(rows: Rows, schema: pa.Schema) -> tuple[pa.Table, np.ndarray]:
    """The rows by key group; None stands for a delete."""
    columns = {
        "k": [k for k, _ in rows],
        "s": [s for _, s in rows],
        "v": [v[0] if v else None for v in rows.values()],
        "t": [v[1] if v else None for v in rows.values()],
        "__deleted": [v is None for v in rows.values()],
    }
    table = pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
    owners = key_groups(xxhash64([table.column("k")]), GROUPS) if rows else np.zeros(0, np.uint16)
    order = np.argsort(owners, kind="stable")
    return table.take(pa.array(order)), owners[order]


@settings(max_examples=150)
@given(
    st.dictionaries(KEYS, VALUES, max_size=25),
    st.lists(st.dictionaries(KEYS, st.none() | VALUES, max_size=12), max_size=4),
    st.integers(1, 7),
    st.tuples(st.integers(0, GROUPS), st.integers(0, GROUPS)).map(sorted),
    st.sampled_from([1, 10, merge.TOGETHER_ROWS]),
    st.sampled_from([1, 3, merge.MERGED_ROWS]),
    st.booleans(),
)
def test_the_newest_change_wins_and_deletes_drop(
    base: Rows, deltas: list[Rows], size: int, bounds: list[int], together: int, at_once: int, spilled: bool
) -> None:
    groups = KeyGroupRange(*bounds)
    inside = lambda rows: {  # noqa: E731
        key: value for key, value in rows.items() if key_groups(xxhash64([pa.array([key[0]])]), GROUPS)[0] in groups
    }
    expected: Rows = inside(base)
    changes = Changes(SCHEMA, GROUPS, Path(tempfile.gettempdir()) if spilled else None)
    with patch.object(merge, "TOGETHER_ROWS", together):
        for delta in reversed(deltas):
            changes.add(*_table(inside(delta), SCHEMA.changes))
    for delta in map(inside, deltas):
        expected |= delta
    rows, owners = _table(inside(base), SCHEMA.rows)
    batches = [(rows.slice(i, size), owners[i : i + size]) for i in range(0, len(owners), size)]
    with patch.object(merge, "MERGED_ROWS", at_once):
        merged = list(changes.merged(batches, groups))
    seen = np.concatenate([np.zeros(0, np.uint16), *(owner for _, owner in merged)])
    assert (np.diff(seen.astype(int)) >= 0).all()
    found: Rows = {}
    for table, owner in merged:
        assert table.schema == SCHEMA.rows
        assert (key_groups(xxhash64([table.column("k")]), GROUPS) == owner).all() if len(owner) else True
        for row in table.to_pylist():
            assert (row["k"], row["s"]) not in found
            found[row["k"], row["s"]] = (row["v"], row["t"])
    assert found == {key: value for key, value in expected.items() if value is not None}
