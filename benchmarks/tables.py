"""One table of four int64 columns, and timed calls of a state backend on it."""

import time

import numpy as np
import pyarrow as pa

from siltstone.state.backend import Keys, SubtaskState
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.schema import TableSchema

BATCH, GROUPS = 100_000, 128
TABLE = "table"
VALUES = pa.schema([(name, pa.int64()) for name in "abcd"])


def schema_of(key: pa.DataType) -> TableSchema:
    """Make the table's schema, with a key of this type."""
    return TableSchema(pa.schema([("key", key)]), pa.schema([]), VALUES)


def keys_of(column: pa.Array) -> Keys:
    """Make the keys of a call."""
    hashes = xxhash64([pa.chunked_array([column])])
    return Keys(pa.table({"key": column}), hashes, key_groups(hashes, GROUPS))


def random_values(draw: np.random.Generator, rows: int) -> pa.Table:
    """Make the values of a call."""
    return pa.table([pa.array(draw.integers(0, 1 << 40, rows)) for _ in VALUES], schema=VALUES)


def look_up(state: SubtaskState, keys: Keys) -> float:
    """Look up keys that are all there; return the seconds."""
    began = time.perf_counter()
    found = state.tables[TABLE].get(keys)
    seconds = time.perf_counter() - began
    assert found.found.all()
    return seconds


def update(state: SubtaskState, keys: Keys, values: pa.Table) -> float:
    """Put new values for keys in a step of its own; return the seconds."""
    began = time.perf_counter()
    state.begin(state.version + 1, tracking=True)
    state.tables[TABLE].put(keys, values)
    state.tables[TABLE].mark()
    state.commit()
    seconds = time.perf_counter() - began
    state.release(state.version)
    return seconds
