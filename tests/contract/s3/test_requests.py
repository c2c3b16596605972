"""S3: what is tried again, listings, and options."""

import os
import time
from typing import Any

import pytest

from siltstone.changelog.streamed_upload import HELD_BYTES
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.errors import ObjectExists, Unreachable, UsageError
from siltstone.store.open import open_store
from siltstone.store.ranged import create_ranged
from siltstone.store.s3 import client as s3_client
from siltstone.store.s3 import store as s3
from tests.s3_place import MIB, PARTS, FreshBucket, failing

pytestmark = pytest.mark.server

# --- what is tried again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["not sent", "answer lost"])
@pytest.mark.parametrize("operation", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_each_request_of_a_large_put_is_tried_again(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch, operation: str, after: bool
) -> None:
    data = os.urandom(11 * MIB)
    store = place.open("", PARTS)
    with failing(monkeypatch, operation, 2, after=after):
        stored = store.put("a", data)
    assert store.read(stored).to_pybytes() == data


def test_a_put_whose_answer_was_lost_has_succeeded(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    with failing(monkeypatch, "put_object", 2, after=True):
        stored = store.put("a", b"12345")
    with failing(monkeypatch, "put_object", 1, after=True), store.create("b") as writer:
        writer.write(b"67")
    assert store.read(stored).to_pybytes() == b"12345"
    assert writer.stored is not None and store.read(writer.stored).to_pybytes() == b"67"
    with failing(monkeypatch, "put_object", 1, after=False), pytest.raises(ObjectExists):
        store.put("a", b"other")


def test_parts_of_a_read_and_pages_of_a_listing_are_tried_again(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(16 * MIB)
    store = place.open("", PARTS)
    stored = store.put("a", data)
    with failing(monkeypatch, "get_object", 2, after=True):
        assert store.read(stored).to_pybytes() == data
    with failing(monkeypatch, "list_objects_v2", 2, after=False):
        assert list(store.list("")) == [("a", 16 * MIB)]


def test_a_part_that_keeps_failing_ends_the_put_after_so_many_attempts(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open("", PARTS, "attempts=2")
    with (
        failing(monkeypatch, "create_multipart_upload", 2, after=False),
        pytest.raises(Unreachable, match="gave up after 2 attempts"),
    ):
        store.put("a", os.urandom(11 * MIB))
    assert list(store.list("")) == []


# --- uploads of a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_each_request_of_a_base_is_tried_again_for_longer_than_other_calls(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    data = os.urandom(HELD_BYTES + 4 * MIB)
    with Uploader(place.open("", PARTS, "attempts=2"), UploadOptions(hedging=False)) as uploader:
        with failing(monkeypatch, operation, 6, after=False), create_ranged(uploader, "base") as out:
            out.write(data)
        taken = uploader.metrics.take()
        with failing(monkeypatch, "put_object", 6, after=False):
            manifest = uploader.put("manifest", b"small")
        small = uploader.metrics.take()
        with failing(monkeypatch, operation, 6, after=False):
            whole = uploader.put("whole", data)  # one request for its caller, parts for S3
    assert out.stored is not None
    for stored, wanted in [(out.stored, data), (manifest, b"small"), (whole, data)]:
        assert uploader.store.read(stored).to_pybytes() == wanted
    assert (taken.requests, taken.attempts, taken.retries, taken.objects) == (1, 7, 6, 1)
    assert (small.requests, small.attempts, small.retries, small.objects) == (1, 7, 6, 1)


def test_a_base_that_is_given_up_leaves_no_parts(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    options = UploadOptions(checkpoint_timeout_s=0.5)
    with Uploader(place.open("", PARTS, "attempts=2"), options) as uploader, monkeypatch.context() as patch:
        ask = s3_client.S3Link.ask

        def without_parts(link: s3_client.S3Link, verb: str, what: str, operation: str, **asked: Any) -> dict[str, Any]:
            if operation == "upload_part":
                raise Unreachable("no parts today", transient=True)
            return ask(link, verb, what, operation, **asked)

        patch.setattr(s3_client.S3Link, "ask", without_parts)
        with pytest.raises(Unreachable, match=r"raise upload\.check"), create_ranged(uploader, "base") as out:
            out.write(os.urandom(HELD_BYTES + 12 * MIB))
        assert uploader.metrics.take().failures == 1
    # Who gave it up does not wait longer than its timeout until the store has discarded the parts.
    until_s = time.monotonic() + 20
    while place.uploads() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert place.uploads() == [] and list(uploader.store.list("")) == []


# --- listing ---------------------------------------------------------------------------------------------------------


def test_prefixes_of_one_bucket_do_not_see_each_other(place: FreshBucket) -> None:
    one, two, root = place.open("w/one"), place.open("w/one2"), place.open()
    stored = one.put("s/a", b"1")
    two.put("s/a", b"2")
    assert list(one.list("")) == [("s/a", 1)]
    assert [name for name, _ in root.list("w/one")] == ["w/one/s/a", "w/one2/s/a"]
    two.delete(["s/a"])
    assert one.read(stored).to_pybytes() == b"1"
    assert list(two.list("")) == []


def test_what_no_store_put_there_is_not_listed(place: FreshBucket) -> None:
    for key in ("w/", "w/s/", "w/.hidden", "w/a b", "w/s/a"):
        place.client.put_object(Bucket=place.bucket, Key=key, Body=b"")
    assert list(place.open("w").list("")) == [("s/a", 0)]


def test_more_than_a_page_is_listed_and_deleted(
    place: FreshBucket, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = s3_client.S3Link.ask

    def with_small_pages(link: s3_client.S3Link, verb: str, what: str, operation: str, **asked: Any) -> dict[str, Any]:
        return ask(link, verb, what, operation, **asked, **({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(s3_client.S3Link, "ask", with_small_pages)
    monkeypatch.setattr(s3, "_DELETED_AT_ONCE", 3)
    store = place.open("w")
    names = [f"s/{i}" for i in range(7)]
    for name in names:
        store.put(name, b"x")
    assert [name for name, _ in store.list("")] == names
    store.delete(names)
    assert list(store.list("")) == []
    assert requests.count("list_objects_v2") == 4
    assert requests.count("delete_objects") == 3


def test_more_than_a_page_of_parts_left_over_is_listed(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = s3_client.S3Link.ask

    def with_small_pages(link: s3_client.S3Link, verb: str, what: str, operation: str, **asked: Any) -> dict[str, Any]:
        answer = ask(link, verb, what, operation, **asked, MaxUploads=3)
        uploads = answer["Uploads"]
        if len(uploads) > 3:  # moto gives them all at once
            after = [found for found in uploads if found["Key"] > asked.get("KeyMarker", "")]
            answer |= {"Uploads": after[:3], "IsTruncated": len(after) > 3}
        return answer

    keys = ["w/a", "w/b", "w/b", "w/c", "w/d", "w/d", "w/d", "w/e"]
    for key in keys:
        place.client.create_multipart_upload(Bucket=place.bucket, Key=key)
    monkeypatch.setattr(s3_client.S3Link, "ask", with_small_pages)
    left = list(place.open("w").list_unfinished())
    assert [f"w/{write.name}" for write in left] == keys
    assert len({write.token for write in left}) == len(keys)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 11 * MIB], ids=["small", "large"])
def test_encryption_and_storage_class_are_sent(moto: FreshBucket, size: int) -> None:
    key = "12345678-1234-1234-1234-123456789012"
    options = ("sse=aws:kms", f"kms_key={key}", "storage_class=STANDARD_IA")
    stored = moto.open("", PARTS, *options).put("a", b"x" * size)
    found = moto.client.head_object(Bucket=moto.bucket, Key="a")
    assert found["ServerSideEncryption"] == "aws:kms" and key in found["SSEKMSKeyId"]
    assert found["StorageClass"] == "STANDARD_IA"
    assert found["Metadata"]["siltstone-checksum"] == stored.checksum
    moto.open("", PARTS, "sse=AES256").put("b", b"x" * size)
    assert moto.client.head_object(Bucket=moto.bucket, Key="b")["ServerSideEncryption"] == "AES256"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/p?colour=red", "no option 'colour'.*endpoint.*storage_class"),
        ("s3://bucket?part_bytes=1000", "option part_bytes"),
        ("s3://bucket?endpoint=http://me:hunter2@host", "option endpoint.*without credentials"),
        ("s3://bucket?endpoint=host:1", "option endpoint"),
        ("s3://AKIAME:hunter2@bucket/p", "has no credentials"),
        ("s3://hunter2@bucket/p", "has no credentials"),
        ("s3:///p", "names no bucket"),
        ("s3://b/p", "names no bucket"),
        ("s3://bucket/../p", "not an object name"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_without_showing_secrets(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value) and "AKIAME" not in str(caught.value)


def test_an_endpoint_of_the_environment_is_used(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.server.endpoint.replace("127.0.0.1", "localhost"))
    store = open_store(f"s3://{place.bucket}/p")
    stored = store.put("a", b"1")
    assert place.client.head_object(Bucket=place.bucket, Key="p/a")["ContentLength"] == 1
    assert store.label == f"s3://{place.bucket}/p" and "localhost" not in repr(store)
    assert store.read(stored).to_pybytes() == b"1"
