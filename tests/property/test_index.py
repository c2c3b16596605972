import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.errors import CorruptObject, NewerFormat, UsageError
from siltstone.format.coding import seal
from siltstone.format.index import FIELDS, MAGIC, IndexEntry, decode_index, encode_index, field_bytes
from siltstone.model import Form

checksums = st.binary(min_size=16, max_size=16).map(lambda digest: f"xxh3-128:{digest.hex()}")
names = st.from_regex(r"[a-z][a-z0-9_-]{0,9}(\.bounds)?", fullmatch=True)


def _plain(entry: IndexEntry) -> dict[str, object]:
    return {**vars(entry), "key_group_offsets": entry.key_group_offsets.tolist()}


@st.composite
def entries(draw: st.DrawFn, checkpoint: int) -> IndexEntry:
    counts = draw(st.lists(st.integers(0, 2**20), max_size=12))
    delta = draw(st.booleans())
    return IndexEntry(
        variable=draw(names),
        form=Form.DELTA if delta else Form.BASE,
        offset=draw(st.integers(0, 2**50)) if delta else 0,
        previous_checkpoint=draw(st.integers(0, checkpoint - 1)) if delta else 0,
        previous_entry=draw(st.integers(0, 2**31)) if delta else 0,
        length=draw(st.integers(0, 2**50)),
        rows=sum(counts),
        checksum=draw(checksums),
        digest=draw(st.integers(0, 2**64 - 1)),
        source="" if delta else draw(names),
        first_key_group=draw(st.integers(0, 2**15)),
        key_group_offsets=np.cumsum([0, *counts]).astype(np.uint32),
    )


@st.composite
def indexes(draw: st.DrawFn) -> tuple[int, list[IndexEntry]]:
    checkpoint = draw(st.integers(1, 2**31 - 1))
    return checkpoint, draw(st.lists(entries(checkpoint), max_size=12))


@pytest.mark.slow
@given(indexes())
def test_round_trip(index: tuple[int, list[IndexEntry]]) -> None:
    data = encode_index(*index)
    checkpoint, decoded = decode_index(data)
    assert checkpoint == index[0]
    assert list(map(_plain, decoded)) == list(map(_plain, index[1]))
    assert set(field_bytes(data)) == set(FIELDS)


@given(indexes(), st.data())
def test_cut_or_altered_is_noticed(index: tuple[int, list[IndexEntry]], data: st.DataObject) -> None:
    good = encode_index(*index)
    position = data.draw(st.integers(0, len(good) - 1))
    altered = bytearray(good)
    altered[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptObject, match="flights/1 "):
        decode_index(good[:position], "flights/1")
    digit = altered[len(MAGIC) - 1 : len(MAGIC)]  # of the format; a higher one is a newer Siltstone's
    newer = position == len(MAGIC) - 1 and digit.isdigit() and digit > MAGIC[-1:]
    with pytest.raises(NewerFormat if newer else CorruptObject, match="flights/1 "):
        decode_index(bytes(altered), "flights/1")


@given(st.binary(max_size=120))
def test_garbage_is_refused_or_read_even_under_a_good_seal(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        decode_index(data)
    try:
        decode_index(seal(data, MAGIC))
    except CorruptObject as error:
        assert "an index" in str(error)


@given(indexes(), st.data())
def test_damage_under_a_good_seal_never_crashes(index: tuple[int, list[IndexEntry]], data: st.DataObject) -> None:
    payload = bytearray(encode_index(*index)[len(MAGIC) : -8])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_index(seal(bytes(payload), MAGIC))
    except CorruptObject as error:
        assert "an index" in str(error)


def _operator(checkpoint: int, tables: int, bases: set[int], groups: int) -> list[IndexEntry]:
    """What an operator writes: blocks end to end, each delta on the same entry of the checkpoint before."""
    rng = np.random.default_rng(checkpoint)
    out, offset = [], 0
    for i in range(tables):
        counts = rng.integers(700, 860, groups)
        length = int(counts.sum()) * 6
        base = i in bases
        entry = IndexEntry(
            f"table{i}",
            Form.BASE if base else Form.DELTA,
            0 if base else offset,
            0 if base else checkpoint - 1,
            0 if base else i,
            length,
            int(counts.sum()),
            f"xxh3-128:{rng.bytes(16).hex()}",
            int(rng.integers(0, 2**63)),
            f"flights/00000001/{checkpoint:012d}/o.table{i}.00000.0.base.parquet" if base else "",
            0,
            np.zeros(1, np.uint32) if base else np.cumsum([0, *counts]).astype(np.uint32),
        )
        offset += 0 if base else length
        out.append(entry)
    return out


@pytest.mark.parametrize("tables", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("bases", [set(), {0}, {1, 3}, set(range(10))], ids=["deltas", "one", "two", "bases"])
def test_the_patents_four_fields_take_at_most_four_bytes_an_entry(tables: int, bases: set[int]) -> None:
    data = encode_index(1234, _operator(1234, tables, bases, 64))
    assert sum(field_bytes(data).values()) <= 4 * tables


def test_ordinary_index_is_small() -> None:
    data = encode_index(1234, _operator(1234, 6, set(), 64))
    assert sum(field_bytes(data).values()) == 8
    assert len(data) <= 6 * 110


def test_what_cannot_be_is_refused() -> None:
    [delta] = _operator(5, 1, set(), 4)
    [base] = _operator(5, 1, {0}, 4)
    for entry in (
        IndexEntry(**{**vars(delta), "previous_checkpoint": 5}),
        IndexEntry(**{**vars(delta), "source": "x"}),
        IndexEntry(**{**vars(base), "source": ""}),
        IndexEntry(**{**vars(base), "previous_checkpoint": 4}),
    ):
        with pytest.raises(UsageError, match="entry table0 of checkpoint 5"):
            encode_index(5, [entry])
