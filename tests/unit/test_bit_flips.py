"""Every bit of every kind of object, flipped, through every reader: the answer is right, or an error says what is
damaged. Never another answer, another error, or the end of the process.

`make test-thorough` flips all of them; in `make test` each reader sees a seventh, another one than the reader
before, and one reader sees a seventh of the bits, so some of every byte.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from siltstone.errors import CorruptObject, ProofFailed
from siltstone.format.manifests import read_manifest
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import is_base
from tests.examples import stride
from tests.store_reads import counted_reads
from tests.tiny_stream import LAST, NAME, Reader, Stored, readers, written


@pytest.fixture(scope="module", params=["packed", "apart"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """`apart`: NON, INCR and INDEX are objects of their own, as in key-value stores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilesystemStore, "ranged", request.param == "packed")
        with written(str(tmp_path_factory.mktemp("flips") / "w")) as found:
            yield found


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file, for a while."""
    file = os.open(path, os.O_RDWR)
    try:
        octet = os.pread(file, 1, bit // 8)
        os.pwrite(file, bytes([octet[0] ^ 1 << bit % 8]), bit // 8)
        yield
        os.pwrite(file, octet, bit // 8)
    finally:
        os.close(file)


def check_bits(path: Path, reader: Reader, bits: Sequence[int]) -> int:
    """How many flips were noticed; the answer was right with all others."""
    expected, noticed = reader(), 0
    for bit in bits:
        with flipped(path, bit):
            try:
                assert reader() == expected, f"bit {bit}: a wrong answer"
            except (CorruptObject, ProofFailed) as error:
                assert path.name in str(error), error
                noticed += 1
    assert reader() == expected
    return noticed


EVERY_BIT = (1, "data source: columns")
"""the checkpoint and the reader that see every bit, of a base that is read in parts, or each seventh, so some of every
byte; each of the others sees each byte with one bit flipped, among them every bit"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, LAST])
def test_every_bit_of_what_a_checkpoint_reads(stored: Stored, at: int, tmp_path: Path) -> None:
    objects = {h.object for m in stored.manifests(at).values() for h in m.handles}
    if stored.packed:
        objects |= {o.name for o in stored.snapshot if at == LAST}
    else:  # bases and snapshots are the same, packed or not
        objects = {name for name in objects if not is_base(name)}
    noticed_by: dict[str, int] = {}
    for nth, (what, reader) in enumerate(readers(stored, at, tmp_path / "out").items()):
        with counted_reads() as reads:
            reader()
        for name in sorted(objects & reads.names):
            path = stored.path(name)
            size = path.stat().st_size
            seen = range(nth % stride(), size, stride())
            every = range(0, size * 8, stride()) if (at, what) == EVERY_BIT else [8 * i + (i + nth) % 8 for i in seen]
            noticed = check_bits(path, reader, every)
            noticed_by[name] = noticed_by.get(name, 0) + noticed
            if is_base(name):
                assert noticed == len(every), f"{what} reads all of {name}"
    assert noticed_by and all(noticed_by.values()), noticed_by


@pytest.mark.slow
def test_every_bit_of_a_manifest(stored: Stored) -> None:
    place, store = stored.place, stored.place.warehouse.store
    for nth, manifest in enumerate(place.catalog.chains.list_manifests(NAME, LAST)):

        def read(manifest: Any = manifest) -> object:
            read_manifest(store, manifest)
            return None

        path = stored.path(manifest.name)
        bits = range(nth % stride(), path.stat().st_size * 8, stride())
        assert check_bits(path, read, bits) == len(bits)
