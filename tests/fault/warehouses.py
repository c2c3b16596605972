"""A new warehouse of every kind: where its objects lie, on a real server where they lie elsewhere."""

import uuid
from collections.abc import Callable
from pathlib import Path

from tests import servers, store_cases_s3
from tests.redis_server import shared_server
from tests.store_cases_kv import with_cassandra


def _s3(local: Path) -> str:
    real = "s3-versitygw" in store_cases_s3.factories()
    server = servers.versitygw() if real else servers.moto()
    _, bucket = store_cases_s3.fresh_bucket(server)
    return f"s3://{bucket}/state?endpoint={server.endpoint}&region=us-east-1&local={local}"


def _redis(local: Path) -> str:
    return shared_server().url(f"prefix={uuid.uuid4().hex}&local={local}")


def _cassandra(local: Path) -> str:
    from tests.cassandra_server import shared_cassandra

    return shared_cassandra().url(f"prefix={uuid.uuid4().hex}&local={local}")


WAREHOUSES: dict[str, Callable[[Path], str]] = {
    "filesystem": str,
    "s3": _s3,
    "redis": _redis,
    "rocksdb": lambda local: f"rocksdb://{local}",
} | ({"cassandra": _cassandra} if with_cassandra() else {})
"""kind -> the URL of a warehouse whose directory on this machine is to be the one given"""
