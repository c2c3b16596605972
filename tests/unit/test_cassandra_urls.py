"""What of a store in Cassandra needs no server: its URLs, options and errors."""

import cassandra
import pytest
from cassandra.cluster import NoHostAvailable

from siltstone.errors import Unreachable, UsageError
from siltstone.store.keyvalue.cassandra_client import CassandraOptions, Servers, translate_errors
from siltstone.store.open import Warehouse, open_store


@pytest.mark.parametrize(
    "url",
    ["cassandra://", "cassandra://h", "cassandra://h/", "cassandra://h/a/b", "cassandra://h,/k", "cassandra://h/k#x",
     "cassandra://h/a-b", f"cassandra://h/{'k' * 49}"],
)  # fmt: skip
def test_a_url_that_names_no_keyspace_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a Cassandra URL: write cassandra://"):
        open_store(url)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("chunk_bytes=1048577", "option chunk_bytes: .*less than or equal to 1048576"),
        ("chunk_bytes=1023", "option chunk_bytes"),
        ("consistency=ONE", "option consistency: .*'QUORUM' or 'LOCAL_QUORUM'"),
        ("tls=maybe", "option tls"),
        ("ca_file=/x", "option ca_file needs tls=true"),
        ("prefix=a/b", "option prefix"),
        ("database=1", "no option 'database': use .*datacenter"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(query: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_store(f"cassandra://h/k?{query}")


def test_a_password_comes_from_its_variable_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"contains a password.*SILTSTONE_CASSANDRA_PASSWORD") as caught:
        open_store("cassandra://me:plugh@h/k")
    assert "plugh" not in str(caught.value)
    monkeypatch.setenv("SILTSTONE_CASSANDRA_PASSWORD", "xyzzy")
    servers = Servers.of("cassandra://me@h1,h2:9043/k", CassandraOptions())
    assert (servers.hosts, servers.port, servers.keyspace, servers.user) == (("h1", "h2"), 9043, "k", "me")
    assert servers.password == "xyzzy" and "xyzzy" not in repr(servers)
    warehouse = Warehouse.at("cassandra://me@h1,h2:9043/k?tls=true&local=/tmp/here")
    assert warehouse.remote and warehouse.label == "cassandra://me@h1,h2:9043/k"
    assert Servers.of("cassandra://h/k", CassandraOptions()).port == 9042


@pytest.mark.parametrize(
    ("error", "said", "transient"),
    [
        (cassandra.OperationTimedOut(), "does not answer in time", True),
        (cassandra.WriteTimeout("x", write_type=cassandra.WriteType.CAS), "does not answer in time", True),
        (cassandra.Unavailable("x", required_replicas=2, alive_replicas=1), "1 of the 2 replicas", True),
        (cassandra.AuthenticationFailed("plugh"), "refuses the credentials", False),
        (cassandra.Unauthorized("plugh"), "refuses the credentials", False),
        (NoHostAvailable("x", {"h": cassandra.AuthenticationFailed("plugh")}), "refuses the credentials", False),
        (NoHostAvailable("plugh", {"h": OSError(111, "refused")}), "cannot be reached; check hosts", True),
        (cassandra.UnresolvableContactPoints(), "cannot be reached; check hosts", True),
        (cassandra.WriteFailure("two\nlines", error_code_map={}), "says: .*two lines.*try again", True),
        (cassandra.InvalidRequest("a mutation is too large"), "too large; check the server", False),
        (ConnectionResetError(), "cannot be reached", True),
    ],
)
def test_errors_of_the_driver_are_one_line_that_says_what_to_do(error: Exception, said: str, transient: bool) -> None:
    with pytest.raises(Unreachable, match=said) as caught, translate_errors("read it", "cassandra://h/k"):
        raise error
    assert caught.value.transient is transient
    assert str(caught.value).startswith("cannot read it: ") and "\n" not in str(caught.value)
    assert "plugh" not in str(caught.value)


def test_a_keyspace_that_is_not_there_is_a_mistake_and_other_errors_are_none_of_ours() -> None:
    with pytest.raises(UsageError, match="no such keyspace; make it"), translate_errors("read it", "x"):
        raise cassandra.InvalidRequest("Keyspace 'k' does not exist")
    with pytest.raises(KeyError), translate_errors("read it", "x"):
        raise KeyError


@pytest.mark.server
def test_servers_that_are_not_there_are_unreachable_by_any_call() -> None:
    store = open_store("cassandra://127.0.0.1:1/k?retry=none&connect_timeout_s=1")
    for call in (lambda: store.check(writable=True), lambda: store.put("a/b", b"x"), lambda: list(store.list("a/"))):
        with pytest.raises(Unreachable, match="cannot be reached; check hosts, port and tls") as caught:
            call()
        assert caught.value.transient
