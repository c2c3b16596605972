"""Any value comes back from a key-value store whole and in part, whatever the limit on values (US 9471438)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from siltstone.errors import CorruptObject
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import HEADER_BYTES, Header, chunk_key
from siltstone.store.retry import RetryPolicy

limits = st.integers(1024, 5000)
sizes = st.integers(0, 20_000)


class Memory:
    """A driver over a dict: no more than chunking needs."""

    url = label = "memory://"

    def __init__(self, value_limit_bytes: int) -> None:
        self.value_limit_bytes = value_limit_bytes
        self.data: dict[str, dict[bytes, bytes]] = {}

    @contextmanager
    def open_entry(self, entry: str, key: bytes = b"") -> Iterator["MemoryGet"]:
        yield MemoryGet(self.data.get(entry, {}))

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        assert len(value) <= self.value_limit_bytes
        found = self.data.setdefault(entry, {})
        return found.setdefault(key, mine := bytes(value)) is mine

    def stage(self, entry: str, key: bytes, write_id: bytes) -> "MemoryStage":
        return MemoryStage(self, entry, key)


class MemoryGet:
    def __init__(self, data: dict[bytes, bytes]) -> None:
        self.data = data

    def __call__(self, keys: list[bytes], most: int) -> list[bytes | int | None]:
        values = [self.data.get(key) for key in keys]
        return [value if value is None or len(value) <= most else len(value) for value in values]

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        value = self.data.get(key)
        return None if value is None else (len(value), value[start:stop])


class MemoryStage:
    def __init__(self, driver: Memory, entry: str, key: bytes) -> None:
        self.driver, self.entry, self.key = driver, entry, key

    def put(self, chunks: list[tuple[bytes, memoryview]]) -> None:
        for key, value in chunks:
            assert self.driver.add(self.entry, key, value)

    def commit(self, header: bytes) -> bool:
        return self.driver.add(self.entry, self.key, memoryview(header))

    def discard(self) -> None:
        raise AssertionError("nothing here is taken back")


def _store(limit: int) -> tuple[ChunkedStore, Memory]:
    driver = Memory(limit)
    return ChunkedStore(driver, RetryPolicy(kind="none")), driver  # type: ignore[arg-type]


def _bytes(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@given(limits, sizes)
@example(1024, 1024)
@example(1024, 1025)
@example(1024, 2048)
def test_a_value_is_stored_as_in_the_patent(limit: int, size: int) -> None:
    store, driver = _store(limit)
    data = _bytes(size)
    stored = store.put("s/1/k", data)
    assert store.read(stored).to_pybytes() == data
    found = driver.data["s/1"]
    if size <= limit:
        assert found == {b"k": data}
        return
    header = Header.decode(found.pop(b"k"), "k")
    assert header is not None
    assert (header.chunk_bytes, header.last_chunk) == (limit, (size - 1) // limit)
    assert header.last_chunk_bytes == size - header.last_chunk * limit
    chunks = {chunk_key(b"k", header.write_id, i): data[i * limit :][:limit] for i in range(header.last_chunk + 1)}
    assert found == chunks


@given(limits, sizes, st.data())
def test_a_range_is_the_slice(limit: int, size: int, draw: st.DataObject) -> None:
    store, _ = _store(limit)
    data = _bytes(size)
    store.put("k", data)
    start = draw.draw(st.integers(0, size))
    length = draw.draw(st.integers(0, size - start))
    assert store.read_range("k", start, length).to_pybytes() == data[start : start + length]
    with pytest.raises(CorruptObject, match=f"{size} bytes and should have {size + 1}"):
        store.read_range("k", start, size - start + 1)


@given(limits, st.lists(sizes, max_size=6))
def test_how_it_is_cut_into_writes_makes_no_difference(limit: int, pieces: list[int]) -> None:
    store, driver = _store(limit)
    data = _bytes(sum(pieces))
    with store.create("k") as writer:
        start = 0
        for size in pieces:
            writer.write(data[start : start + size])
            start += size
    assert writer.stored is not None and store.read(writer.stored).to_pybytes() == data
    whole, other = _store(limit)
    whole.put("k", data)
    assert [*map(len, driver.data[""].values())] == [*map(len, other.data[""].values())]


@given(st.binary(min_size=8, max_size=8))
def test_a_value_that_looks_like_a_header_is_one_all_the_same(write_id: bytes) -> None:
    store, _ = _store(1024)
    for name, data in {"a": Header(1024, 3, 5, write_id).encode(), "b": b"SILTCHK1" + bytes(HEADER_BYTES - 8)}.items():
        stored = store.put(name, data)
        assert store.read(stored).to_pybytes() == data


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_an_altered_header_is_noticed(place: int, change: int) -> None:
    store, driver = _store(1024)
    stored = store.put("k", _bytes(5000))
    header = bytearray(driver.data[""][b"k"])
    header[place] ^= change
    driver.data[""][b"k"] = bytes(header)
    with pytest.raises(CorruptObject, match="object k in memory://"):
        store.read(stored)


def test_a_chunk_that_is_missing_cut_or_altered_is_named() -> None:
    store, driver = _store(1024)
    stored = store.put("k", _bytes(5000))
    key = next(key for key in driver.data[""] if key.endswith(b"\0\0\0\2"))
    chunk = driver.data[""][key]
    for damage, said in [(chunk[:-1], "chunk 2 has 1023 bytes"), (bytes(1024), "checksum"), (None, "chunk 2 of 5")]:
        if damage is None:
            del driver.data[""][key]
        else:
            driver.data[""][key] = damage
        with pytest.raises(CorruptObject, match=said):
            store.read(stored)
