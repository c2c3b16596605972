import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.errors import CorruptObject, UsageError
from siltstone.format.block import decode_block, encode_block
from siltstone.format.coding import seal
from siltstone.format.opaque import MAGIC, decode_opaque, encode_opaque
from siltstone.format.segment import Section, Segment, SegmentBuilder
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.store.checksums import checksum_of

GROUPS = KeyGroupRange(64, 128)
BASE = StoredObject("flights/00000001/000000000007/o.routes.00001.3.base.parquet", 4711, "xxh3-128:" + "ab" * 16)
PLACES = {section: ("x", 0) for section in Section}
OPAQUE = {"model": {64: b"", 70: b"x" * 500, 127: b"\0\xff"}, "none": {}}


def _changes(seed: int) -> tuple[pa.Table, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = pa.table({"k": rng.integers(0, 1000, 50), "v": rng.integers(0, 9, 50), "__deleted": [False] * 50})
    return table, np.sort(rng.integers(64, 128, 50)).astype(np.uint16)


def _segment() -> Segment:
    builder = SegmentBuilder("o", 7, GROUPS)
    builder.add_delta("recent", encode_block(*_changes(1)), 6, 0, digest=2**64 - 1)
    builder.add_base("routes", BASE, 99, digest=5)
    builder.add_delta("totals", encode_block(*_changes(2)), 6, 2, digest=0)
    for variable, values in OPAQUE.items():
        builder.add_opaque(variable, values)
    return builder.build()


@pytest.fixture(scope="module")
def packed() -> bytes:
    return _segment().pack()


def test_unpack_gives_what_was_packed_without_copying(packed: bytes) -> None:
    segment, built = Segment.unpack(pa.py_buffer(packed)), _segment()
    assert segment == built
    for part in (segment.non, segment.incr, segment.index):
        assert isinstance(part, memoryview)
    assert [e.variable for e in segment.entries()] == ["recent", "routes", "totals"]
    assert [e.digest for e in segment.entries()] == [2**64 - 1, 5, 0]
    assert segment.handles(PLACES) == built.handles(PLACES)


def test_handles_point_straight_at_the_bytes(packed: bytes) -> None:
    segment = Segment.unpack(packed)
    handles = {h.variable: h for h in segment.handles(segment.places("the/segment"))}
    assert list(handles) == ["model", "none", "recent", "routes", "totals", "INDEX"]
    assert handles["routes"] == Handle(
        "o", "routes", Kind.INCREMENTAL, Form.BASE, BASE.name, 0, BASE.bytes, BASE.checksum, GROUPS, 99, 0
    )
    for variable, handle in handles.items():
        if variable == "routes":
            continue
        data = packed[handle.offset : handle.offset + handle.length]
        assert (handle.object, handle.operator, handle.key_groups) == ("the/segment", "o", GROUPS)
        assert checksum_of(data) == handle.checksum
        if handle.kind == Kind.INDEX:
            assert Segment.unpack(b"".join((segment.non, segment.incr, data))) == segment
        elif handle.kind == Kind.OPAQUE:
            assert handle.form == Form.BASE
            assert decode_opaque(data) == OPAQUE[variable]
        else:
            assert (handle.form, handle.previous, handle.rows) == (Form.DELTA, 6, 50)
            expected = decode_block(encode_block(*_changes(1 if variable == "recent" else 2)).data)
            assert decode_block(data)[0].equals(expected[0])


def test_an_empty_segment() -> None:
    segment = Segment.unpack(SegmentBuilder("o", 1, GROUPS).build().pack())
    assert segment.entries() == [] and [h.kind for h in segment.handles(PLACES)] == [Kind.INDEX]


@pytest.mark.parametrize("offset", [0, 7_000_000_000])
def test_every_byte_of_a_segment_belongs_to_exactly_one_handle(offset: int) -> None:
    segment = _segment()
    spans = [(h.offset, h.length) for h in segment.handles(segment.places("x", offset)) if h.object == "x"]
    end = offset
    for start, length in sorted(spans):
        assert start == end
        end += length
    assert end - offset == len(segment.pack())


def test_sections_of_two_segments_are_not_mixed_up() -> None:
    one, other = _segment(), SegmentBuilder("o", 7, GROUPS).build()
    with pytest.raises(CorruptObject, match="is cut short, or not a segment"):
        Segment.unpack(b"".join((one.non, other.incr, one.sections[Section.INDEX])))


def test_a_variable_twice_is_refused() -> None:
    builder = SegmentBuilder("o", 7, GROUPS)
    builder.add_base("routes", BASE, 1, digest=0)
    with pytest.raises(UsageError, match="routes of operator o"):
        builder.add_base("routes", BASE, 1, digest=0)
    with pytest.raises(UsageError, match="routes of operator o"):
        builder.add_opaque("routes", {})


@pytest.mark.slow
def test_every_cut_is_noticed_and_no_altered_byte_gets_through(packed: bytes) -> None:
    whole = Segment.unpack(packed).handles(Segment.unpack(packed).places("x"))
    for position in range(len(packed)):
        with pytest.raises(CorruptObject, match="flights/1 "):
            Segment.unpack(packed[:position], "flights/1")
        altered = bytearray(packed)
        altered[position] ^= 0x40
        try:
            segment = Segment.unpack(bytes(altered))
            handles = segment.handles(segment.places("x"))
        except CorruptObject:
            continue
        # The frame and the index are sound: then the byte is in a block or value, whose own checksum tells.
        sound = [
            checksum_of(altered[h.offset : h.offset + h.length]) == old.checksum
            for h, old in zip(handles, whole, strict=True)
            if h.object == "x"
        ]
        assert sound.count(False) == 1


@given(st.binary(max_size=100))
def test_garbage_is_no_segment(data: bytes) -> None:
    for bad in (data, b"SILTSEG1" + data + b"SILTSEG1"):
        with pytest.raises(CorruptObject):
            Segment.unpack(bad)


@given(st.dictionaries(st.integers(0, 65535), st.binary(max_size=80), max_size=8))
def test_opaque_round_trip(values: dict[int, bytes]) -> None:
    data = encode_opaque(values)
    assert decode_opaque(data) == values
    assert encode_opaque(dict(reversed(values.items()))) == data
    with pytest.raises(CorruptObject, match="it "):
        decode_opaque(data[:-1], "it")


@given(st.binary(max_size=60))
def test_garbage_is_no_opaque_value(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        decode_opaque(data)
    try:
        decode_opaque(seal(data, MAGIC), "it")
    except CorruptObject as error:
        assert "it " in str(error)


def test_opaque_key_groups_are_checked() -> None:
    for group in (-1, 65536):
        with pytest.raises(UsageError, match="key groups"):
            encode_opaque({group: b""})
