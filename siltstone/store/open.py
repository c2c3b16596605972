"""Resolve a warehouse URL to its store, its local directories and its default catalog."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

import xxhash

from siltstone.errors import Unreachable, UsageError
from siltstone.extras import require_extra
from siltstone.log import get_logger
from siltstone.store.base import Store
from siltstone.store.checksums import DEFAULT, OPTION, check_algorithm
from siltstone.store.filesystem import FilesystemStore, translate_errors
from siltstone.store.paths import LocalLayout
from siltstone.store.private import make_private_directory
from siltstone.store.url import redact_url, split, take_option

_LOG = get_logger(__name__)
ROCKSDB = "rocksdb"
REMOTE = ("s3", "redis", "rediss", "cassandra")
"""schemes of remote stores"""
SCHEMES = "a path, file://PATH, s3://BUCKET/PREFIX, redis://HOST:PORT/DB, cassandra://HOSTS/KEYSPACE, rocksdb://PATH"

_SCHEME = re.compile(f"(file|{ROCKSDB}|{'|'.join(REMOTE)}):")


def open_store(url: str) -> Store:
    """Open the object store at `url`; `open_store(store.url)` opens the same store again, on another machine too.

    A path or `file://` URL is the directory of the objects (use `Warehouse.store` for a warehouse's). Each scheme's
    module describes its URLs. Nothing is read or made yet.

    Raises:
        UsageError: the scheme is unknown, the URL or an option is not valid, or the scheme's package is not installed.
    """
    scheme, mark, _ = url.partition("://")
    if not mark or scheme == "file":
        place, checksums = take_option(url, OPTION)
        return FilesystemStore(local_path(place), DEFAULT if checksums is None else check_algorithm(checksums))
    if scheme == "s3":
        from siltstone.store.s3.store import open_s3

        return open_s3(url)
    if scheme in ("redis", "rediss"):
        with require_extra("redis", "redis", "a warehouse in Redis"):
            from siltstone.store.keyvalue.redis import open_redis

        return open_redis(url)
    if scheme == "cassandra":
        with require_extra("cassandra", "cassandra", "a warehouse in Cassandra"):
            from siltstone.store.keyvalue.cassandra import open_cassandra

        return open_cassandra(url)
    if scheme == ROCKSDB:
        with require_extra("rocksdb", "rocksdict", "a warehouse in RocksDB"):
            from siltstone.store.keyvalue.rocksdb import open_rocksdb

        return open_rocksdb(url)
    raise UsageError(f"the URL scheme {scheme!r} is unknown: use {SCHEMES}")


def local_path(url: str) -> Path:
    """Return the absolute path of a path or `file://` URL.

    Raises:
        UsageError: it names another host, or no path.
    """
    text = url
    if url.startswith("file://"):
        parts = split(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise UsageError(f"{redact_url(url)!r} is not a file URL: write file:///absolute/path")
        text = unquote(parts.path)
    elif "://" not in url and _SCHEME.match(url):
        raise UsageError(f"a {url.partition(':')[0]} URL has two slashes after its colon: use {SCHEMES}")
    elif "://" in url:
        raise UsageError(f"{redact_url(url)!r} is not a file:// URL: use {SCHEMES}")
    if not text or "\0" in text:
        raise UsageError(f"{url!r} names no directory: use {SCHEMES}")
    return Path(os.path.abspath(text))


@dataclass(frozen=True, slots=True)
class Warehouse:
    """The locations of a warehouse: a small value that can be sent to another process.

    `url` may contain a password: show `label` instead. `local` is its directory on this machine: a local warehouse has
    everything there, a remote one only what belongs to this machine, such as working state. `identity` tells it from
    every other warehouse, whatever their URLs; it is empty until store and catalog were compared.
    """

    url: str = field(repr=False)
    label: str
    store_url: str = field(repr=False)
    local: LocalLayout
    remote: bool = False
    identity: str = ""

    @classmethod
    def at(cls, url: str) -> Self:
        """Return the warehouse at `url`, without any I/O.

        A path, `file://` or `rocksdb://` warehouse is a directory. A remote one has its objects at the URL and the rest
        in a directory of this machine: the URL's option `local`, or one named after the URL in
        `$XDG_STATE_HOME/siltstone` (`~/.local/state/siltstone`). The option `checksums` is the algorithm of new
        checksums (`store.checksums`).

        Raises:
            UsageError: the scheme is unknown, the URL or an option is not valid, or a catalog URL cannot contain the
                path.
        """
        scheme, mark, _ = url.partition("://")
        bare, checksums = take_option(url, OPTION) if "?" in url else (url, None)
        chosen = "" if checksums is None else f"?{OPTION}={check_algorithm(checksums)}"
        if mark and scheme not in ("file", ROCKSDB, *REMOTE):
            raise UsageError(f"the URL scheme {scheme!r} is unknown: use {SCHEMES}")
        if not mark or scheme == "file":
            local = LocalLayout(local_path(bare))
            urls = (f"{path.as_uri()}{chosen}" for path in (local.root, local.objects))
            warehouse = cls(next(urls), str(local.root), next(urls), local)
        elif scheme == ROCKSDB:
            path, question, query = url.partition("?")
            local = LocalLayout(local_path(unquote(path.removeprefix(f"{ROCKSDB}://"))))
            objects = f"{ROCKSDB}://{quote(str(local.objects))}{question}{query}"
            warehouse = cls(url, redact_url(url), objects, local)
        else:
            store_url, local_dir = take_option(url, "local")
            local = LocalLayout(
                Path(os.path.abspath(local_dir)) if local_dir else _state_directory(take_option(store_url, OPTION)[0])
            )
            warehouse = cls(url, redact_url(url), store_url, local, remote=True)
        if "?" in str(warehouse.local.root):
            raise UsageError(f"a warehouse path may not contain '?': name another than {warehouse.local.root}")
        open_store(warehouse.store_url)
        return warehouse

    @property
    def store(self) -> Store:
        """The warehouse's object store."""
        return open_store(self.store_url)

    @property
    def catalog_url(self) -> str:
        """The SQLAlchemy URL of the warehouse's default catalog."""
        return f"sqlite:///{self.local.catalog}"

    def check_readable(self) -> None:
        """Check that the warehouse exists and can be read; change nothing.

        Raises:
            UsageError: it does not exist, or is a file.
            Unreachable: it cannot be read, or does not answer.
        """
        if not self.remote:
            self._check_directory()
        self.store.check(writable=False)

    def _check_directory(self) -> None:
        """Check the directory of a local warehouse."""
        root = self.local.root
        with translate_errors(f"read the warehouse {root}"):
            self._check_no_file()
            there = root.exists()
        if not there:
            raise UsageError(f"no warehouse at {root}: run a stream first, or check --warehouse")
        if not os.access(root, os.R_OK | os.X_OK):
            raise Unreachable(f"cannot read the warehouse {root}: check its owner and permissions")

    def prepare(self) -> None:
        """Make the warehouse's directory if it is missing, and check that it can be written.

        Raises:
            UsageError: its path is a file, or the parent directory is missing.
            Unreachable: it, or the parent directory, cannot be written, or it does not answer.
        """
        root = self.local.root
        if self.remote:
            self.store.check(writable=True)  # first: an unusable store needs no directory here
            for remark in self.store.remarks():
                if remark.advice is not None:
                    _LOG.warning("store needs attention", store=self.label, found=remark.found, advice=remark.advice)
        with translate_errors(f"write the warehouse {root}"):
            self._check_no_file()
            if not (self.remote or root.parent.is_dir()):
                raise UsageError(f"cannot make the warehouse {root}: make the directory {root.parent} first")
            make_private_directory(root)
            for path in (root, self.local.objects):
                if path.exists() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                    raise Unreachable(
                        f"cannot write the warehouse: {path} is read-only; check its permissions and mount"
                    )
        if not self.remote:
            self.store.check(writable=True)

    def _check_no_file(self) -> None:
        """Raise UsageError if the path, or one above it, is a file."""
        for path in (self.local.root, *self.local.root.parents):
            if path.exists() and not path.is_dir():
                raise UsageError(f"the warehouse {self.local.root} cannot be there: {path} is a file; name another")
            if path.is_dir():
                return


def _state_directory(store_url: str) -> Path:
    """Return this machine's directory for a remote warehouse. Its name shows the warehouse, without secrets."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    parts = split(store_url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", place).strip("-")[:60]
    distinct = f"{place}?{parts.query}"
    return state.absolute() / "siltstone" / f"{readable}-{xxhash.xxh3_64_hexdigest(distinct.encode())}"
