"""What is S3's own: options, credentials, conditions, parts, and what is said when it cannot be used."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from siltstone.errors import CorruptObject, ObjectExists, SiltstoneError, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.open import open_store
from siltstone.store.retry import Retrying
from siltstone.store.s3 import client as s3_client
from siltstone.store.s3 import multipart as s3_multipart
from siltstone.store.s3 import store as s3
from siltstone.store.s3.multipart import PARTS as PARTS_MOST
from siltstone.store.s3.multipart import part_bytes
from siltstone.store.s3.store import S3Store
from tests import servers, store_cases_s3
from tests.servers import S3Server

pytestmark = pytest.mark.server

MIB = 1 << 20
PARTS = "part_bytes=5242880&put_bytes=10485760"
SERVERS = {"s3-moto": servers.moto, "s3-versitygw": servers.versitygw}


class Place:
    """A fresh bucket: `url` opens it, `client` is a plain one to reach behind the store."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.client, self.bucket = store_cases_s3.fresh_bucket(server)

    def url(self, prefix: str = "", *options: str) -> str:
        return f"s3://{self.bucket}/{prefix}?" + "&".join([f"endpoint={self.server.endpoint}", *options])

    def open(self, prefix: str = "", *options: str) -> Retrying:
        store = open_store(self.url(prefix, "wait_s=0.01", *options))
        assert isinstance(store, Retrying)
        return store

    def uploads(self) -> list[dict[str, Any]]:
        return self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])


@pytest.fixture(params=store_cases_s3.factories())
def place(request: pytest.FixtureRequest) -> Place:
    return Place(SERVERS[request.param]())


