"""Stores elsewhere through the command line: what is wrong is said in one line, nothing is made, no secret is shown."""

import io
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.errors import SiltstoneError
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.settings import load_settings
from siltstone.store.open import Warehouse, open_store
from tests import servers, store_cases_s3
from tests.command_line import CONFIGURATION, Ended, siltstone
from tests.fault.small_stream import SMALL
from tests.proxy import Fault, Proxy
from tests.redis_server import RedisServer

"""with all that is special in a URL"""
WRONG_PASSWORD, WRONG_ACCESS_KEY, WRONG_SECRET_KEY = "Plugh-password-43", "AKIAPLUGH44", "plover/secret+key-45"
SECRETS = ("xyzzy", "plugh", "plover", "pass#word", servers.SECRET_KEY, servers.ACCESS_KEY)
"""parts of what nobody may see, in lower case"""
AGAIN = "attempts=2&wait_s=0.01"
"""tried once more, soon; answers may take as long as they take on a busy machine"""
READS = ("checkpoints counts", "show counts latest", "verify counts", "restore counts", "snapshot counts")


@dataclass
class Project:
    """A directory to be in, and one for what belongs to this machine; `heard` is all that was logged."""

    path: Path
    state: Path
    heard: io.StringIO = field(default_factory=io.StringIO)

    def siltstone(self, *arguments: object) -> Ended:
        """Run a command; whatever it says holds no secret."""
        ended = siltstone(*arguments)
        assert no_secret(ended.out + ended.err + self.heard.getvalue())
        return ended

    def files(self) -> list[str]:
        """Everything there is."""
        return sorted(str(p.relative_to(self.path.parent)) for p in self.path.parent.rglob("*"))


