"""Clients of Cassandra: URLs and their options, one session per process, and translation of errors."""

import logging
import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

import cassandra
from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    InvalidRequest,
    RequestValidationException,
    Unauthorized,
    UnresolvableContactPoints,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.concurrent import execute_concurrent
from cassandra.policies import (
    ConstantReconnectionPolicy,
    DCAwareRoundRobinPolicy,
    FallthroughRetryPolicy,
    RoundRobinPolicy,
    TokenAwarePolicy,
)
from cassandra.query import BatchStatement, BatchType, PreparedStatement
from pydantic import Field

from siltstone.errors import Unreachable, UsageError
from siltstone.secret import FILE, read_variable
from siltstone.store.keyvalue.cassandra_statements import OBJECTS, TABLES
from siltstone.store.keyvalue.protocol import SMALLEST_LIMIT_BYTES
from siltstone.store.url import StoreOptions, redact_url, split

PASSWORD = "SILTSTONE_CASSANDRA_PASSWORD"
"""the default variable for the password, which is not in the URL: URLs are sent to tasks and shown in process lists"""
LARGEST_CHUNK_BYTES = 1 << 20
"""what Cassandra still handles well; its own limit on a mutation is 16 MiB by default"""
_AT_ONCE = 16
_clusters: dict[tuple[int, str, "Servers"], "CassandraClient"] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  # a child process needs a lock that nobody holds
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may hold it


class CassandraOptions(StoreOptions):
    """Options of a `cassandra://` URL."""

    prefix: str = Field("siltstone", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="prefix of all partition keys")
    chunk_bytes: int = Field(
        1 << 18, ge=SMALLEST_LIMIT_BYTES, le=LARGEST_CHUNK_BYTES, description="bytes of the largest value stored whole"
    )
    password_variable: str = Field(
        PASSWORD, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="the variable that holds the password"
    )
    consistency: Literal["QUORUM", "LOCAL_QUORUM"] = Field(
        "QUORUM", description="replicas that each read and write waits for"
    )
    datacenter: str | None = Field(None, min_length=1, description="the data center whose nodes are asked")
    tls: bool = Field(False, description="whether connections are encrypted and servers' certificates checked")
    ca_file: str | None = Field(None, min_length=1, description="a file of trusted certificates, with tls")


@dataclass(frozen=True, slots=True)
class Servers:
    """Where a URL points: hosts, port, keyspace, credentials."""

    hosts: tuple[str, ...]
    port: int
    keyspace: str
    user: str | None
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str, options: CassandraOptions) -> "Servers":
        """Parse `url` and read the password.

        Raises:
            UsageError: it is not a Cassandra URL, or contains a password; or of user and password one is missing.
        """
        parts = split(url)
        hosts = tuple((parts.hostname or "").split(","))
        keyspace = parts.path.removeprefix("/")
        named = keyspace.isascii() and keyspace.replace("_", "a").isalnum() and len(keyspace) <= 48
        if not all(hosts) or not named or parts.fragment:
            raise UsageError(
                f"{redact_url(url)} is not a Cassandra URL: write cassandra://[user@]host1,host2:port/keyspace"
            )
        if parts.password:
            raise UsageError(
                f"{redact_url(url)} contains a password, which would be sent to every task: leave it out, and set "
                f"{PASSWORD}, or {PASSWORD}{FILE} to the path of a file that holds it, on every host"
            )
        if options.ca_file is not None and not options.tls:
            raise UsageError(f"{redact_url(url)}: option ca_file needs tls=true: add it, or leave ca_file out")
        user = unquote(parts.username) if parts.username else None
        password = read_variable(options.password_variable)
        return cls(hosts, parts.port or 9042, keyspace, user, password)


class NoTables(Exception):
    """The keyspace has no tables of Siltstone: nothing was ever written to it."""


class CassandraClient:
    """A session of this process, with its prepared statements."""

    def __init__(self, servers: Servers, options: CassandraOptions) -> None:
        local = options.consistency == "LOCAL_QUORUM"
        self.quorum = ConsistencyLevel.LOCAL_QUORUM if local else ConsistencyLevel.QUORUM
        self.serial = ConsistencyLevel.LOCAL_SERIAL if local else ConsistencyLevel.SERIAL
        self._keyspace = servers.keyspace
        self._prepared: dict[tuple[str, int], PreparedStatement] = {}
        self._cluster = _cluster(servers, options, self.quorum, self.serial)
        try:
            self._session: Session = self._cluster.connect()
            self._session.set_keyspace(servers.keyspace)  # says if it does not exist, which `connect` does not
        except BaseException:
            self._cluster.shutdown()
            raise

    @property
    def keyspace(self) -> Any:
        """What the driver knows of the keyspace: its replication and tables."""
        known: Any = self._cluster.metadata
        return None if known is None else known.keyspaces.get(self._keyspace)

    def make_tables(self) -> None:
        """Make the tables that are missing."""
        with _lock:
            for name, text in TABLES.items():
                if self.keyspace is None or name not in self.keyspace.tables:
                    self._session.execute(text)

    def run(self, text: str, *values: Any, serial: bool = False) -> Any:
        """Execute a statement; a read with `serial` also completes what a lost transaction began.

        Raises:
            NoTables: the keyspace has no tables of Siltstone.
        """
        return self._session.execute(self._prepare(text, serial), values)

    def run_all(self, text: str, rows: Sequence[tuple[Any, ...]], serial: bool = False) -> list[list[Any]]:
        """Execute a statement for each of `rows`, some at a time; return each one's answer, which has one page."""
        if not rows:
            return []
        prepared = self._prepare(text, serial)
        done = execute_concurrent(self._session, [(prepared, row) for row in rows], concurrency=_AT_ONCE)
        return [result.all() for _, result in done]

    def run_batch(self, *statements: tuple[str, tuple[Any, ...]]) -> bool:
        """Execute conditional statements on one partition as one transaction; return whether it took place."""
        batch = BatchStatement(BatchType.LOGGED)
        for text, values in statements:
            batch.add(self._prepare(text), values)
        return self._session.execute(batch).was_applied

    def setting(self, name: str) -> str | None:
        """Return a setting of a server; None if this user may not see it."""
        try:
            row = self._session.execute("SELECT value FROM system_views.settings WHERE name = %s", [name]).one()
        except (InvalidRequest, Unauthorized):
            return None
        return row and row.value

    def _prepare(self, text: str, serial: bool = False) -> PreparedStatement:
        level = self.serial if serial else self.quorum
        if (text, level) not in self._prepared:
            try:
                prepared: Any = self._session.prepare(text)
            except InvalidRequest as error:
                if "unconfigured table" in str(error) or ("does not exist" in str(error) and OBJECTS in str(error)):
                    raise NoTables from error
                raise
            prepared.consistency_level = level
            self._prepared[text, level] = prepared
        return self._prepared[text, level]