@pytest.fixture
def moto() -> Place:
    return Place(servers.moto())


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations asked for, in order."""
    asked: list[str] = []
    ask = s3_client.Link.ask

    def noted(link: s3_client.Link, verb: str, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        asked.append(operation)
        return ask(link, verb, what, operation, **parameters)

    monkeypatch.setattr(s3_client.Link, "ask", noted)
    return asked


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, operation: str, times: int, *, after: bool) -> Iterator[None]:
    """`operation` fails so many times for a passing reason: before it is sent, or after, its answer lost."""
    ask = s3_client.Link.ask
    left = [times]

    def flaky(link: s3_client.Link, verb: str, what: str, asked: str, **parameters: Any) -> dict[str, Any]:
        fails = asked == operation and left[0] > 0
        left[0] -= fails
        if fails and not after:
            raise Unreachable("lost", transient=True)
        answer = ask(link, verb, what, asked, **parameters)
        if fails:
            raise Unreachable("lost", transient=True)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(s3_client.Link, "ask", flaky)
        yield
    assert left == [0]


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10 * MIB, 10 * MIB + 1, 15 * MIB, 17_000_001])
def test_large_objects_go_and_come_in_parts(place: Place, requests: list[str], size: int) -> None:
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


def test_a_large_read_range_is_exact(place: Place) -> None:
    data = os.urandom(16 * MIB)
    store = place.open("", PARTS)
    store.put("a", data)
    assert store.read_range("a", 12345, 15 * MIB).to_pybytes() == data[12345 : 12345 + 15 * MIB]
    with pytest.raises(CorruptObject, match=r"a in .* has 16777216 bytes and should have 16777217"):
        store.read_range("a", 1, 16 * MIB)


def test_a_large_object_is_checked_like_a_small_one(place: Place) -> None:
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


def test_an_object_replaced_while_it_is_read_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open("", PARTS)
    stored = store.put("a", os.urandom(16 * MIB))
    other = os.urandom(16 * MIB)
    ask = s3_client.Link.ask

    def replacing(link: s3_client.Link, *names: str, **parameters: Any) -> dict[str, Any]:
        answer = ask(link, *names, **parameters)
        if "IfMatch" not in parameters:
            place.client.put_object(Bucket=place.bucket, Key="a", Body=other)
        return answer

    monkeypatch.setattr(s3_client.Link, "ask", replacing)
    with pytest.raises(CorruptObject, match=r"object a in .* was altered while it was read"):
        store.read(stored)


def test_a_large_put_never_overwrites_and_leaves_no_parts(place: Place) -> None:
    store = place.open("", PARTS)
    stored = store.put("a", b"first")
    with pytest.raises(ObjectExists, match="object a in"):
        store.put("a", os.urandom(11 * MIB))
    with pytest.raises(ObjectExists), store.create("a") as writer:
        writer.write(os.urandom(11 * MIB))
    assert store.read(stored).to_pybytes() == b"first"
    assert place.uploads() == []


def test_a_failed_large_write_leaves_no_parts(place: Place) -> None:
    store = place.open("", PARTS)
    with pytest.raises(KeyError), store.create("a") as writer:
        writer.write(os.urandom(11 * MIB))
        assert len(place.uploads()) == 1
        raise KeyError
    assert place.uploads() == []
    assert list(store.list("")) == []


def test_a_writer_waits_for_its_parts_instead_of_keeping_them(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(40 * MIB)
    begun, go_on = [], Event()
    ask = s3_client.Link.ask

    def held(link: s3_client.Link, verb: str, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "upload_part":
            begun.append(parameters["PartNumber"])
            go_on.wait(10)
        return ask(link, verb, what, operation, **parameters)

    monkeypatch.setattr(s3_client.Link, "ask", held)
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
    place: Place, requests: list[str], monkeypatch: pytest.MonkeyPatch
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


def test_parts_left_over_are_listed_by_prefix_and_discarded(place: Place) -> None:
    begun = [
        place.client.create_multipart_upload(Bucket=place.bucket, Key=key)
        for key in ("p/s/1/a", "p/s/1/a", "p/s/2/b", "q/s/1/c")
    ]
    place.client.upload_part(
        Bucket=place.bucket, Key="p/s/1/a", UploadId=begun[0]["UploadId"], PartNumber=1, Body=b"x" * 1000
    )
    store = place.open("p")
    assert [write.name for write in store.unfinished("s/1/")] == ["s/1/a", "s/1/a"]
    left = list(store.unfinished())
    assert [write.name for write in left] == ["s/1/a", "s/1/a", "s/2/b"]
    assert all(write.began_at.utcoffset() is not None for write in left)
    for _ in range(2):  # what is gone is no error
        store.discard(left)
    assert [upload["Key"] for upload in place.uploads()] == ["q/s/1/c"]


# --- what is tried again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["not sent", "answer lost"])
@pytest.mark.parametrize("operation", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_each_request_of_a_large_put_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, operation: str, after: bool
) -> None:
    data = os.urandom(11 * MIB)
    store = place.open("", PARTS)
    with failing(monkeypatch, operation, 2, after=after):
        stored = store.put("a", data)
    assert store.read(stored).to_pybytes() == data


def test_a_put_whose_answer_was_lost_has_succeeded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    with failing(monkeypatch, "put_object", 2, after=True):
        stored = store.put("a", b"12345")
    with failing(monkeypatch, "put_object", 1, after=True), store.create("b") as writer:
        writer.write(b"67")
    assert store.read(stored).to_pybytes() == b"12345"
    assert writer.stored is not None and store.read(writer.stored).to_pybytes() == b"67"
    with failing(monkeypatch, "put_object", 1, after=False), pytest.raises(ObjectExists):
        store.put("a", b"other")


def test_parts_of_a_read_and_pages_of_a_listing_are_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(16 * MIB)
    store = place.open("", PARTS)
    stored = store.put("a", data)
    with failing(monkeypatch, "get_object", 2, after=True):
        assert store.read(stored).to_pybytes() == data
    with failing(monkeypatch, "list_objects_v2", 2, after=False):
        assert list(store.list("")) == [("a", 16 * MIB)]


def test_a_part_that_keeps_failing_ends_the_put_after_so_many_attempts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open("", PARTS, "attempts=2")
    with (
        failing(monkeypatch, "create_multipart_upload", 2, after=False),
        pytest.raises(Unreachable, match="gave up after 2 attempts"),
    ):
        store.put("a", os.urandom(11 * MIB))
    assert list(store.list("")) == []


# --- listing ---------------------------------------------------------------------------------------------------------


def test_prefixes_of_one_bucket_do_not_see_each_other(place: Place) -> None:
    one, two, root = place.open("w/one"), place.open("w/one2"), place.open()
    stored = one.put("s/a", b"1")
    two.put("s/a", b"2")
    assert list(one.list("")) == [("s/a", 1)]
    assert [name for name, _ in root.list("w/one")] == ["w/one/s/a", "w/one2/s/a"]
    two.delete(["s/a"])
    assert one.read(stored).to_pybytes() == b"1"
    assert list(two.list("")) == []


def test_what_no_store_put_there_is_not_listed(place: Place) -> None:
    for key in ("w/", "w/s/", "w/.hidden", "w/a b", "w/s/a"):
        place.client.put_object(Bucket=place.bucket, Key=key, Body=b"")
    assert list(place.open("w").list("")) == [("s/a", 0)]


def test_more_than_a_page_is_listed_and_deleted(
    place: Place, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = s3_client.Link.ask

    def with_small_pages(link: s3_client.Link, verb: str, what: str, operation: str, **asked: Any) -> dict[str, Any]:
        return ask(link, verb, what, operation, **asked, **({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(s3_client.Link, "ask", with_small_pages)
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


def test_more_than_a_page_of_parts_left_over_is_listed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = s3_client.Link.ask

    def with_small_pages(link: s3_client.Link, verb: str, what: str, operation: str, **asked: Any) -> dict[str, Any]:
        answer = ask(link, verb, what, operation, **asked, MaxUploads=3)
        uploads = answer["Uploads"]
        if len(uploads) > 3:  # moto gives them all at once
            after = [found for found in uploads if found["Key"] > asked.get("KeyMarker", "")]
            answer |= {"Uploads": after[:3], "IsTruncated": len(after) > 3}
        return answer

    keys = ["w/a", "w/b", "w/b", "w/c", "w/d", "w/d", "w/d", "w/e"]
    for key in keys:
        place.client.create_multipart_upload(Bucket=place.bucket, Key=key)
    monkeypatch.setattr(s3_client.Link, "ask", with_small_pages)
    left = list(place.open("w").unfinished())
    assert [f"w/{write.name}" for write in left] == keys
    assert len({write.token for write in left}) == len(keys)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 11 * MIB], ids=["small", "large"])
def test_encryption_and_storage_class_are_sent(moto: Place, size: int) -> None:
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
        ("s3://AKIAME:hunter2@bucket/p", "holds no credentials"),
        ("s3://hunter2@bucket/p", "holds no credentials"),
        ("s3:///p", "names no bucket"),
        ("s3://b/p", "names no bucket"),
        ("s3://bucket/../p", "not an object name"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_without_showing_secrets(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value) and "AKIAME" not in str(caught.value)


def test_an_endpoint_of_the_environment_is_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.server.endpoint.replace("127.0.0.1", "localhost"))
    store = open_store(f"s3://{place.bucket}/p")
    stored = store.put("a", b"1")
    assert place.client.head_object(Bucket=place.bucket, Key="p/a")["ContentLength"] == 1
    assert store.label == f"s3://{place.bucket}/p" and "localhost" not in repr(store)
    assert store.read(stored).to_pybytes() == b"1"


# --- what cannot be used ---------------------------------------------------------------------------------------------


def test_a_check_changes_nothing(place: Place) -> None:
    place.open("p").check(writable=True)
    assert place.uploads() == []
    assert place.client.list_objects_v2(Bucket=place.bucket)["KeyCount"] == 0


def test_a_missing_bucket_is_named(place: Place) -> None:
    store = open_store(place.url().replace(place.bucket, "no-such-bucket"))
    for use in (lambda: store.check(writable=False), lambda: store.put("a", b"1"), lambda: list(store.list(""))):
        with pytest.raises(UsageError, match=r"bucket no-such-bucket at http.* is not there: make it, or check"):
            use()


if "s3-versitygw" in store_cases_s3.factories():  # moto checks no signature

    @pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_wrong_credentials_are_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
        place = Place(servers.versitygw())
        monkeypatch.setenv(wrong, "hunter2hunter2")
        store = place.open("", PARTS)
        stored = StoredObject("a", 1, "00" * 16)
        for use in (
            lambda: store.check(writable=True),
            lambda: store.put("a", b"1"),
            lambda: store.put("a", bytes(11 * MIB)),
            lambda: store.read(stored),
            lambda: store.read_range("a", 0, 1),
            lambda: list(store.list("")),
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(Unreachable, match=r"refuses the credentials .*check AWS_PROFILE") as caught:
                use()
            assert not caught.value.transient
            assert "hunter2" not in str(caught.value) and servers.ACCESS_KEY not in str(caught.value)
        monkeypatch.undo()
        assert list(place.open().list("")) == []


ANSWERS = [
    (403, "InvalidAccessKeyId", False, "refuses the credentials .InvalidAccessKeyId.: check AWS_PROFILE"),
    (403, "AccessDenied", False, "refuses the credentials .AccessDenied.: check AWS_PROFILE"),
    (403, "RequestTimeTooSkewed", False, "answers 403 RequestTimeTooSkewed; set this machine's clock"),
    (400, "ExpiredToken", False, "refuses the credentials"),
    (400, "AuthorizationHeaderMalformed", False, "the bucket is in another region"),
    (400, "RequestTimeout", True, "answers 400 RequestTimeout; it may pass"),
    (409, "ConditionalRequestConflict", True, "answers 409 ConditionalRequestConflict; it may pass"),
    (429, "TooManyRequests", True, "answers 429"),
    (500, "InternalError", True, "answers 500 InternalError"),
    (501, "NotImplemented", False, "lacks what this needs: conditional writes"),
    (503, "SlowDown", True, "answers 503 SlowDown; it may pass"),
    (507, "InsufficientStorage", False, "answers 507"),
]


class Refusal(BaseHTTPRequestHandler):
    """Answers a request for `/bucket/<status>/<code>/...` with just that, and counts the attempts."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str | None]] = []

    def do_PUT(self) -> None:
        _, _, status, code, *_ = self.path.split("/")
        self.asked.append(self.headers["If-None-Match"])
        self.rfile.read(int(self.headers["Content-Length"]))
        body = f"<Error><Code>{code}</Code><Message>hunter2</Message></Error>".encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """The endpoint of a server that refuses everything."""
    servers.use_test_credentials()
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("status", "code", "passing", "says"), ANSWERS, ids=[answer[1] for answer in ANSWERS])
def test_what_a_server_refuses_is_said_and_tried_again_only_if_it_may_pass(
    refusing: str, status: int, code: str, passing: bool, says: str
) -> None:
    Refusal.asked.clear()
    place = f"s3://bucket/{status}/{code}"
    store = open_store(f"{place}?endpoint={refusing}&attempts=3&wait_s=0.001&connect_timeout_s=1&timeout_s=5")
    with pytest.raises(Unreachable, match=f"^cannot write object a in {place}: {refusing}.*{says}") as caught:
        store.put("a", b"1")
    assert caught.value.transient == passing
    assert "hunter2" not in str(caught.value)
    assert Refusal.asked == ["*"] * (3 if passing else 1)


