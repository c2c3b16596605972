"""The RocksDB backend against a plain dictionary, as `test_heap_model.py`; its keys, in order and read back."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings

from siltstone.state.backends.rocksdb import RocksDBBackend, table
from siltstone.state.backends.rocksdb.coding import KeyCoding
from siltstone.state.backends.rocksdb.packing import to_list
from tests.examples import examples
from tests.property.test_heap_model import HeapMachine, random_keys, random_schema, seeds
from tests.state_model import ALL, MAX_PARALLELISM, batch_of, texts


@contextmanager
def small_batches() -> Iterator[None]:
    """So that a dozen rows are scanned, read and written in several batches."""
    with patch.multiple(table, BATCH_ROWS=6, _FIRST_PAIRS=2, _READ_KEYS=2, _WRITE_ROWS=3, _AHEAD_BYTES=100):
        yield


class RocksDBMachine(HeapMachine):
    """The same rules for the other backend."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = small_batches()
        self.batches.__enter__()

    def reopened(self):
        return RocksDBBackend().open(self.directory, {"t": self.schema}, ("o",), ALL, MAX_PARALLELISM)

    def teardown(self) -> None:
        super().teardown()
        self.batches.__exit__(None, None, None)


TestRocksDBMachine = RocksDBMachine.TestCase
TestRocksDBMachine.settings = settings(max_examples=examples(15), stateful_step_count=20, deadline=None)


@settings(max_examples=examples(100), deadline=None)
@given(random=seeds)
def test_keys_sort_as_their_rows_and_are_read_back(random: Random):
    schema = random_schema(random)
    keys = random_keys(random, schema)
    batch = batch_of(schema, keys)
    coding = KeyCoding(schema, b"t\0\1")
    encoded = coding.encode(keys, batch.key_groups)
    columns, groups = coding.decode(encoded)
    assert texts(columns) == texts(keys.columns)
    assert groups.tolist() == batch.key_groups.tolist()
    names = to_list(encoded)
    assert len(set(names)) == len(names)
    plain = keys.append_column("__group", pa.array(groups)).append_column("__row", pa.array(np.arange(len(keys))))
    order = ["__group", *schema.primary_key.names]
    in_order = plain.sort_by([(name, "ascending") for name in order]).column("__row").to_pylist()
    assert in_order == sorted(range(len(names)), key=names.__getitem__)
    for name, group in zip(names, groups.tolist(), strict=True):
        assert coding.group_start(group) <= name < coding.group_start(group + 1)
