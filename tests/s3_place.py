"""A fresh bucket of an S3 server, and requests to it that fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from siltstone.errors import Unreachable
from siltstone.store.open import open_store
from siltstone.store.retry import Retrying
from siltstone.store.s3 import client as s3_client
from tests import servers, store_cases_s3
from tests.servers import S3Server

MIB = 1 << 20
PARTS = "part_bytes=5242880&put_bytes=10485760"
SERVERS = {"s3-moto": servers.moto, "s3-versitygw": servers.versitygw}


class FreshBucket:
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


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, operation: str, times: int, *, after: bool) -> Iterator[None]:
    """`operation` fails so many times for a passing reason: before it is sent, or after, its answer lost."""
    ask = s3_client.S3Link.ask
    left = [times]

    def flaky(link: s3_client.S3Link, verb: str, what: str, asked: str, **parameters: Any) -> dict[str, Any]:
        fails = asked == operation and left[0] > 0
        left[0] -= fails
        if fails and not after:
            raise Unreachable("lost", transient=True)
        answer = ask(link, verb, what, asked, **parameters)
        if fails:
            raise Unreachable("lost", transient=True)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(s3_client.S3Link, "ask", flaky)
        yield
    assert left == [0]
