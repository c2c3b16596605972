import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.errors import CorruptObject
from siltstone.format.coding import Decoder, Encoder, seal, unseal, unzigzag, zigzag

numbers = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=300)
repetitive = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 2), max_size=60)


def _array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(numbers, repetitive, numbers, st.binary(max_size=400), st.lists(st.text(max_size=20), max_size=20))
def test_all_that_is_written_is_read(
    varints: list[int], runs: list[int], integers: list[int], blob: bytes, texts: list[str]
) -> None:
    out = Encoder()
    out.varints(_array(varints))
    out.runs(_array(runs))
    out.integers(_array(integers))
    out.blob(blob)
    out.texts(texts)
    out.constant(2**64 - 1, 3)
    out.varint(7)
    data = out.finish()
    read = Decoder(data, "it")
    assert read.varints(len(varints)).tolist() == varints
    assert read.runs(len(runs)).tolist() == runs
    assert read.integers(len(integers)).tolist() == integers
    assert bytes(read.blob()) == blob
    assert read.texts(len(texts)) == texts
    assert read.integers(3).tolist() == [2**64 - 1] * 3
    assert read.varint() == 7
    assert read.position == len(data)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_zigzag(values: list[int]) -> None:
    signed = np.array(values, dtype=np.int64)
    coded = zigzag(signed)
    assert coded.tolist() == [2 * v if v >= 0 else -2 * v - 1 for v in values]
    assert unzigzag(coded).tolist() == values


@given(numbers)
def test_varints_are_leb128(values: list[int]) -> None:
    def leb128(value: int) -> bytes:
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*out, value])

    out = Encoder()
    out.varints(_array(values))
    assert out.finish() == b"".join(map(leb128, values))


@given(
    st.binary(max_size=60),
    st.sampled_from(["varints", "runs", "integers", "blob", "texts"]),
    st.integers(0, 9),
)
def test_garbage_is_read_or_refused(data: bytes, what: str, count: int) -> None:
    read = Decoder(data, "it")
    try:
        read.blob() if what == "blob" else getattr(read, what)(count)
    except CorruptObject as error:
        assert "it cannot be read" in str(error)
    assert read.position <= len(data)


@given(st.binary(max_size=60), st.data())
def test_a_seal_notices_every_change(payload: bytes, data: st.DataObject) -> None:
    sealed = seal(payload, b"MAGIC")
    assert bytes(unseal(sealed, b"MAGIC", "it")) == payload
    position = data.draw(st.integers(0, len(sealed) - 1))
    altered = bytearray(sealed)
    altered[position] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(altered), sealed[:position], sealed + b"x"):
        with pytest.raises(CorruptObject, match="it "):
            unseal(bad, b"MAGIC", "it")


def test_costs() -> None:
    def size(method: str, values: list[int]) -> int:
        out = Encoder()
        getattr(out, method)(_array(values))
        return len(out.finish())

    assert size("runs", [5]) == 1
    assert size("runs", [5] * 100) == 2
    assert size("runs", [0, 1] * 10) == 20
    assert size("integers", [9] * 10_000) == 2
    assert size("integers", list(range(1000, 1256))) <= 256 + 6
