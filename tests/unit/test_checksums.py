"""Checksums say by which algorithm they are, and each is verified by its own, whatever a warehouse writes."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import xxhash

from siltstone.errors import CorruptObject, UsageError
from siltstone.model import StoredObject
from siltstone.store.checksums import Algorithm, Checksum, algorithm_of, checksum_of, pack, unpack, verify
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.open import Warehouse, open_store
from siltstone.store.ranged import create_ranged

DATA = b"what was written"
ALGORITHMS = get_args(Algorithm)
TEXTS = {
    "sha-256": f"sha-256:{hashlib.sha256(DATA).hexdigest()}",
    "blake2b-256": f"blake2b-256:{hashlib.blake2b(DATA, digest_size=32).hexdigest()}",
    "xxh3-128": f"xxh3-128:{xxhash.xxh3_128_hexdigest(DATA)}",
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checksum_is_what_any_other_program_computes(algorithm: str) -> None:
    text = checksum_of(DATA, algorithm)
    assert text == TEXTS[algorithm] and algorithm_of(text) == algorithm and unpack(pack(text)) == text
    verify(DATA, text, "x")
    with pytest.raises(CorruptObject, match="x was altered: its checksum is not"):
        verify(DATA + b".", text, "x")


@pytest.mark.parametrize("text", ["", "ab", "ab" * 16, "md5:" + "ab" * 16, "sha-256:" + "ab" * 16])
def test_what_is_no_checksum_verifies_nothing(text: str) -> None:
    with pytest.raises(CorruptObject, match=r"x cannot be verified: .* is not a checksum"):
        verify(DATA, text, "x")


@pytest.mark.parametrize("writes", ALGORITHMS)
def test_every_store_verifies_what_another_algorithm_wrote(tmp_path: Path, writes: str) -> None:
    writer = open_store(f"{tmp_path.as_uri()}?checksums={writes}")
    stored = writer.put("s/1/a", DATA)
    assert stored.checksum == TEXTS[writes] and open_store(writer.url).put("s/1/b", DATA).checksum == TEXTS[writes]
    for reads in ALGORITHMS:
        store = open_store(f"{tmp_path}?checksums={reads}")
        assert store.read(stored).to_pybytes() == DATA
        (tmp_path / "s/1/c").unlink(missing_ok=True)
        assert store.put("s/1/c", DATA).checksum == TEXTS[reads]
        with pytest.raises(CorruptObject, match=r"object s/1/a .* was altered"):
            store.read(StoredObject("s/1/a", len(DATA), checksum_of(b"something else..", writes)))


def test_the_ranges_of_a_base_are_as_strong_as_its_checksum(tmp_path: Path) -> None:
    for algorithm in ALGORITHMS:
        with create_ranged(FilesystemStore(tmp_path, algorithm), f"s/1/{algorithm}") as out:
            out.write(DATA)
        assert out.stored is not None and out.stored.ranges is not None
        assert out.stored.ranges.algorithm == algorithm


@pytest.mark.parametrize("url", ["{}", "file://{}", "rocksdb://{}", "s3://bucket/p", "redis://localhost"])
def test_the_option_is_of_the_warehouse_and_moves_nothing(tmp_path: Path, url: str) -> None:
    """Working state and the catalog stay where they are when other checksums are chosen."""
    plain = url.format(tmp_path)
    chosen = Warehouse.at(f"{plain}?checksums=blake2b-256")
    assert Warehouse.at(plain).store.checksums == "sha-256" and chosen.store.checksums == "blake2b-256"
    assert Warehouse.at(chosen.url).store.checksums == open_store(chosen.store_url).checksums == "blake2b-256"
    assert chosen.local == Warehouse.at(plain).local and chosen.catalog_url == Warehouse.at(plain).catalog_url
    assert chosen.label == Warehouse.at(plain).label
    with pytest.raises(UsageError, match="sha-256"):
        Warehouse.at(f"{plain}?checksums=md5")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("threads", [True, False])
def test_large_pieces_are_hashed_beside_in_their_order(
    algorithm: str, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not threads:

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    pieces = [bytes([n]) * size for n, size in enumerate((5, 1 << 21, 3, 1 << 20, (1 << 20) - 1, 0, 1 << 22))]
    found = Checksum(algorithm)
    for n, piece in enumerate(pieces):
        (found.update if n % 3 == 2 else found.update_beside)(piece)
    assert found.text() == found.text() == checksum_of(b"".join(pieces), algorithm)
