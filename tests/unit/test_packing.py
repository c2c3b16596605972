"""Text of the catalog in few bytes."""

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.database.packing import _DICTIONARY, pack, unpack
from siltstone.errors import StateError

TEXT = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1795168268275,"conf":{"spark.sql.shuffle.partitions":"2"}}'
PACKED = "0178f92db5cc4423ad4cb2343534b33002227353ac6512d65002da0a00cd2b220c"
OFFSETS = _DICTIONARY.decode().partition('"}}v1\n')[2]


@given(st.text() | st.text(st.sampled_from('{}":,0.1 spark')))
def test_text_is_what_it_was(text: str) -> None:
    assert unpack(pack(text)) == text


def test_what_was_packed_once_is_read_for_good() -> None:
    """Version 1 in the bytes it has: whoever changes its dictionary makes recorded steps unreadable."""
    packed = bytes.fromhex(PACKED)
    assert unpack(packed) == TEXT


def test_a_step_of_spark_takes_few_bytes() -> None:
    offsets = "v1\n" + OFFSETS.replace("1700000000000", "1795168268275").replace('Offset":0', 'Offset":31')
    assert len(offsets) > 1000 and len(pack(offsets)) < 60


@pytest.mark.parametrize("damage", [b"", b"\x02abc", b"\x01", b"\x01xyz", pack("a text that is whole")[:-3]])
def test_damage_is_an_error_of_ours(damage: bytes) -> None:
    with pytest.raises(StateError, match="packed text of the catalog"):
        unpack(damage)


@pytest.mark.slow
def test_a_megabyte_does_not_become_a_gigabyte() -> None:
    """Issue 11, item 3: text that unpacks to far more than it is stored in is refused before it takes memory."""
    packer = zlib.compressobj(9, zdict=_DICTIONARY)
    crafted = b"\x01" + b"".join(packer.compress(b"a" * (1 << 20)) for _ in range(1024)) + packer.flush()
    assert len(crafted) < 2 << 20
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="too large"):
            unpack(crafted)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_text_that_packs_too_well_is_still_read() -> None:
    text = "a" * (100 << 20)
    assert unpack(pack(text)) == text


def test_text_that_is_no_utf_8_is_an_error_of_ours() -> None:
    packer = zlib.compressobj(9, zdict=_DICTIONARY)
    with pytest.raises(StateError, match="packed text of the catalog"):
        unpack(b"\x01" + packer.compress(b"\xff\xfe") + packer.flush())
