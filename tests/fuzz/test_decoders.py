"""Whatever bytes a store holds, a decoder answers, or says in an error of ours that they are damaged (issue 11).

Valid encodings are altered, given the checksums that they need, and decoded in a process of their own: it must not
die, hang, take much memory, or raise what is not documented. An input that does stays in the corpus, to be tried again.

`make fuzz` runs the same for an hour: python -m tests.fuzz.test_decoders --minutes 60 [DECODER ...]
"""

import argparse
import sys
import time
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.child import Child
from tests.fuzz.decoders import DECODERS
from tests.fuzz.seeds import CORPUS

ROUND = 1000
_NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
_TEXTS = [b"../../x", b"/tmp/x", b"\xff", b"\0", b"null", b"-1", b"1e999", b"[" * 50, b"9" * 30, b'"', b"A"]


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


_FIXED = [number.to_bytes(size, "little") for number in _NUMBERS for size in (1, 2, 4, 8) if number < 1 << (8 * size)]
_PIECES = st.sampled_from([*_FIXED, *map(_varint, _NUMBERS), *_TEXTS]) | st.binary(min_size=1, max_size=9)
_PLACES = st.floats(0, 1, exclude_max=True)
_EDITS = st.lists(
    st.tuples(st.sampled_from(["write", "insert", "cut", "repeat", "flip"]), _PLACES, _PIECES), max_size=6
)


def altered(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """The bytes after some edits, each at a share of their length."""
    for what, share, piece in edits:
        at = int(share * len(data))
        if what == "write":
            data = data[:at] + piece + data[at + len(piece) :]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "cut":
            data = data[:at] + data[at + len(piece) :]
        elif what == "repeat":
            data = data[: at + len(piece)] * 2 + data[at + len(piece) :]
        elif data:
            data = data[:at] + bytes([data[at] ^ (1 << piece[0] % 8)]) + data[at + 1 :]
    return data


def corpus(name: str) -> list[bytes]:
    """The inputs of a decoder that are kept, valid ones first."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir(), key=lambda p: (p.name[0] == "f", p.name))]


@pytest.fixture(scope="module", params=DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    """A decoder; all tests of one come before those of the next."""
    return request.param


@pytest.fixture(scope="module")
def child(name: str) -> Iterator[Child]:
    """A process with that decoder, one for all of its tests: to start it takes longer than to try most of them."""
    child = Child(name)
    yield child
    child.close()


def fuzz(child: Child, name: str, count: int) -> None:
    """Try altered inputs; AssertionError for the smallest one that was not taken well, which is then in the corpus."""
    failing: list[bytes] = []
    kept = corpus(name)

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, len(kept) - 1), _EDITS, st.booleans())
    def run(number: int, edits: list[tuple[str, float, bytes]], sealed: bool) -> None:
        data = altered(kept[number], edits)
        data = DECODERS[name].seal(data) if sealed else data
        said = child.ask(data)
        if said:
            failing.append(data)
        assert not said, said

    try:
        run()
    except AssertionError:
        found = failing[-1]  # the smallest is tried last
        (CORPUS / name / f"found-{xxhash.xxh3_64_hexdigest(found)}.bin").write_bytes(found)
        raise


def test_what_was_found_once_stays_mended(child: Child, name: str) -> None:
    for data in corpus(name):
        assert not child.ask(data)
        assert not child.ask(DECODERS[name].seal(data))


@pytest.mark.slow
def test_no_bytes_end_hang_or_bloat_a_decoder_or_leave_it_by_another_error(child: Child, name: str) -> None:
    fuzz(child, name, examples(600 // DECODERS[name].cost))


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        ("dies", "ended: SIGSEGV"),
        ("hangs", "s of the processor"),
        ("bloats", "MB of"),
        ("raises", "UnicodeDecodeError"),
    ],
)
def test_the_fuzzer_notices_a_death_a_hang_memory_and_another_error(trap: str, said: str) -> None:
    child = Child(trap, cpu_s=1 if trap == "hangs" else 3)
    assert said in child.ask(b"\xff")
    child.close()


def main(arguments: list[str]) -> int:
    """Fuzz for some minutes, one decoder after the other; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.test_decoders", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("decoders", nargs="*", help=f"which, of {', '.join(DECODERS)}")
    options = parser.parse_args(arguments)
    names, counts = options.decoders or list(DECODERS), dict.fromkeys(DECODERS, 0)
    until, found = time.monotonic() + 60 * options.minutes, 0
    while time.monotonic() < until:
        for name in names:
            child = Child(name)
            try:
                fuzz(child, name, ROUND // DECODERS[name].cost)
            except AssertionError as error:
                found += 1
                print(f"{name}: {error}", flush=True)
            finally:
                child.close()
            counts[name] += ROUND // DECODERS[name].cost
            if time.monotonic() >= until:
                break
    print(f"{found} found in up to " + ", ".join(f"{counts[name]} of {name}" for name in names))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
