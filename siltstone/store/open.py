"""From a warehouse URL to its store, its local directories and its default catalog."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

import xxhash

from siltstone.errors import Unreachable, UsageError
from siltstone.extras import extra_needed
from siltstone.log import get_logger
from siltstone.store.base import Store
from siltstone.store.checksums import DEFAULT, OPTION, check_algorithm
from siltstone.store.filesystem import FilesystemStore, translate_errors
from siltstone.store.paths import LocalLayout
from siltstone.store.private import make_private_directory
from siltstone.store.url import redacted, split, take_option

_LOG = get_logger(__name__)
ROCKSDB = "rocksdb"
REMOTE = ("s3", "redis", "rediss")
"""schemes of stores that are elsewhere"""
SCHEMES = "a path, file://PATH, s3://BUCKET/PREFIX, redis://HOST:PORT/DB, rocksdb://PATH"

_SCHEME = re.compile(f"(file|{ROCKSDB}|{'|'.join(REMOTE)}):")


def open_store(url: str) -> Store:
    """The object store at `url`; `open_store(store.url)` opens the same store again, on another machine too.

    A path or `file://` URL is the directory that holds the objects (`Warehouse.store` for a warehouse's own). What a
    scheme's URL may hold is said in its module. Nothing is read or made yet.

    Raises:
        UsageError: an unknown scheme, with the known ones listed, a URL or option that makes no sense, or the scheme's
            package is not installed.
    """
    scheme, mark, _ = url.partition("://")
    if not mark or scheme == "file":
        place, checksums = take_option(url, OPTION)
        return FilesystemStore(local_path(place), DEFAULT if checksums is None else check_algorithm(checksums))
    if scheme == "s3":
        from siltstone.store.s3.store import open_s3

        return open_s3(url)
    if scheme in ("redis", "rediss"):
        with extra_needed("redis", "redis", "a warehouse in Redis"):
            from siltstone.store.keyvalue.redis import open_redis

        return open_redis(url)
    if scheme == ROCKSDB:
        with extra_needed("rocksdb", "rocksdict", "a warehouse in RocksDB"):
            from siltstone.store.keyvalue.rocksdb import open_rocksdb

        return open_rocksdb(url)
    raise UsageError(f"the URL scheme {scheme!r} is unknown: use {SCHEMES}")


def local_path(url: str) -> Path:
    """The absolute path that a path or `file://` URL names.

    Raises:
        UsageError: another host, or no path at all.
    """
    text = url
    if url.startswith("file://"):
        parts = split(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise UsageError(f"{redacted(url)!r} is not a file URL: write file:///absolute/path")
        text = unquote(parts.path)
    elif "://" not in url and _SCHEME.match(url):
        raise UsageError(f"a {url.partition(':')[0]} URL has two slashes after its colon: use {SCHEMES}")
    elif "://" in url:
        raise UsageError(f"{redacted(url)!r} is no file:// URL: use {SCHEMES}")
    if not text or "\0" in text:
        raise UsageError(f"{url!r} names no directory: use {SCHEMES}")
    return Path(os.path.abspath(text))


@dataclass(frozen=True, slots=True)
class Warehouse:
    """Where a warehouse keeps things: a small value that can be sent to another process.

    `url` names it, and may hold a password: show `label`. `local` is its directory on this machine: everything for a
    local warehouse; for one elsewhere what belongs to this machine only, such as working state.
    """

    url: str = field(repr=False)
    label: str
    store_url: str = field(repr=False)
    local: LocalLayout
    remote: bool = False

    @classmethod
    def at(cls, url: str) -> Self:
        """The warehouse that `url` names; looks at nothing on disk and reaches for nothing.

        A path, `file://` or `rocksdb://` warehouse is a directory. Of others, objects lie at the URL and the rest in
        a directory of this machine: the URL's option `local`, or one named after the URL in `$XDG_STATE_HOME/siltstone`
        (`~/.local/state/siltstone`). The option `checksums` of any of them is the algorithm of the checksums of what is
        written (`store.checksums`).

        Raises:
            UsageError: an unknown scheme, with the known ones listed; a URL or option that makes no sense; a path that
                a catalog URL cannot hold.
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
            warehouse = cls(url, redacted(url), objects, local)
        else:
            store_url, local_dir = take_option(url, "local")
            local = LocalLayout(
                Path(os.path.abspath(local_dir)) if local_dir else _state_directory(take_option(store_url, OPTION)[0])
            )
            warehouse = cls(url, redacted(url), store_url, local, remote=True)
        if "?" in str(warehouse.local.root):
            raise UsageError(f"a warehouse path may not contain '?': name another than {warehouse.local.root}")
        open_store(warehouse.store_url)
        return warehouse

    @property
    def store(self) -> Store:
        """Its object store."""
        return open_store(self.store_url)

    @property
    def catalog_url(self) -> str:
        """The SQLAlchemy URL of its own catalog, used where no other is named."""
        return f"sqlite:///{self.local.catalog}"

    def check_readable(self) -> None:
        """Make sure that there is a warehouse to read; changes nothing.

        Raises:
            UsageError: nothing is there, or a file is.
            Unreachable: it may not be read, or does not answer.
        """
        if not self.remote:
            self._check_directory()
        self.store.check(writable=False)

    def _check_directory(self) -> None:
        """Of a local warehouse."""
        root = self.local.root
        with translate_errors(f"read the warehouse {root}"):
            self._check_no_file()
            there = root.exists()
        if not there:
            raise UsageError(f"no warehouse at {root}: run a stream first, or check --warehouse")
        if not os.access(root, os.R_OK | os.X_OK):
            raise Unreachable(f"cannot read the warehouse {root}: check its owner and permissions")

    def prepare(self) -> None:
        """Make the warehouse's directory where it is missing, and make sure that it can be written.

        Raises:
            UsageError: a file is there, or the directory it should be made in is missing.
            Unreachable: it, or the directory it should be made in, cannot be written, or it does not answer.
        """
        root = self.local.root
        if self.remote:
            self.store.check(writable=True)  # first: what cannot be used needs no directory here
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
        """UsageError where the path, or one above it, is a file."""
        for path in (self.local.root, *self.local.root.parents):
            if path.exists() and not path.is_dir():
                raise UsageError(f"the warehouse {self.local.root} cannot be there: {path} is a file; name another")
            if path.is_dir():
                return


def _state_directory(store_url: str) -> Path:
    """This machine's directory of a warehouse elsewhere. The name tells people whose it is, and holds no secret."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    parts = split(store_url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", place).strip("-")[:60]
    distinct = f"{place}?{parts.query}"
    return state.absolute() / "siltstone" / f"{readable}-{xxhash.xxh3_64_hexdigest(distinct.encode())}"
