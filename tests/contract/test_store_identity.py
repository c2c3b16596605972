"""The identity of a warehouse lies in every kind of store alike: written once, checked, and no part of a stream."""

import pytest

from siltstone.errors import CorruptObject, NewerFormat, ObjectExists
from siltstone.store.identity import encode_identity, read_identity, write_identity
from siltstone.store.paths import IDENTITY, epoch_mark, epoch_marks, is_built_here
from tests.servers import marked
from tests.store_cases import FACTORIES, Case

FIRST, SECOND = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture(params=marked(FACTORIES))
def case(request: pytest.FixtureRequest, tmp_path: object) -> Case:
    return FACTORIES[request.param](tmp_path)  # type: ignore[arg-type]


def test_it_is_written_once(case: Case) -> None:
    assert read_identity(case.open()) is None
    assert write_identity(case.open(), FIRST) == FIRST
    assert write_identity(case.open(), FIRST) == FIRST
    assert write_identity(case.open(), SECOND) == FIRST == read_identity(case.open())


def test_it_is_no_part_of_a_stream_and_no_orphan(case: Case) -> None:
    store = case.open()
    write_identity(store, FIRST)
    store.put("warehouse/00000001/000000000001/manifest.arrow", b"of a stream that is called warehouse")
    assert [name for name, _ in store.list("warehouse/")] == ["warehouse/00000001/000000000001/manifest.arrow"]
    assert [name for name, _ in store.list("")] == [IDENTITY, "warehouse/00000001/000000000001/manifest.arrow"]
    assert not is_built_here(IDENTITY) and list(store.list_unfinished()) == []


def test_every_flipped_byte_is_seen(case: Case) -> None:
    store, good = case.open(), encode_identity(FIRST)
    for place in range(0, len(good), 7):
        store.delete([IDENTITY])
        store.put(IDENTITY, good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises((CorruptObject, NewerFormat)):
            read_identity(store)
    store.delete([IDENTITY])
    store.put(IDENTITY, good[:-1])
    with pytest.raises(CorruptObject, match="is damaged"):
        read_identity(store)


def test_one_of_a_newer_siltstone_is_no_damage(case: Case) -> None:
    case.open().put(IDENTITY, encode_identity(FIRST).replace(b" 1 ", b" 2 ") + b"and more")
    with pytest.raises(NewerFormat, match="upgrade siltstone"):
        read_identity(case.open())


def test_epoch_marks_are_listed_by_stream_and_are_no_part_of_one(case: Case) -> None:
    store = case.open()
    for stream, epoch in (("a", 1), ("a", 12), ("a-b", 3)):
        store.put(epoch_mark(stream, epoch), b"marked")
    assert [name for name, _ in store.list(epoch_marks("a"))] == [epoch_mark("a", 1), epoch_mark("a", 12)]
    assert list(store.list("a/")) == []
    with pytest.raises(ObjectExists):
        store.put(epoch_mark("a", 12), b"by another")
    store.delete([epoch_mark("a", 1)])
    assert [name for name, _ in store.list(epoch_marks("a"))] == [epoch_mark("a", 12)]
    assert not is_built_here(epoch_mark("a", 12))
