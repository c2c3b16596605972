"""What tests of working state share: batches of keys, and tables as plain dictionaries to compare with."""

from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, StateTable
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import DELETED, TableSchema

MAX_PARALLELISM = 16
ALL = KeyGroupRange(0, MAX_PARALLELISM)

Rows = dict[tuple[str, ...], tuple[str, ...]]


def batch_of(schema: TableSchema, keys: pa.Table, buckets: int = 2**64) -> Keys:
    """A batch as the engine makes it; fewer `buckets` force keys to collide."""
    keys = keys.cast(schema.primary_key)
    hashes = xxhash64(keys.columns)
    groups = key_groups(xxhash64(keys.select(schema.key.names).columns), MAX_PARALLELISM)
    if buckets < 2**64:
        hashes = hashes % np.uint64(buckets)
    return Keys(keys, hashes, groups)


def texts(columns: list[Any]) -> list[tuple[str, ...]]:
    """Rows as tuples of text: NaN equals NaN, and -0.0 differs from 0.0."""
    return list(zip(*(map(repr, column.to_pylist()) for column in columns), strict=True))


def rows_of(keys: pa.Table, values: pa.Table) -> Rows:
    """Key -> values."""
    value_texts = texts(values.columns) if values.num_columns else [()] * len(keys)
    return dict(zip(texts(keys.columns), value_texts, strict=True))


def contents(table: StateTable, groups: KeyGroupRange = ALL) -> Rows:
    """Everything a scan yields, which must be in order, once, and agree with `rows` and the digests kept."""
    parts = list(table.scan(groups))
    found: Rows = {}
    sums = np.zeros(MAX_PARALLELISM, np.uint64)
    seen = np.zeros(0, np.uint16)
    for part, part_groups in parts:
        assert part.schema.equals(table.schema.rows)
        assert len(part) == len(part_groups) > 0
        seen = np.concatenate([seen, part_groups])
        keys, values = part.select(table.schema.primary_key.names), part.select(table.schema.value.names)
        assert batch_of(table.schema, keys).key_groups.tolist() == part_groups.tolist()
        found.update(rows_of(keys, values))
        sums += group_sums(row_digests(part), part_groups, MAX_PARALLELISM)
    assert np.all(np.diff(seen.astype(np.int64)) >= 0)
    assert len(found) == len(seen)
    assert all(group in groups for group in seen.tolist())
    if groups == ALL:
        assert table.rows == len(found)
        assert table.digests.tolist() == sums.tolist()
    return found


def changed(table: StateTable) -> dict[tuple[str, ...], tuple[str, ...] | None]:
    """What `changes` tells: key -> values, None where it is a delete."""
    changes, groups = table.changes()
    assert changes.schema.equals(table.schema.changes)
    assert np.all(np.diff(groups.astype(np.int64)) >= 0)
    counts = table.count_changed()
    assert counts.tolist() == np.bincount(groups, minlength=len(counts)).tolist()
    parts = [table.changes(part)[0] for part in KeyGroupRange(0, len(counts)).split(3)]
    assert texts(pa.concat_tables(parts).columns) == texts(changes.columns)
    keys = changes.select(table.schema.primary_key.names)
    assert batch_of(table.schema, keys).key_groups.tolist() == groups.tolist()
    values = rows_of(keys, changes.select(table.schema.value.names))
    assert len(values) == len(changes), "a key is told twice"
    deleted = dict(zip(texts(keys.columns), changes.column(DELETED).to_pylist(), strict=True))
    assert all(set(values[key]) <= {"None"} for key, dead in deleted.items() if dead)
    return {key: None if deleted[key] else row for key, row in values.items()}
