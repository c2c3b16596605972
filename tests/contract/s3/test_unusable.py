"""S3: buckets, servers and credentials that cannot be used, and processes that share a store."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from siltstone.errors import SiltstoneError, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.open import open_store
from siltstone.store.s3 import client as s3_client
from siltstone.store.s3.store import S3Store
from tests import servers, store_cases_s3
from tests.s3_place import MIB, PARTS, FreshBucket

pytestmark = pytest.mark.server

# --- what cannot be used ---------------------------------------------------------------------------------------------


def test_a_check_changes_nothing(place: FreshBucket) -> None:
    place.open("p").check(writable=True)
    assert place.uploads() == []
    assert place.client.list_objects_v2(Bucket=place.bucket)["KeyCount"] == 0


def test_a_missing_bucket_is_named(place: FreshBucket) -> None:
    store = open_store(place.url().replace(place.bucket, "no-such-bucket"))
    for use in (lambda: store.check(writable=False), lambda: store.put("a", b"1"), lambda: list(store.list(""))):
        with pytest.raises(UsageError, match=r"bucket no-such-bucket at http.* does not exist: make it, or check"):
            use()


if "s3-versitygw" in store_cases_s3.factories():  # moto checks no signature

    @pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_wrong_credentials_are_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
        place = FreshBucket(servers.versitygw())
        monkeypatch.setenv(wrong, "hunter2hunter2")
        store = place.open("", PARTS)
        stored = StoredObject("a", 1, "xxh3-128:" + "00" * 16)
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
    (403, "InvalidAccessKeyId", False, "refuses the credentials .InvalidAccessKeyId.; check AWS_PROFILE"),
    (403, "AccessDenied", False, "refuses the credentials .AccessDenied.; check AWS_PROFILE"),
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


def test_missing_credentials_are_asked_for(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Unreachable, match="no credentials were found; set AWS_PROFILE") as caught:
        place.open().check(writable=False)
    assert not caught.value.transient


def test_an_unknown_profile_is_named(place: FreshBucket) -> None:
    with pytest.raises(UsageError, match=r"AWS profile 'nobody' does not exist; check \?profile="):
        place.open("", "profile=nobody").check(writable=False)


def test_a_profile_gives_the_credentials(
    place: FreshBucket, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
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
    place = FreshBucket(servers.moto())
    store = open_store(f"s3://{place.bucket}?endpoint={place.server.endpoint}/moto-api")
    with pytest.raises(SiltstoneError, match=place.server.endpoint):
        store.check(writable=False)


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_forked_child_can_use_the_store(place: FreshBucket) -> None:
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


def test_stores_of_one_process_share_connections(place: FreshBucket) -> None:
    stores = [place.open("one", PARTS).once, place.open("two", PARTS).once]
    first, second = [s3_client.link(store.options, store.label) for store in stores if isinstance(store, S3Store)]
    assert first is second