def client(url: str, options: CassandraOptions) -> CassandraClient:
    """Return this process's client for `url`; a forked child makes its own."""
    servers = Servers.of(url, options)
    place = (os.getpid(), url, servers)
    with _lock:
        if place not in _clusters:
            _clusters[place] = CassandraClient(servers, options)
        return _clusters[place]


def _cluster(servers: Servers, options: CassandraOptions, quorum: int, serial: int) -> Cluster:
    logger = logging.getLogger("cassandra")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)  # its warnings repeat what errors say, with a traceback each
    near = DCAwareRoundRobinPolicy(options.datacenter) if options.datacenter else RoundRobinPolicy()
    profile = ExecutionProfile(
        TokenAwarePolicy(near),
        FallthroughRetryPolicy(),  # only `store.retry` retries
        consistency_level=quorum,
        serial_consistency_level=serial,
        request_timeout=options.timeout_s,
    )
    context = None
    if options.tls:
        try:
            context = ssl.create_default_context(cafile=options.ca_file)
        except OSError as error:
            raise UsageError(f"cannot read the file that option ca_file names: {error.strerror}: correct it") from error
    return Cluster(
        list(servers.hosts),
        servers.port,
        auth_provider=PlainTextAuthProvider(servers.user, servers.password) if servers.user else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        connect_timeout=options.connect_timeout_s,  # type: ignore[arg-type]  # its stub allows whole seconds only
        control_connection_timeout=options.connect_timeout_s,
        reconnection_policy=ConstantReconnectionPolicy(1.0, max_attempts=None),  # type: ignore[arg-type]  # its stub lacks None: without end
        ssl_context=context,
        ssl_options={} if context is None else None,
    )


@contextmanager
def translate_errors(what: str, label: str) -> Iterator[None]:
    """Translate errors of Cassandra, its driver or the network: what failed in `label`, and what to check.

    Raises:
        Unreachable: Cassandra does not answer, refuses, or does not say whether it did it (then it is transient).
        UsageError: the keyspace does not exist.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "cassandra"):
            raise
        of_hosts = error.errors if isinstance(error, NoHostAvailable) else {}
        causes = list(of_hosts.values()) if isinstance(of_hosts, dict) else []  # else a list of hosts
        told = (each for each in causes if isinstance(each, (AuthenticationFailed, RequestValidationException)))
        raise _translate(next(told, error), what, label) from error


def _translate(error: Exception, what: str, label: str) -> Unreachable | UsageError:
    """Return the error for an answer of Cassandra, or for none."""
    said = " ".join(str(error).split())[:200]
    if isinstance(error, (AuthenticationFailed, Unauthorized)):
        return Unreachable(f"cannot {what}: {label} refuses the credentials; check user, password and their rights")
    if isinstance(error, InvalidRequest) and "eyspace" in said and "does not exist" in said:
        return UsageError(f"cannot {what}: {label} has no such keyspace; make it with CREATE KEYSPACE, with 3 replicas")
    if isinstance(error, cassandra.Unavailable):
        alive = f"{error.alive_replicas} of the {error.required_replicas} replicas that it needs are up"
        return Unreachable(f"cannot {what}: of {label} {alive}; check its nodes", transient=True)
    if isinstance(error, (cassandra.Timeout, cassandra.OperationTimedOut)):
        return Unreachable(f"cannot {what}: {label} does not answer in time; check hosts and port", transient=True)
    if isinstance(error, (NoHostAvailable, UnresolvableContactPoints, OSError)):
        return Unreachable(f"cannot {what}: {label} cannot be reached; check hosts, port and tls", transient=True)
    passing = not isinstance(error, RequestValidationException)
    hint = "it may pass: try again" if passing else "check the server"
    return Unreachable(f"cannot {what}: {label} says: {said}", advice=hint, transient=passing)
