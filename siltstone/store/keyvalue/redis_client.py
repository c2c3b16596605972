"""Clients of Redis: URLs and their options, one connection pool per process, and translation of errors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import redis
from pydantic import Field
from redis import exceptions as refusals
from redis.backoff import NoBackoff
from redis.retry import Retry

from siltstone.errors import Unreachable, UsageError
from siltstone.secret import FILE, read_variable
from siltstone.store.base import Remark
from siltstone.store.keyvalue.protocol import SMALLEST_LIMIT_BYTES
from siltstone.store.url import StoreOptions, redact_url, split

PASSWORD = "SILTSTONE_REDIS_PASSWORD"
"""the default variable for the password, which is not in the URL: URLs are sent to tasks and shown in process lists"""
LARGEST_VALUE_BYTES = 512 << 20
"""Redis's own limit"""
_NEARLY_FULL = 0.9
_pools: dict[tuple[int, str, "Server"], redis.ConnectionPool] = {}


class RedisOptions(StoreOptions):
    """Options of a `redis://` URL."""

    prefix: str = Field("siltstone", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="prefix of all keys")
    chunk_bytes: int = Field(
        1 << 20, ge=SMALLEST_LIMIT_BYTES, le=LARGEST_VALUE_BYTES, description="bytes of the largest value stored whole"
    )
    password_variable: str = Field(
        PASSWORD, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="the variable that holds the password"
    )


@dataclass(frozen=True, slots=True)
class Server:
    """Where a URL points: host, port, database, credentials."""

    host: str
    port: int
    database: int
    user: str | None
    password: str | None = field(repr=False)
    tls: bool

    @classmethod
    def of(cls, url: str, options: RedisOptions) -> "Server":
        """Parse `url` and read the password.

        Raises:
            UsageError: it is not a Redis URL, or contains a password.
        """
        parts = split(url)
        number = parts.path.strip("/") or "0"
        if not parts.hostname or not number.isdecimal() or parts.fragment:
            raise UsageError(f"{redact_url(url)} is not a Redis URL: write redis://[user@]host:port/database-number")
        if parts.password:
            raise UsageError(
                f"{redact_url(url)} contains a password, which would be sent to every task: leave it out, and set "
                f"{PASSWORD}, or {PASSWORD}{FILE} to the path of a file that holds it, on every host"
            )
        user, password = unquote(parts.username) if parts.username else None, read_variable(options.password_variable)
        return cls(parts.hostname, parts.port or 6379, int(number), user, password, parts.scheme == "rediss")


def client(url: str, options: RedisOptions) -> redis.Redis:
    """Return a client with this process's connection pool for `url`; a forked child makes its own."""
    server = Server.of(url, options)
    place = (os.getpid(), url, server)
    if place not in _pools:
        _pools[place] = _pool(server, options)
    return redis.Redis(connection_pool=_pools[place])


def _pool(server: Server, options: RedisOptions) -> redis.ConnectionPool:
    return redis.ConnectionPool(
        connection_class=redis.SSLConnection if server.tls else redis.Connection,
        host=server.host,
        port=server.port,
        db=server.database,
        username=server.user,
        password=server.password,
        socket_connect_timeout=options.connect_timeout_s,
        socket_timeout=options.timeout_s,
        socket_read_size=1 << 16,
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # only `store.retry` retries
    )


def memory_remark(about: Mapping[str, Any]) -> Remark | None:
    """Report a server's memory from its INFO; None if that is not provided.

    Buffers for replicas and the append-only file do not count against the limit. A policy that may evict state was
    refused before (`RedisKeyValue.check`); the others evict only keys that expire, which state does not.
    """
    if "used_memory" not in about:
        return None
    used = int(about["used_memory"]) - int(about.get("mem_not_counted_for_evict", 0))
    limit, policy = int(about.get("maxmemory", 0)), about.get("maxmemory_policy", "not known")
    said = f"uses {used / 1e6:,.1f} MB of memory"
    if not limit:
        return Remark(f"{said}, which maxmemory does not limit; policy {policy}")
    said += f", {used / limit:.0%} of maxmemory, {limit / 1e6:,.1f} MB; policy {policy}"
    if used < _NEARLY_FULL * limit:
        return Remark(said)
    advice = "raise its maxmemory, or keep less: `siltstone truncate STREAM` deletes old checkpoints, `siltstone sweep "
    return Remark(f"{said}: once it is full, runs fail", f"{advice}STREAM` orphans")


@contextmanager
def translate_errors(what: str, label: str) -> Iterator[None]:
    """Translate errors of Redis or the network into Unreachable: what failed in `label`, and what to check."""
    try:
        yield
    except refusals.RedisError as error:
        raise unreachable_error(error, what, label) from error
    except OSError as error:
        raise Unreachable(f"cannot {what} in {label}: {error}; check host, port and TLS", transient=True) from error


def unreachable_error(error: refusals.RedisError, what: str, label: str) -> Unreachable:
    """Make the error for an answer of Redis, or for none."""
    said = str(error).split("\n", 1)[0]
    refused = (refusals.AuthenticationError, refusals.AuthorizationError, refusals.NoPermissionError)
    if isinstance(error, refused) or said.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return Unreachable(f"cannot {what}: {label} refuses the credentials; check user, password and their rights")
    if isinstance(error, refusals.OutOfMemoryError) or said.startswith("OOM"):
        return Unreachable(f"cannot {what}: {label} is full: raise its maxmemory, or delete old checkpoints")
    if isinstance(error, refusals.ReadOnlyError):
        return Unreachable(f"cannot {what}: {label} is a read-only replica; name the primary")
    if "bulk length" in said:
        return Unreachable(f"cannot {what}: a value is over the limit of {label}; lower chunk_bytes")
    if said.startswith("MISCONF"):
        return Unreachable(f"cannot {what}: {label} cannot save to its own disk; check that it has room")
    if isinstance(error, refusals.TimeoutError):
        return Unreachable(f"cannot {what}: {label} does not answer in time; check host and port", transient=True)
    if isinstance(error, refusals.ConnectionError) and not isinstance(error, refusals.BusyLoadingError):
        return Unreachable(f"cannot {what}: {label} cannot be reached ({said}); check host and port", transient=True)
    passing = isinstance(error, (refusals.BusyLoadingError, refusals.TryAgainError, refusals.ClusterDownError))
    passing = passing or said.startswith(("BUSY", "LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"))
    hint = "it may pass: try again" if passing else "check the server"
    return Unreachable(f"cannot {what}: {label} says: {said}", advice=hint, transient=passing)
