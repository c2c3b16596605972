"""A real Cassandra on loopback, from its jars: `make test-cassandra` fetches them by Maven and starts it.

    python -m tests.cassandra_server            fetches the jars, or says why that is impossible
    python -m tests.cassandra_server --where    prints their directory

One node with a heap of 512 MB, which syncs each write to its commit log (`commitlog_sync: batch`).
"""

import os
import ssl
import subprocess
import sys
from functools import cache
from pathlib import Path

from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.policies import WhiteListRoundRobinPolicy

from tests.java_server import JavaServer
from tests.jvm import java
from tests.maven import fetch_jars
from tests.servers import free_port

VERSION = "5.0.4"
JARS = Path(os.environ.get("CASSANDRA_JARS") or Path(sys.prefix) / f"cassandra-{VERSION}")
SUPERUSER, SUPERUSER_PASSWORD = "cassandra", "cassandra"
"""what a new Cassandra has"""
KEYSPACE = "warehouses"

_YAML = """\
cluster_name: tests
num_tokens: 4
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{{seeds: "127.0.0.1:{storage}"}}]
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
storage_port: {storage}
native_transport_port: {port}
data_file_directories: [{root}/data]
commitlog_directory: {root}/commitlog
saved_caches_directory: {root}/caches
hints_directory: {root}/hints
cdc_raw_directory: {root}/cdc
commitlog_sync: batch
commitlog_segment_size: 32MiB
memtable_heap_space: 64MiB
memtable_offheap_space: 64MiB
key_cache_size: 0MiB
authenticator: {authenticator}
authorizer: {authorizer}
concurrent_compactors: 1
client_encryption_options:
  enabled: {encrypted}
  keystore: {root}/keys.p12
  keystore_password: {secret}
  store_type: PKCS12
"""
_OPEN = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
)
_EXPORTED = (
    "java.base/java.lang.ref",
    "java.base/java.lang.reflect",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.rmi/sun.rmi.transport.tcp",
    "java.sql/java.sql",
    "jdk.compiler/com.sun.tools.javac.file",
    "jdk.naming.dns/com.sun.jndi.dns",
)
_TUNED = (
    "-Xms512m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xss512k",
    "-Djdk.attach.allowAttachSelf=true",
    "-Djava.security.manager=allow",
    "-Dcassandra.superuser_setup_delay_ms=0",
    "-Dcassandra.skip_wait_for_gossip_to_settle=0",
    "-Dcassandra.ring_delay_ms=100",
)


class CassandraServer(JavaServer):
    """One node on free ports, its data in a directory of its own; `guarded` asks for a password, over TLS."""

    def __init__(self, guarded: bool = False) -> None:
        super().__init__("Cassandra")
        self.guarded = guarded
        kinds = ("PasswordAuthenticator", "CassandraAuthorizer") if guarded else ("AllowAllAuthenticator",) * 2
        (self.root / "cassandra.yaml").write_text(
            _YAML.format(
                root=self.root,
                port=self.port,
                storage=free_port(),
                encrypted=str(guarded).lower(),
                secret=SUPERUSER_PASSWORD,
                authenticator=kinds[0],
                authorizer="CassandraAuthorizer" if guarded else "AllowAllAuthorizer",
            )
        )
        (self.root / "logback.xml").write_text(
            f'<configuration><appender name="F" class="ch.qos.logback.core.FileAppender"><file>{self.root}/log</file>'
            "<encoder><pattern>%d %p %c %m%n</pattern></encoder></appender>"
            '<root level="INFO"><appender-ref ref="F"/></root></configuration>'
        )
        if guarded:
            self._make_keys()
        self.start()
        with self.session() as session:
            session.execute(
                f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 1}}"
            )

    def url(self, query: str = "", user: str = "") -> str:
        return f"cassandra://{user}127.0.0.1:{self.port}/{KEYSPACE}?{query}"

    def session(self) -> "_Session":
        """A session of the superuser, to use in a `with` block."""
        return _Session(self)

    def command(self) -> list[str]:
        flags = [f"--add-opens={each}=ALL-UNNAMED" for each in _OPEN]
        flags += [f"--add-exports={each}=ALL-UNNAMED" for each in _EXPORTED]
        flags += [f"-Dcassandra.config=file://{self.root}/cassandra.yaml", "-Dcassandra-foreground=yes"]
        flags += [f"-Dlogback.configurationFile={self.root}/logback.xml", f"-Dcassandra.storagedir={self.root}"]
        return [java(), *_TUNED, *flags, "-cp", f"{JARS}/*", "org.apache.cassandra.service.CassandraDaemon"]

    def answers(self) -> bool:
        try:
            with self.session() as session:
                session.execute("SELECT release_version FROM system.local")
        except Exception:  # whatever the driver raises until the server answers
            return False
        return True

    def _make_keys(self) -> None:
        """Make the server's key and its certificate, which clients are to trust."""
        keytool = str(Path(java()).with_name("keytool")) if os.sep in java() else "keytool"
        store = ["-alias", "node", "-keystore", str(self.root / "keys.p12"), "-storepass", SUPERUSER_PASSWORD]
        make = ["-genkeypair", "-keyalg", "RSA", "-dname", "CN=node", "-ext", "san=ip:127.0.0.1"]
        for command in (make, ["-exportcert", "-rfc", "-file", str(self.certificate)]):
            subprocess.run([keytool, *command, *store, "-storetype", "PKCS12"], check=True, capture_output=True)

    @property
    def certificate(self) -> Path:
        return self.root / "certificate.pem"


class _Session:
    def __init__(self, server: CassandraServer) -> None:
        self._server = server

    def __enter__(self) -> Session:
        profile = ExecutionProfile(WhiteListRoundRobinPolicy(["127.0.0.1"]), request_timeout=30)
        auth = PlainTextAuthProvider(SUPERUSER, SUPERUSER_PASSWORD) if self._server.guarded else None
        self._cluster = Cluster(
            ["127.0.0.1"],
            self._server.port,
            auth_provider=auth,
            ssl_context=ssl.create_default_context(cafile=str(self._server.certificate)) if auth else None,
            connect_timeout=10,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        )
        try:
            return self._cluster.connect()
        except BaseException:
            self._cluster.shutdown()
            raise

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


@cache
def shared_cassandra() -> CassandraServer:
    """The server that tests share, each under a prefix of its own."""
    return CassandraServer()


if __name__ == "__main__":
    if "--where" in sys.argv:
        print(JARS)
    else:
        fetch_jars(f"org.apache.cassandra:cassandra-all:{VERSION}", JARS, "Cassandra's tests")
