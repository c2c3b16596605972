"""Blocks come in order, verified, each byte fetched once, no more ahead than allowed."""

import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import CorruptObject
from siltstone.format.base import read_base, write_base
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.state.schema import TableSchema
from siltstone.store import blocks, ranged
from siltstone.store.blocks import BlockReader, Wanted
from siltstone.store.checksums import checksum_of
from siltstone.store.filesystem import FilesystemStore
from tests.examples import examples

GROUPS = KeyGroupRange(0, 128)


class CountingStore(FilesystemStore):
    """Remembers what was fetched."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def read(self, stored: StoredObject) -> pa.Buffer:
        with self._lock:
            self.fetched.append((stored.name, 0, stored.bytes))
        return super().read(stored)

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        with self._lock:
            self.fetched.append((name, offset, length))
        return super().read_range(name, offset, length)


def _stored(store: FilesystemStore, name: str, sizes: list[int]) -> tuple[StoredObject, list[Handle]]:
    """An object of blocks end to end, and their handles."""
    parts = [os.urandom(size) for size in sizes]
    stored = store.put(name, b"".join(parts))
    handles, offset = [], 0
    for i, part in enumerate(parts):
        checksum = checksum_of(part)
        place = (name, offset, len(part), checksum, GROUPS)
        handles.append(Handle("o", f"v{i}", Kind.INCREMENTAL, Form.DELTA, *place, rows=1, previous=1))
        offset += len(part)
    return stored, handles


@settings(max_examples=examples(40))
@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([0, 100, 5000]),
)
def test_blocks_come_in_order_and_no_byte_of_a_run_twice(sizes: list[list[int]], chance, gap: int) -> None:
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "GAP_BYTES", gap)
        store = CountingStore(Path(directory) / "s")
        objects, handles = [], []
        for i, object_sizes in enumerate(sizes):
            stored, its = _stored(store, f"s/1/{i}", object_sizes)
            objects.append(stored)
            handles += [h for h in its if chance.random() < 0.7]
        found = [memoryview(b).tobytes() for b in BlockReader(store, objects).blocks(map(Wanted, handles))]
        assert [checksum_of(b) for b in found] == [h.checksum for h in handles]
        for stored in objects:
            spans = sorted((start, start + n) for name, start, n in store.fetched if name == stored.name)
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            wanted = sum(h.length for h in handles if h.object == stored.name)
            skipped = sum(b - a for a, b in spans) - wanted
            assert 0 <= skipped <= gap * len(object_sizes_of(stored, sizes))


def object_sizes_of(stored: StoredObject, sizes: list[list[int]]) -> list[int]:
    return sizes[int(stored.name.rpartition("/")[2])]


def test_only_so_much_is_fetched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "AHEAD_BYTES", 3000)
    store = CountingStore(tmp_path)
    made = [_stored(store, f"s/1/{i}", [1000]) for i in range(20)]
    reading = BlockReader(store, [stored for stored, _ in made]).blocks(Wanted(h) for _, [h] in made)
    for used in range(1, 21):
        next(reading)
        time.sleep(0.002)
        assert len(store.fetched) <= used + 3
    assert len(store.fetched) == 20


def test_damage_is_told_when_its_turn_comes_and_damage_elsewhere_never(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    one, first = _stored(store, "s/1/a", [100, 100, 100])
    other, second = _stored(store, "s/1/b", [100])
    data = bytearray((tmp_path / "s/1/a").read_bytes())
    data[150] ^= 1
    (tmp_path / "s/1/a").unlink()
    (tmp_path / "s/1/a").write_bytes(data)
    reader = BlockReader(store, [one, other])
    assert len(list(reader.blocks(map(Wanted, [first[0], first[2], *second])))) == 3
    reading = reader.blocks(map(Wanted, [*second, *first]))
    next(reading)
    with pytest.raises(CorruptObject, match=r"s/1/a was altered: v1, 100 bytes at 100"):
        next(reading)


def test_what_no_manifest_names_or_lies_beyond_the_end_is_corrupt(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    stored, [handle] = _stored(store, "s/1/a", [100])
    with pytest.raises(CorruptObject, match="not in a manifest"):
        list(BlockReader(store, []).blocks([Wanted(handle)]))
    with pytest.raises(CorruptObject, match="beyond its end"):
        list(BlockReader(store, [StoredObject(stored.name, 50, stored.checksum)]).blocks([Wanted(handle)]))


SCHEMA = TableSchema(
    pa.schema([pa.field("k", pa.int64(), nullable=False)]), pa.schema([]), pa.schema([("v", pa.string())])
)


def _base(store: FilesystemStore, rows: int, *, ranges: bool = True) -> tuple[StoredObject, Handle]:
    """A base whose rows are spread evenly over the key groups; or one without `ranges`."""
    table = pa.table({"k": np.arange(rows), "v": [xxhash.xxh3_128_hexdigest(str(i).encode()) for i in range(rows)]})
    owners = (np.arange(rows) * len(GROUPS) // rows).astype(np.uint16)
    with ranged.create_ranged(store, "s/1/t.base.parquet") as out:
        write_base(out, SCHEMA, [(table.cast(SCHEMA.rows), owners)])
    assert out.stored is not None
    if not ranges:
        out.stored = replace(out.stored, ranges=None)
    place = (out.stored.name, 0, out.stored.bytes, out.stored.checksum, GROUPS)
    return out.stored, Handle("o", "t", Kind.INCREMENTAL, Form.BASE, *place, rows=rows, previous=0)


def test_of_a_base_only_the_wanted_key_groups_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr(ranged, "RANGE_BYTES", 16 << 10)
    monkeypatch.setattr("siltstone.format.base.ROW_GROUP_ROWS", 10_000)
    store = CountingStore(tmp_path)
    stored, handle = _base(store, 300_000)
    [file] = BlockReader(store, [stored]).blocks([Wanted(handle, in_parts=True)])
    wanted = KeyGroupRange(60, 64)
    rows = pa.concat_tables([rows for rows, _ in read_base(file, SCHEMA, wanted)])
    whole = pa.concat_tables([rows for rows, _ in read_base(store.read(stored), SCHEMA, wanted)])
    assert rows.equals(whole) and rows.num_rows == pytest.approx(300_000 * 4 / 128, abs=1)
    fetched = [n for _, _, n in store.fetched[:-1]]
    assert sum(fetched) < stored.bytes / 5


@pytest.mark.parametrize("ranges", [True, False])
def test_an_altered_page_of_a_base_read_in_parts_is_noticed(tmp_path: Path, ranges: bool) -> None:
    store = FilesystemStore(tmp_path)
    stored, handle = _base(store, 20_000, ranges=ranges)
    path = tmp_path / stored.name
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    data = bytearray(path.read_bytes())
    data[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptObject, match=f"object {stored.name} was altered: .*(not have checksum|checksum is not)"):
        _in_parts(store, stored, handle)


def _in_parts(store: FilesystemStore, stored: StoredObject, handle: Handle) -> pa.Table:
    """Some key groups of a base."""
    [file] = BlockReader(store, [stored]).blocks([Wanted(handle, in_parts=True)])
    found = read_base(file, SCHEMA, KeyGroupRange(0, 10), name=stored.name, rows=handle.rows)
    return pa.concat_tables([rows for rows, _ in found])


def test_a_base_without_range_checksums_or_with_unknown_ones_is_verified_whole_and_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    stored, handle = _base(store, 20_000)
    assert stored.ranges is not None
    expected = _in_parts(store, stored, handle)
    for ranges in (None, replace(stored.ranges, algorithm="of a later version"), replace(stored.ranges, checksums="")):
        store.fetched.clear()
        assert _in_parts(store, replace(stored, ranges=ranges), handle).equals(expected)
        assert store.fetched[0] == (stored.name, 0, stored.bytes)


def test_a_base_with_another_number_of_rows_than_recorded_is_refused(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    stored, handle = _base(store, 20_000)
    with pytest.raises(CorruptObject, match=f"{stored.name} has 20000 rows, but 20001 are recorded"):
        _in_parts(store, stored, replace(handle, rows=20_001))
