"""Live rows in the order of a base, by key group and then primary key, in bounded batches."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.columns import one_array
from siltstone.state.heap.records import Records


def ordered(records: Records, groups: KeyGroupRange) -> Iterator[np.ndarray]:
    """Ids of the live records of `groups`, a batch at a time.

    Memory: a few bytes for each record of these groups, and the keys of one key group or one batch.
    """
    ids, ends = _by_group(records, groups)
    size = records.batch_rows
    start = 0
    while start < len(ids):
        # Whole key groups, as many as fit a batch, at least one.
        fitting = ends[(ends > start) & (ends <= start + size)]
        end = int(fitting[-1]) if len(fitting) else int(ends[ends > start][0])
        run = _by_key(records, ids[start:end])
        for at in range(0, len(run), size):
            yield run[at : at + size]
        start = end


def _by_group(records: Records, groups: KeyGroupRange) -> tuple[np.ndarray, np.ndarray]:
    """Ids (uint32) by key group, and where each key group ends among them."""
    group = records.column("group")
    ids = np.flatnonzero((records.column("live") != 0) & (group >= groups.start) & (group < groups.end))
    group = group[ids]
    order = np.argsort(group, kind="stable")
    return ids.astype(np.uint32)[order], np.cumsum(np.bincount(group, minlength=1))


def _by_key(records: Records, ids: np.ndarray) -> np.ndarray:
    """The ids of whole key groups, ordered by key group and primary key."""
    parts = []
    size = records.batch_rows
    for at in range(0, len(ids), size):
        block = records.take(ids[at : at + size])
        columns = [pa.array(block["group"]), *records.layout.read_keys(block, records.arena)]
        parts.append(pa.Table.from_arrays(columns, names=[str(i) for i in range(len(columns))]))
    keys = pa.concat_tables(parts)
    if keys.num_columns == 2 and pa.types.is_integer(keys.column(1).type):
        group, key = (one_array(column).to_numpy() for column in keys.columns)
        return ids[np.lexsort((key, group))]
    order = [(name, "ascending") for name in keys.column_names]
    return one_array(keys.append_column("id", pa.array(ids)).sort_by(order).column("id")).to_numpy()