def no_secret(text: str) -> bool:
    """Whether the text is fit for people."""
    return not [secret for secret in SECRETS if secret in text.lower()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    path = tmp_path / "project"
    path.mkdir()
    (path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    servers.use_test_credentials()
    project = Project(path, tmp_path / "state")
    handler = logging.StreamHandler(project.heard)
    handler.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    yield project
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A Redis with a password."""
    server = RedisServer("--requirepass", servers.REDIS_PASSWORD)
    yield server
    server.remove()


def redis_url(server: RedisServer, query: str = "") -> str:
    return server.url("&".join(filter(None, (AGAIN, "password_variable=GUARDED_REDIS", query))))


def s3_url(endpoint: str, bucket: str, query: str = "") -> str:
    return f"s3://{bucket}/state?endpoint={endpoint}&region=us-east-1&{AGAIN}&{query}".rstrip("&")


def refused(project: Project, url: str, code: int, *said: str, writing: bool = False) -> None:
    """Every command (only those that write, if so asked) ends in one clear line, and leaves nothing behind."""
    before = project.files()
    for command in ("run counts", *(() if writing else READS)):
        project.siltstone(*command.split(), "--warehouse", url).failed(code, *said)
        assert project.files() == before, command


# --- credentials -----------------------------------------------------------------------------------------------------

if "s3-versitygw" in store_cases_s3.factories():  # moto checks no signature

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("AWS_ACCESS_KEY_ID", WRONG_ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", WRONG_SECRET_KEY)],
    )
    def test_wrong_keys(project: Project, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
        server = servers.versitygw()
        client, bucket = store_cases_s3.fresh_bucket(server)
        monkeypatch.setenv(variable, value)
        says = (f"s3://{bucket}/state", server.endpoint, "refuses the credentials", "check AWS_PROFILE")
        refused(project, s3_url(server.endpoint, bucket), 3, *says)
        assert "Contents" not in client.list_objects_v2(Bucket=bucket)


def test_no_keys(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = servers.moto().endpoint
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused(project, s3_url(endpoint, "any"), 3, "s3://any/state", "no credentials were found; set AWS_PROFILE")
    refused(project, s3_url(endpoint, "any", "profile=none"), 2, "AWS profile 'none' does not exist; check ?profile=")


def test_wrong_password(project: Project, guarded: RedisServer) -> None:
    shown = f"127.0.0.1:{guarded.port}/0"
    says = ("refuses the credentials; check user, password and their rights", shown)
    refused(project, guarded.url(AGAIN), 3, *says)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILTSTONE_REDIS_PASSWORD", WRONG_PASSWORD)
        refused(project, guarded.url(AGAIN), 3, *says)
    project.siltstone("checkpoints", "counts", "--warehouse", redis_url(guarded)).failed(2, "no catalog at")


# --- what is not there -----------------------------------------------------------------------------------------------


def test_a_missing_bucket(project: Project) -> None:
    endpoint = servers.moto().endpoint
    says = (f"bucket no-such-bucket at {endpoint} does not exist: make it, or check --warehouse and the endpoint",)
    refused(project, s3_url(endpoint, "no-such-bucket"), 2, *says)


def test_a_closed_port(project: Project) -> None:
    port = servers.free_port()
    says = (f"127.0.0.1:{port}", "cannot be reached", "check")
    refused(project, s3_url(f"http://127.0.0.1:{port}", "any"), 3, *says)
    refused(project, f"redis://127.0.0.1:{port}/0?{AGAIN}", 3, *says)


def test_another_server_than_meant(project: Project, guarded: RedisServer) -> None:
    refused(project, s3_url(f"http://127.0.0.1:{guarded.port}", "any"), 3, f"127.0.0.1:{guarded.port}", "check")
    web = servers.moto().endpoint.removeprefix("http://")
    refused(project, f"redis://{web}/0?{AGAIN}", 3, web, "check")


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_a_server_that_does_not_answer(project: Project, guarded: RedisServer, kind: str) -> None:
    port = guarded.port if kind == "redis" else int(servers.moto().endpoint.rpartition(":")[2])
    with Proxy(port) as proxy:
        proxy.next(Fault(hangs=True), None)
        urls = {
            "s3": s3_url(f"http://127.0.0.1:{proxy.port}", "any", "timeout_s=0.2"),
            "redis": redis_url(guarded, "timeout_s=0.2").replace(f":{port}/", f":{proxy.port}/"),
        }
        refused(project, urls[kind], 3, f"127.0.0.1:{proxy.port}", "does not answer in time; check")
        assert proxy.met == 2 * (1 + len(READS)), "two attempts a command"


# --- what makes no sense ---------------------------------------------------------------------------------------------

SENSELESS = [
    ("s4://bucket/prefix", ("URL scheme 's4' is unknown: use a path, file://", "s3://BUCKET/PREFIX", "rocksdb://")),
    ("https://me:Plugh@host/x", ("URL scheme 'https' is unknown",)),
    ("s3://bucket/p?colour=Plugh", ("s3://bucket/p has no option 'colour': use ", "endpoint", "storage_class")),
    ("redis://:Plugh@host/0?colour=Plugh", ("has no option 'colour': use ", "chunk_bytes", "redis://:***@host/0")),
    ("rocksdb:///tmp/x?colour=Plugh", ("has no option 'colour': use ", "lock_wait_s")),
    ("s3://bucket?attempts=Plugh", ("option attempts: ", "valid integer")),
    ("redis://:Plugh@host?timeout_s=0", ("option timeout_s: ", "greater than 0")),
    ("redis://host?attempts=2&attempts=3", ("option attempts is given twice",)),
    ("redis://:Plugh@host/0?chunk_bytes=536870913", ("redis://:***@host/0: option chunk_bytes: ", "536870912")),
    (
        "redis://:Plugh@host/0",
        ("redis://:***@host/0 contains a password", "leave it out, and set SILTSTONE_REDIS_PASSWORD"),
    ),
    ("redis://host/0?password_variable=a-b", ("option password_variable: ",)),
    ("redis://:Plugh@host/zero", ("is not a Redis URL: write redis://", "redis://:***@host/zero")),
    ("redis://:Plugh/43@host/0", ("the redis:// URL cannot be read", "%2F for a slash")),
    ("redis://:Plugh#43@host/0", ("the redis:// URL cannot be read", "with %")),
    ("redis://me:43/Plugh@host/0", ("redis://*** is not a Redis URL",)),
    ("redis:/:Plugh@host/0", ("a redis URL has two slashes after its colon", "redis://HOST")),
    ("s3:bucket/Plugh", ("a s3 URL has two slashes after its colon",)),
    ("s3://AKIAPLUGH:Plugh@bucket/p", ("an s3:// URL has no credentials: set AWS_PROFILE",)),
    ("s3://bucket?endpoint=http://me:Plugh@host", ("option endpoint: ", "without credentials")),
    ("s3:///prefix", ("names no bucket: write s3://BUCKET",)),
    ("s3://bucket/../prefix", ("'../prefix' is not an object name",)),
    ("rocksdb://siltstone.toml", ("siltstone.toml is a file",)),
]


@pytest.mark.parametrize(("url", "said"), SENSELESS, ids=[url for url, _ in SENSELESS])
def test_a_url_that_makes_no_sense(project: Project, url: str, said: tuple[str, ...]) -> None:
    refused(project, url, 2, *said)


def test_a_redis_that_would_lose_state(project: Project) -> None:
    server = RedisServer()
    try:
        server.client().config_set("maxmemory-policy", "allkeys-lru")
        refused(project, server.url(AGAIN), 2, f":{server.port}/0 may evict keys", "set it to noeviction", writing=True)
        server.client().config_set("maxmemory-policy", "noeviction")
        server.client().config_set("proto-max-bulk-len", 1 << 20)
        url = server.url(f"{AGAIN}&chunk_bytes=2000000")
        refused(
            project,
            url,
            2,
            f":{server.port}/0 does not accept values of chunk_bytes: set it to 1048576",
            writing=True,
        )
        assert server.client().dbsize() == 0
    finally:
        server.remove()


def test_a_catalog_elsewhere_shows_no_password(project: Project) -> None:
    url = f"postgresql://me:{WRONG_PASSWORD}@127.0.0.1:{servers.free_port()}/db"
    (project.state / "objects").mkdir(parents=True)
    for command in ("run counts", "checkpoints counts"):
        ended = project.siltstone(*command.split(), "--warehouse", str(project.state), "--catalog", url)
        ended.failed(3, "cannot", "127.0.0.1")


# --- what works shows no secret either -------------------------------------------------------------------------------


@pytest.fixture(params=["s3", "redis"])
def url(request: pytest.FixtureRequest, guarded: RedisServer) -> str:
    """A warehouse whose secrets are right."""
    if request.param == "redis":
        return redis_url(guarded, "prefix=works")
    server = servers.versitygw() if "s3-versitygw" in store_cases_s3.factories() else servers.moto()
    _, bucket = store_cases_s3.fresh_bucket(server)
    return s3_url(server.endpoint, bucket)


def test_no_secret_is_anywhere(project: Project, url: str, spark: SparkSession) -> None:
    """Not in what is said, logged or recorded; not in any file; nor in what an object shows of itself."""
    run = project.siltstone("run", "counts", "--warehouse", url, "--json", "--openmetrics", "metrics.txt")
    assert run.json["checkpoints"] == [1, 2, 3, 4]
    for command in ("checkpoints counts", "show counts latest", "verify counts --all", "snapshot counts"):
        for as_json in ((), ("--json",)) if "snapshot" not in command else ((),):
            ended = project.siltstone(*command.split(), "--warehouse", url, *as_json)
            assert ended.code == 0, ended
    assert project.siltstone("restore", "counts", "--warehouse", url, "--to", "out").code == 0
    assert project.siltstone("report", "counts", "--warehouse", url, "--out", "chain.svg").code == 0
    spoiled = [
        p for p in project.path.parent.rglob("*") if p.is_file() and not no_secret(p.read_bytes().decode("latin"))
    ]
    assert spoiled == []
    assert [p for p in project.state.rglob("catalog.db") if p.stat().st_size]
    shown_by_objects(url)


def shown_by_objects(url: str) -> None:
    """`repr` and `str` of everything that knows the URL."""
    with OpenWarehouse.open_writable(url) as place:
        options = RegionOptions(parallelism=1)
        region = ConsistentRegion.open(
            SMALL, place.warehouse, place.catalog, policy_by_name(DEFAULT_POLICY), options, "a test"
        )
        tasks = region.begin_step()
        store = open_store(url.partition("&local")[0])
        settings = load_settings(warehouse=url, catalog=place.warehouse.catalog_url)
        known = [
            place,
            place.warehouse,
            Warehouse.at(url),
            region,
            region.options,
            tasks,
            store,
            settings,
            place.catalog,
        ]
        known += [*vars(store).values(), *vars(region).values()]
        known = [each for each in known if not isinstance(each, str)]
        for each in known:
            assert no_secret(repr(each) + str(each)), type(each)
            assert not re.search(r"[?&](attempts|region|endpoint)=", repr(each)), type(each)
        region.close("done")
        assert no_secret(store.label + place.warehouse.label)
        try:
            store.put("a b", b"")
        except SiltstoneError as error:
            assert no_secret(str(error) + repr(error))


def test_a_run_that_loses_its_store_names_it(
    project: Project, guarded: RedisServer, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a run: one line, code 3, what was completed stays, and the next run goes on from there."""
    monkeypatch.setenv("SILTSTONE_RECOVERY__RESET_DELAY_S", "0")
    monkeypatch.setenv("SILTSTONE_UPLOAD__CHECKPOINT_TIMEOUT_S", "0.1")
    with Proxy(guarded.port) as proxy:
        url = redis_url(guarded, "prefix=loses").replace(f":{guarded.port}/", f":{proxy.port}/")
        first = project.siltstone("run", "counts", "--warehouse", url, "--batches", 2, "--json")
        assert first.json["checkpoints"] == [1, 2]
        proxy.down_after(len(proxy.heads) // 3)
        ended = project.siltstone("run", "counts", "--warehouse", url)
        ended.failed(3, f"127.0.0.1:{proxy.port}/0", "check host and port")
        proxy.up()
        rest = project.siltstone("run", "counts", "--warehouse", url, "--json").json
        assert rest["checkpoints"] in ([3, 4], [4])
        proven = project.siltstone("verify", "counts", "--all", "--warehouse", url, "--json").json
        assert (proven["proven"], proven["failed"]) == ([1, 2, 3, 4], [])
    assert os.listdir(project.path) == ["siltstone.toml"]
