"""Scan live rows in bounded batches: as a base has them, by key group and then primary key, or as records lie."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backends.checks import as_table
from siltstone.state.backends.heap.records import Records
from siltstone.state.columns import one_array
from siltstone.state.ordering import stable_order
from siltstone.state.schema import TableSchema

PART_ROWS = 1 << 18


def scan_records(
    records: Records, schema: TableSchema, groups: KeyGroupRange, *, in_order: bool = True
) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yield the live records of `groups` in batches, and their rows (`schema.rows`); `in_order` by key."""
    for ids in scan_ids(records, groups) if in_order else _scan_any(records, groups):
        block = records.take(ids)
        keys, values = (
            records.layout.read_keys(block, records.arena),
            records.layout.read_values(block, records.arena),
        )
        yield block, as_table([*keys, *values], schema.rows, len(block))


def scan_ids(records: Records, groups: KeyGroupRange) -> Iterator[np.ndarray]:
    """Yield ids of the live records of `groups`, one batch at a time.

    Memory: four bytes per record of these groups, and the keys of one key group or one batch.
    """
    ids, ends = _by_group(records, groups)
    size = records.batch_rows
    start = 0
    while start < len(ids):
        # As many whole key groups as fit a batch, at least one.
        fitting = ends[(ends > start) & (ends <= start + size)]
        end = int(fitting[-1]) if len(fitting) else int(ends[ends > start][0])
        run = _by_key(records, ids[start:end])
        yield from records.batches(run)
        start = end


def _scan_any(records: Records, groups: KeyGroupRange) -> Iterator[np.ndarray]:
    """Yield ids of the live records of `groups`, ascending, one batch at a time."""
    for found, _ in _scan_live(records, groups):
        yield from records.batches(found)


def _by_group(records: Records, groups: KeyGroupRange) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (uint32) by key group, and where each key group ends among them, by a counting sort in parts, which
    needs little more memory than its result."""
    counts = np.zeros(len(groups), np.int64)
    for _, owners in _scan_live(records, groups):
        counts += np.bincount(owners, minlength=len(groups))
    ends = np.cumsum(counts)
    ids, place = np.empty(int(counts.sum()), np.uint32), ends - counts
    for found, owners in _scan_live(records, groups):
        order = stable_order(owners)
        here = np.bincount(owners, minlength=len(groups))
        # The nth record of a key group in this part goes to its nth free position.
        nth = np.arange(len(order)) - np.repeat(np.cumsum(here) - here, here)
        ids[np.repeat(place, here) + nth] = found[order]
        place += here
    return ids, ends


def _scan_live(records: Records, groups: KeyGroupRange) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids of live records of `groups`, ascending, in parts, and the ordinals of their key groups."""
    group, live = records.column("group"), records.column("live")
    for start in range(0, records.rows, PART_ROWS):
        part = group[start : start + PART_ROWS]
        found = np.flatnonzero((live[start : start + PART_ROWS] != 0) & (part >= groups.start) & (part < groups.end))
        yield found + start, part[found] - np.uint16(groups.start)


def _by_key(records: Records, ids: np.ndarray) -> np.ndarray:
    """Sort the ids of whole key groups by key group and primary key."""
    parts = []
    for batch in records.batches(ids):
        block = records.take(batch)
        columns = [pa.array(block["group"]), *records.layout.read_keys(block, records.arena)]
        parts.append(pa.Table.from_arrays(columns, names=[str(i) for i in range(len(columns))]))
    keys = pa.concat_tables(parts)
    if keys.num_columns == 2 and pa.types.is_integer(keys.column(1).type) and not keys.column(1).null_count:
        group, key = (one_array(column).to_numpy() for column in keys.columns)
        return ids[stable_order(group, key)]
    order = [(name, "ascending") for name in keys.column_names]
    return one_array(keys.append_column("id", pa.array(ids)).sort_by(order).column("id")).to_numpy()
