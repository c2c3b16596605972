"""S3: large objects go and come in parts."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.s3 import client as s3_client
from siltstone.store.s3 import multipart as s3_multipart
from siltstone.store.s3 import store as s3
from siltstone.store.s3.multipart import PARTS as PARTS_MOST
from siltstone.store.s3.multipart import part_bytes
from tests.s3_place import MIB, PARTS, FreshBucket

pytestmark = pytest.mark.server


@pytest.mark.parametrize("size", [10 * MIB, 10 * MIB + 1, 15 * MIB, 17_000_001])
def test_large_objects_go_and_come_in_parts(place: FreshBucket, requests: list[str], size: int) -> None:
    data = os.urandom(size)
    store = place.open("p", PARTS)
    put = store.put("a/whole", data)
    with store.create("a/pieces") as writer:
        for start in range(0, size, 3_000_000):
            writer.write(memoryview(data)[start : start + 3_000_000])
    pieces = StoredObject("a/pieces", size, put.checksum)
    assert writer.stored == pieces
    for stored in (put, pieces):
        assert store.read(stored).equals(store.read_range(stored.name, 0, size))
        assert store.read(stored).to_pybytes() == data
    parts = -(-size // (5 * MIB))
    assert requests.count("upload_part") == (parts if size <= 10 * MIB else 2 * parts)
    assert requests.count("get_object") == 6 * (1 if size <= 10 * MIB else parts)  # each part once
    assert place.uploads() == []


def test_a_large_read_range_is_exact(place: FreshBucket) -> None:
    data = os.urandom(16 * MIB)
    store = place.open("", PARTS)
    store.put("a", data)
    assert store.read_range("a", 12345, 15 * MIB).to_pybytes() == data[12345 : 12345 + 15 * MIB]
    with pytest.raises(CorruptObject, match=r"a in .* has 16777216 bytes and should have 16777217"):
        store.read_range("a", 1, 16 * MIB)


def test_a_large_object_is_checked_like_a_small_one(place: FreshBucket) -> None:
    data = bytearray(os.urandom(16 * MIB))
    store = place.open("", PARTS)
    stored = store.put("a", bytes(data))
    data[-1] ^= 1
    place.client.put_object(Bucket=place.bucket, Key="a", Body=bytes(data))
    with pytest.raises(CorruptObject, match=r"a .*checksum"):
        store.read(stored)
    place.client.put_object(Bucket=place.bucket, Key="a", Body=bytes(data[:-1]))
    with pytest.raises(CorruptObject, match="16777215 bytes instead of 16777216"):
        store.read(stored)
    place.client.put_object(Bucket=place.bucket, Key="a", Body=b"")
    with pytest.raises(CorruptObject):
        store.read(stored)
    place.client.delete_object(Bucket=place.bucket, Key="a")
    with pytest.raises(CorruptObject, match=r"a .*missing"):
        store.read(stored)


def test_an_object_replaced_while_it_is_read_is_noticed(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open("", PARTS)
    stored = store.put("a", os.urandom(16 * MIB))
    other = os.urandom(16 * MIB)
    ask = s3_client.S3Link.ask

    def replacing(link: s3_client.S3Link, *names: str, **parameters: Any) -> dict[str, Any]:
        answer = ask(link, *names, **parameters)
        if "IfMatch" not in parameters:
            place.client.put_object(Bucket=place.bucket, Key="a", Body=other)
        return answer

    monkeypatch.setattr(s3_client.S3Link, "ask", replacing)
    with pytest.raises(CorruptObject, match=r"object a in .* was altered while it was read"):
        store.read(stored)


def test_a_large_put_never_overwrites_and_leaves_no_parts(place: FreshBucket) -> None:
    store = place.open("", PARTS)
    stored = store.put("a", b"first")
    with pytest.raises(ObjectExists, match="object a in"):
        store.put("a", os.urandom(11 * MIB))
    with pytest.raises(ObjectExists), store.create("a") as writer:
        writer.write(os.urandom(11 * MIB))
    assert store.read(stored).to_pybytes() == b"first"
    assert place.uploads() == []


def test_a_failed_large_write_leaves_no_parts(place: FreshBucket) -> None:
    store = place.open("", PARTS)
    with pytest.raises(KeyError), store.create("a") as writer:
        writer.write(os.urandom(11 * MIB))
        assert len(place.uploads()) == 1
        raise KeyError
    assert place.uploads() == []
    assert list(store.list("")) == []


def test_a_writer_waits_for_its_parts_instead_of_keeping_them(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(40 * MIB)
    begun, go_on = [], Event()
    ask = s3_client.S3Link.ask

    def held(link: s3_client.S3Link, verb: str, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "upload_part":
            begun.append(parameters["PartNumber"])
            go_on.wait(10)
        return ask(link, verb, what, operation, **parameters)

    monkeypatch.setattr(s3_client.S3Link, "ask", held)
    store = place.open("", PARTS)

    def write() -> StoredObject | None:
        with store.create("a") as writer:
            writer.write(data)
            begun.append(0)
        return writer.stored

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            while len(begun) < 4 and not writing.done():
                time.sleep(0.005)
            time.sleep(0.1)
            assert sorted(begun) == [1, 2, 3, 4]
        finally:
            go_on.set()
        stored = writing.result()
    assert stored is not None and store.read(stored).to_pybytes() == data


def test_a_large_object_has_no_more_parts_than_s3_takes(
    place: FreshBucket, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(part_bytes(8 * MIB, part) for part in range(PARTS_MOST)) > 400_000 * MIB
    monkeypatch.setattr(s3, "PARTS", 2)
    monkeypatch.setattr(s3_multipart, "PARTS", 2)
    store = place.open("", PARTS)
    stored = store.put("a", os.urandom(16 * MIB))
    assert requests.count("upload_part") == 2
    assert store.read(stored).size == 16 * MIB
    refused = pytest.raises(Unreachable, match=r"b in .* more than 2 parts; raise the option part_bytes")
    with refused, store.create("b") as writer:
        writer.write(os.urandom(16 * MIB))
    assert place.uploads() == []
    assert [name for name, _ in store.list("")] == ["a"]


def test_parts_left_over_are_listed_by_prefix_and_discarded(place: FreshBucket) -> None:
    begun = [
        place.client.create_multipart_upload(Bucket=place.bucket, Key=key)
        for key in ("p/s/1/a", "p/s/1/a", "p/s/2/b", "q/s/1/c")
    ]
    place.client.upload_part(
        Bucket=place.bucket, Key="p/s/1/a", UploadId=begun[0]["UploadId"], PartNumber=1, Body=b"x" * 1000
    )
    store = place.open("p")
    assert [write.name for write in store.list_unfinished("s/1/")] == ["s/1/a", "s/1/a"]
    left = list(store.list_unfinished())
    assert [write.name for write in left] == ["s/1/a", "s/1/a", "s/2/b"]
    assert all(write.began_at.utcoffset() is not None for write in left)
    for _ in range(2):  # what is gone is no error
        store.discard(left)
    assert [upload["Key"] for upload in place.uploads()] == ["q/s/1/c"]
