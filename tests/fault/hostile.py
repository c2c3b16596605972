"""Stores on servers behind a proxy that cuts, delays and refuses."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import pytest

from siltstone.errors import CorruptObject, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.keyvalue.protocol import MAGIC
from siltstone.store.open import open_store
from siltstone.store.retry import Retrying
from tests import servers, store_cases_s3
from tests.proxy import Fault, Proxy, http, resp
from tests.redis_server import shared_server

PATIENT = "wait_s=0.005&attempts=5&timeout_s=5"
ONCE = "retry=none&timeout_s=5"
HASTY = "wait_s=0.005&attempts=3&timeout_s=0.3"
MIB = 1 << 20
NO_GREETING = rb"\A(?![\s\S]*SETINFO)"
"""what Redis is asked besides, when a connection begins, is of no account"""
ASKED = rb"\r\nINFO\r\n"


@dataclass(frozen=True)
class Hostile:
    """A server behind a proxy.

    Attributes:
        write, commit, read: what the request that stores a small object, that lets a large one appear, and that
            reads one, holds in its first bytes; regular expressions.
        large: bytes of an object that takes several requests.
        busy: refusals that may pass.
    """

    kind: str
    proxy: Proxy
    server: str
    write: bytes
    commit: bytes
    read: bytes
    large: int
    busy: tuple[Fault, ...]

    def url(self, room: str, options: str, *, straight: bool = False) -> str:
        """A store of its own in `room`, through the proxy or past it."""
        host = self.server if straight else f"127.0.0.1:{self.proxy.port}"
        if self.kind == "redis":
            return f"redis://{host}/0?prefix={room}&chunk_bytes=65536&{options}"
        parts = f"part_bytes={5 * MIB}&put_bytes={10 * MIB}"
        return f"s3://hostile/{room}?endpoint=http://{host}&region=us-east-1&{parts}&{options}"


REFUSALS = (http(503, "SlowDown"), http(500, "InternalError"), http(429, "TooManyRequests"))
BUSY = (resp("LOADING Redis is loading the dataset in memory"), resp("BUSY Redis is busy running a script"))


@cache
def hostile(kind: str) -> Hostile:
    """One a run of each kind, its proxy as long-lived as its server."""
    if kind == "redis":
        server = f"127.0.0.1:{shared_server().port}"
        return Hostile(kind, Proxy(shared_server().port), server, b"HSETNX", MAGIC, b"HMGET|EVAL", 300_000, BUSY)
    s3 = servers.moto() if kind == "s3-moto" else servers.versitygw()
    store_cases_s3.raw_client(s3).create_bucket(Bucket="hostile")
    server = urlsplit(s3.endpoint)
    assert server.port
    return Hostile(
        kind, Proxy(server.port), server.netloc, b"PUT ", rb"POST \S+\?uploadId=", b"GET ", 11 * MIB, REFUSALS
    )


@dataclass(frozen=True)
class Room:
    """A store that holds nothing yet, on a hostile server."""

    at: Hostile
    name: str

    @property
    def proxy(self) -> Proxy:
        return self.at.proxy

    def open(self, options: str) -> Retrying:
        store = open_store(self.at.url(self.name, options))
        assert isinstance(store, Retrying)
        return store

    @property
    def truth(self) -> Store:
        """What the server holds, past the proxy."""
        return open_store(self.at.url(self.name, PATIENT, straight=True))


def stored_as(name: str, data: bytes) -> StoredObject:
    return StoredObject(name, len(data), checksum_of(data))


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def whole_or_absent(store: Store, name: str, data: bytes) -> bool:
    """Is the object there? If it is, it is whole."""
    listed = dict(store.list(name))
    if name in listed:
        assert listed == {name: len(data)}
        assert store.read(stored_as(name, data)).to_pybytes() == data
        return True
    with pytest.raises(CorruptObject, match=r"missing"):
        store.read_range(name, 0, 1)
    return False


def told(room: Room, error: Unreachable, why: str) -> None:
    """One line for people: which store, why, what to check."""
    said = str(error)
    assert error.exit_code == 3 and "\n" not in said
    assert store_label(room) in said or str(room.proxy.port) in said
    assert why in said and "check" in said
    assert "timeout_s" not in said and "?" not in said, "options are nobody's business"


def store_label(room: Room) -> str:
    return room.open(PATIENT).label


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("s/1/new", b"x" * 100),
    "read": lambda store: store.read(stored_as("s/1/a", b"there")),
    "read_range": lambda store: store.read_range("s/1/a", 0, 3),
    "list": lambda store: list(store.list("s/")),
    "delete": lambda store: store.delete(["s/1/a"]),
    "unfinished": lambda store: list(store.list_unfinished()),
    "check": lambda store: store.check(writable=True),
}
