"""Buckets of each S3 server, and the operations asked for."""

from typing import Any

import pytest

from siltstone.store.s3 import client as s3_client
from tests import servers, store_cases_s3
from tests.s3_place import SERVERS, FreshBucket


@pytest.fixture(params=store_cases_s3.factories())
def place(request: pytest.FixtureRequest) -> FreshBucket:
    return FreshBucket(SERVERS[request.param]())


@pytest.fixture
def moto() -> FreshBucket:
    return FreshBucket(servers.moto())


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations asked for, in order."""
    asked: list[str] = []
    ask = s3_client.S3Link.ask

    def noted(link: s3_client.S3Link, verb: str, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        asked.append(operation)
        return ask(link, verb, what, operation, **parameters)

    monkeypatch.setattr(s3_client.S3Link, "ask", noted)
    return asked