def test_missing_credentials_are_asked_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Unreachable, match="no credentials were found; set AWS_PROFILE") as caught:
        place.open().check(writable=False)
    assert not caught.value.transient


def test_an_unknown_profile_is_named(place: Place) -> None:
    with pytest.raises(UsageError, match=r"no AWS profile 'nobody'; check \?profile="):
        place.open("", "profile=nobody").check(writable=False)


def test_a_profile_gives_the_credentials(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("aws") / "credentials"
    secret = f"aws_access_key_id={servers.ACCESS_KEY}\naws_secret_access_key={servers.SECRET_KEY}\n"
    file.write_text(f"[tests]\n{secret}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    place.open("", "profile=tests").check(writable=True)


def test_a_server_that_is_not_there_is_named_in_time() -> None:
    endpoint = f"http://127.0.0.1:{servers.free_port()}"
    servers.use_test_credentials()
    store = open_store(f"s3://bucket/p?endpoint={endpoint}&attempts=2&wait_s=0.01&connect_timeout_s=1&timeout_s=1")
    with pytest.raises(Unreachable, match=f"cannot use s3://bucket/p: {endpoint} cannot be reached") as caught:
        store.check(writable=True)
    assert caught.value.transient
    with pytest.raises(SiltstoneError, match=endpoint):
        store.put("a", b"1")


def test_another_kind_of_server_is_named() -> None:
    place = Place(servers.moto())
    store = open_store(f"s3://{place.bucket}?endpoint={place.server.endpoint}/moto-api")
    with pytest.raises(SiltstoneError, match=place.server.endpoint):
        store.check(writable=False)


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_forked_child_can_use_the_store(place: Place) -> None:
    store = place.open("", PARTS)
    large = store.put("large", os.urandom(11 * MIB))  # connections and threads are there to be inherited
    child = os.fork()
    if child == 0:
        try:
            whole = store.read(large).size == large.bytes and store.put("child", bytes(11 * MIB)).bytes == 11 * MIB
            os._exit(0 if whole else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read(large).size == large.bytes
    assert [name for name, _ in store.list("")] == ["child", "large"]


def test_stores_of_one_process_share_connections(place: Place) -> None:
    stores = [place.open("one", PARTS).once, place.open("two", PARTS).once]
    first, second = [s3_client.link(store.options, store.label) for store in stores if isinstance(store, S3Store)]
    assert first is second
