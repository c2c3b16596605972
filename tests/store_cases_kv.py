"""The key-value stores for the contract suite, with their own limit on values and with one of 1 KB."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocksdict import Rdict

from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import split_name
from siltstone.store.keyvalue.rocksdb_database import database_options
from siltstone.store.open import open_store
from siltstone.store.retry import Retrying
from tests.redis_server import shared_server

if TYPE_CHECKING:
    from tests.store_cases import Case

Factory = Callable[[Path], "Case"]


def _case(url: str, alter: Callable[[str, bytes | None], None]) -> "Case":
    from tests.store_cases import Case  # which names the cases made here

    return Case(url, alter)


def redis_case(chunk_bytes: int | None) -> Factory:
    def make(tmp_path: Path) -> "Case":
        server, prefix = shared_server(), uuid.uuid4().hex
        limit = f"&chunk_bytes={chunk_bytes}" if chunk_bytes else ""

        def alter(name: str, data: bytes | None) -> None:
            entry, _, key = name.rpartition("/")
            if data is None:
                server.client().hdel(f"{prefix}:{entry}", key)
            else:
                server.client().hset(f"{prefix}:{entry}", key, data)  # type: ignore[arg-type]

        return _case(server.url(f"prefix={prefix}{limit}"), alter)

    return make


def rocksdb_case(chunk_bytes: int | None) -> Factory:
    def make(tmp_path: Path) -> "Case":
        root = tmp_path / "databases"
        limit = f"?chunk_bytes={chunk_bytes}" if chunk_bytes else ""

        def alter(name: str, data: bytes | None) -> None:
            entry, _, key = name.rpartition("/")
            database = Rdict(str(root / entry / ".db"), database_options())
            if data is None:
                database.delete(key.encode())
                database.delete(b"\1" + key.encode())
            else:
                database.put(key.encode(), data)
            database.close()

        return _case(f"rocksdb://{root}{limit}", alter)

    return make


def cassandra_case(chunk_bytes: int | None) -> Factory:
    def make(tmp_path: Path) -> "Case":
        from tests.cassandra_server import shared_cassandra

        limit = f"&chunk_bytes={chunk_bytes}" if chunk_bytes else ""
        url = shared_cassandra().url(f"prefix={uuid.uuid4().hex}{limit}")

        def alter(name: str, data: bytes | None) -> None:
            driver = driver_of(open_tried_again(url))
            entry, key = split_name(name)
            row = (*driver.place_of(entry, key), key)
            if data is None:
                text, values = "DELETE FROM siltstone_objects WHERE entry=? AND shard=? AND key=? IF EXISTS", row
            else:
                text = "UPDATE siltstone_objects SET value=?, size=? WHERE entry=? AND shard=? AND key=? IF EXISTS"
                values = (data, len(data), *row)
            assert driver.client.run(text, *values).was_applied

        return _case(url, alter)

    return make


def with_cassandra() -> bool:
    """Whether `make test-cassandra` runs: its server takes a gigabyte and a minute."""
    return "CASSANDRA_JARS" in os.environ


def factories() -> dict[str, Factory]:
    found = {"cassandra": cassandra_case(None), "cassandra-1k": cassandra_case(1024)} if with_cassandra() else {}
    return found | {
        "redis": redis_case(None),
        "redis-1k": redis_case(1024),
        "rocksdb": rocksdb_case(None),
        "rocksdb-1k": rocksdb_case(1024),
    }


def open_tried_again(url: str) -> Retrying:
    """The store at `url`, whose calls are tried again."""
    store = open_store(url)
    assert isinstance(store, Retrying)
    return store


def driver_of(store: Retrying) -> Any:
    """What a store of values in chunks is driven by."""
    assert isinstance(store.once, ChunkedStore)
    return store.once.driver
