"""Where a warehouse of the campaign is: its store, its catalog, and the hosts that work on it.

A host is a warehouse URL whose local directory is no other's. Hosts share the store, the catalog, and the directory of
the sinks, as hosts on a cluster share a file server; they have nothing else in common.
"""

import atexit
import fcntl
import os
import re
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sqlalchemy import URL, create_engine, text

from siltstone.store.open import Warehouse
from tests.fault.warehouses import WAREHOUSES
from tests.postgres_server import postgres_server
from tests.proxy import Proxy

CATALOGS = ("sqlite", "postgresql")
ELSEWHERE = ("s3", "redis")
"""stores that many hosts reach"""


@dataclass(frozen=True)
class Site:
    """One warehouse and its catalog.

    Attributes:
        store, catalog: the kinds.
        hosts: the warehouse's URL, as each host names it.
        catalog_url: the catalog's.
        sinks: the directory of all sinks, where hosts share one.
    """

    store: str
    catalog: str
    hosts: Sequence[str]
    catalog_url: str
    sinks: Path | None = None

    @classmethod
    def new(cls, store: str, catalog: str, directory: Path) -> "Site":
        """A site of these kinds, with all hosts there can be; nothing is in it yet."""
        url = WAREHOUSES[store](directory / "warehouse")
        if catalog == "sqlite":
            return cls(store, catalog, [url], Warehouse.at(url).catalog_url)
        hosts = [url]
        if store in ELSEWHERE:
            hosts.append(re.sub("local=[^&]*", f"local={directory / 'other-host'}", url))
        return cls(store, catalog, hosts, _render(_database()), directory / "sinks")

    def where(self, host: str | None = None, catalog: str | None = None) -> Sequence[str]:
        """The options that name it; `catalog` may be another way to its catalog."""
        named = () if catalog is None and self.catalog == "sqlite" else ("--catalog", catalog or self.catalog_url)
        return ("--warehouse", host or self.hosts[0], *named)

    @property
    def catalog_path(self) -> Path:
        """The file of a SQLite catalog."""
        return Warehouse.at(self.hosts[0]).local.catalog

    def lose_catalog(self) -> None:
        """Throw the catalog away; nobody may be at work."""
        if self.catalog == "sqlite":
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{self.catalog_path}{suffix}").unlink(missing_ok=True)
            return
        database = self.catalog_url.partition("?")[0].rpartition("/")[2]
        with _admin().connect() as connection:
            connection.execute(text(f"DROP DATABASE {database} WITH (FORCE)"))
            connection.execute(text(f"CREATE DATABASE {database}"))

    @property
    def is_free(self) -> bool:
        """Whether nobody is amid a transaction that keeps others out of the catalog."""
        if self.catalog == "sqlite":
            return _is_free(self.catalog_path)
        database = self.catalog_url.partition("?")[0].rpartition("/")[2]
        with _admin().connect() as connection:
            busy = text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name AND state <> 'idle'")
            return connection.scalar(busy, {"name": database}) == 0

    @property
    def is_readable(self) -> bool:
        """Whether nobody holds a lock that keeps others from reading the store, as writers in RocksDB do."""
        objects = [Warehouse.at(host).local.objects for host in self.hosts if host.startswith("rocksdb:")]
        return all(_has_no_writer(folder) for root in objects for folder in (root, *root.rglob("*")))

    def behind(self, proxy: Proxy) -> str:
        """The URL of its PostgreSQL catalog behind a proxy of the server."""
        database = self.catalog_url.partition("?")[0].rpartition("/")[2]
        url = _server().set(host="127.0.0.1", port=proxy.port, database=database, query={"sslmode": "disable"})
        return _render(url)


@cache
def catalog_proxy() -> Proxy:
    """A proxy of the server that all PostgreSQL catalogs are on."""
    return Proxy(f"{_server().query['host']}/.s.PGSQL.5432")


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        with closing(sqlite3.connect(path, timeout=0.01, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    return True


def _has_no_writer(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@cache
def _server() -> URL:
    server = postgres_server()
    atexit.register(server.__exit__, None, None, None)
    return server.__enter__()


@cache
def _admin():
    return create_engine(_server(), isolation_level="AUTOCOMMIT")


def _database() -> URL:
    """An empty database."""
    name = f"fault_{uuid.uuid4().hex}"
    with _admin().connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return _server().set(database=name)


def _render(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
