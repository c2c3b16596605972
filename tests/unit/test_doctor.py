"""siltstone doctor: a sound warehouse is said to be sound, and each damage is found, with what to do."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.doctor.checks import check_clock
from siltstone.doctor.examine import examine
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.settings import load_settings
from tests import outbox_run, tiny_stream
from tests.command_line import plain, siltstone
from tests.killed_child import frozen_at
from tests.next_revision import plant_next_revision
from tests.redis_server import RedisServer
from tests.region_run import RegionRun

NAME = tiny_stream.NAME
Usage = namedtuple("Usage", "total used free")
OF_WAREHOUSE = ["catalog", "clock", "store", "identity", "permissions", "space", "versions", "java"]
OF_CATALOG = ["run", "leases", "proofs", "materialization", "outputs", "deletions"]
OF_STREAM = [*OF_CATALOG, "manifest", "epochs"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with four checkpoints of a run that has ended."""
    root = tmp_path_factory.mktemp("doctor") / "w"
    with tiny_stream.written(str(root)):
        pass
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, on a machine with Java and with room."""
    shutil.copytree(written, tmp_path / "w")
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(mode=0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1e12, 5e11, 5e11))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "w"


def doctor(*arguments: object) -> dict[str, Any]:
    ended = siltstone("doctor", *arguments, "--json")
    result = json.loads(ended.out)
    assert ended.code == bool(result["problem"]) and ended.err == "", ended
    return result


def found(result: dict[str, Any], check: str) -> tuple[str, str]:
    """(state, what was found and what to do) of the one finding of a check that is not ok."""
    [ill] = [each for each in result["findings"] if each["state"] != "ok"]
    assert ill["check"] == check, ill
    return ill["state"], f"{ill['found']} -> {ill['advice']}"


def checks(result: dict[str, Any], state: str | None = None) -> list[str]:
    return [each["check"] for each in result["findings"] if state in (None, each["state"])]


def files(root: Path) -> dict[str, bytes]:
    shown = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    return {name: data for name, data in shown.items() if not name.endswith(("-wal", "-shm"))}


def test_a_sound_warehouse_is_all_ok_and_not_changed(root: Path) -> None:
    before = files(root)
    result = doctor("--warehouse", root)
    assert checks(result) == OF_WAREHOUSE + OF_STREAM == checks(result, "ok")
    assert (result["ok"], result["warning"], result["problem"], result["stream"]) == (16, 0, 0, None)
    assert checks(doctor(NAME, "--warehouse", root)) == checks(result)
    lines = plain(siltstone("doctor", "--warehouse", root))
    assert len(lines) == 1 + 16 and {line.split()[0] for line in lines[1:]} == {"ok"}
    assert files(root) == before


def test_an_unknown_stream_is_refused_as_elsewhere(root: Path) -> None:
    siltstone("doctor", "nosuch", "--warehouse", root).failed(2, "no stream 'nosuch' in this catalog: it has")


def test_the_store_of_another_warehouse(root: Path, tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "other")):
        pass
    result = doctor("--warehouse", tmp_path / "other", "--catalog", f"sqlite:///{root}/catalog.db")
    state, said = found(result, "identity")
    assert state == "problem" and "does not hold this catalog's warehouse" in said and "check --warehouse" in said
    assert checks(result, "ok") == [each for each in OF_WAREHOUSE + OF_CATALOG if each != "identity"]


def test_no_warehouse_at_all(root: Path) -> None:
    result = doctor("--warehouse", root.parent / "nothing")
    assert checks(result, "problem") == ["catalog", "store"]
    assert all("run a stream first" in each["found"] for each in result["findings"] if each["state"] == "problem")


def closed_port() -> int:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.server
def test_a_catalog_that_is_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"postgresql://me:hunter2@127.0.0.1:{closed_port()}/none"
    monkeypatch.setenv("SILTSTONE_CATALOG", url)
    result = doctor("--warehouse", root)
    state, said = found(result, "catalog")
    assert state == "problem" and "check that the server runs" in said
    assert checks(result, "ok") == ["store", "permissions", "space", "versions", "java"]
    assert "hunter2" not in json.dumps(result)


@pytest.mark.server
def test_a_store_that_is_away(root: Path) -> None:
    url = f"redis://127.0.0.1:{closed_port()}/0?local={root}"
    result = doctor("--warehouse", url, "--catalog", f"sqlite:///{root}/catalog.db")
    state, said = found(result, "store")
    assert state == "problem" and "redis://127.0.0.1" in said
    assert checks(result, "ok") == [c for c in OF_WAREHOUSE + OF_CATALOG if c not in ("store", "identity")]


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.server
def test_a_catalog_that_never_answers_is_not_waited_for(root: Path, silent: int) -> None:
    settings = load_settings(warehouse=str(root), catalog=f"postgresql://me@127.0.0.1:{silent}/none")
    states = {each.check: each for each in examine(settings, limit_s=0.5)}
    assert (states["catalog"].state, states["catalog"].found) == ("problem", "no answer within 0.5 s")
    assert states["catalog"].advice == "check its address, its network and its load: the catalog"
    assert {"store", "permissions", "versions"} < states.keys()


@pytest.mark.server
def test_a_store_that_never_answers_is_asked_once(root: Path, silent: int) -> None:
    url = f"redis://127.0.0.1:{silent}/0?local={root}"
    settings = load_settings(warehouse=url, catalog=f"sqlite:///{root}/catalog.db")
    states = {each.check: each for each in examine(settings, limit_s=0.5)}
    assert (states["store"].state, states["store"].found) == ("problem", "no answer within 0.5 s")
    assert not {"identity", "manifest", "epochs"} & states.keys() and {"permissions", "versions"} < states.keys()


def test_an_older_catalog(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_next_revision(monkeypatch, tmp_path)
    before = (root / "catalog.db").read_bytes()
    state, said = found(doctor("--warehouse", root), "catalog")
    assert state == "problem" and "`siltstone upgrade`" in said
    assert (root / "catalog.db").read_bytes() == before


def test_a_warehouse_and_a_catalog_that_others_may_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "catalog.db").chmod(0o644)
    assert checks(doctor("--warehouse", root), "warning") == []  # nobody gets to it
    root.chmod(0o755)
    ill = [each for each in doctor("--warehouse", root)["findings"] if each["state"] == "warning"]
    assert [each["advice"].split(",")[0] for each in ill] == [f"chmod 0700 {root}", f"chmod 0600 {root}/catalog.db"]
    assert siltstone("doctor", "--warehouse", root).code == 0
    monkeypatch.setenv("SILTSTONE_UMASK", "022")
    assert checks(doctor("--warehouse", root), "warning") == []


@pytest.mark.parametrize(
    ("seconds", "state", "said"),
    [
        (0.0, "ok", "within 1 s"),
        (0.5, "ok", "within 1 s"),
        (10, "warning", "10 s behind the catalog's"),
        (-10, "warning", "10 s ahead of the catalog's"),
        (3600, "problem", "3600 s behind the catalog's"),
    ],
)
def test_a_clock_that_is_not_the_catalogs(root: Path, seconds: float, state: str, said: str) -> None:
    url, skew = f"sqlite:///{root}/catalog.db", timedelta(seconds=seconds)
    with open_catalog(url, create=False, now=lambda: datetime.now(UTC) + skew) as catalog:
        [finding] = check_clock(catalog)
    assert finding.state == state and said in finding.found


@pytest.mark.parametrize(
    ("free", "state"), [(5e11, "ok"), (9e10, "warning"), (9e9, "problem"), (0, "problem"), (9e7, "problem")]
)
def test_too_little_room(root: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    total = 5e8 if free == 9e7 else 1e12
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, total - free, free))
    [space] = [each for each in doctor("--warehouse", root)["findings"] if each["check"] == "space"]
    assert space["state"] == state and (state == "ok") == (space["advice"] is None)


def of_store(url: str) -> list[tuple[str, str, str]]:
    result = json.loads(siltstone("doctor", "--warehouse", url, "--json").out)
    found = [each for each in result["findings"] if each["check"] == "store"]
    return [(each["state"], each["found"], each["advice"] or "") for each in found]


@pytest.mark.server
def test_a_redis_that_may_lose_or_refuse_state(root: Path, tmp_path: Path) -> None:
    server = RedisServer()
    client, url = server.client(), server.url(f"local={tmp_path}/local")
    with OpenWarehouse.open_writable(url):
        pass
    [_, (state, said, _)] = of_store(url)
    assert state == "ok" and "which maxmemory does not limit; policy noeviction" in said
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used * 4)
    [_, (state, said, _)] = of_store(url)
    assert state == "ok" and f"of maxmemory, {used * 4 / 1e6:,.1f} MB; policy noeviction" in said
    client.config_set("maxmemory", int(used * 1.05))
    [(first, *_), (state, said, advice)] = of_store(url)
    assert (first, state) == ("ok", "warning") and "once it is full, runs fail" in said
    assert "raise its maxmemory" in advice and "`siltstone truncate STREAM`" in advice
    client.config_set("maxmemory", 0)
    client.config_set("appendonly", "no")
    [_, _, (state, said, advice)] = of_store(url)
    assert (state, advice) == ("warning", "set its appendonly to yes") and "keeps nothing on disk" in said
    client.config_set("maxmemory-policy", "allkeys-lru")
    [(state, said, _)] = of_store(url)
    assert state == "problem" and "may evict keys" in said and "set it to noeviction" in said
    server.remove()


def test_no_java(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    state, said = found(doctor("--warehouse", root), "java")
    assert state == "warning" and "install Java 17 or newer" in said
    monkeypatch.setenv("SILTSTONE_MASTER", "sc://somewhere")
    assert doctor("--warehouse", root)["warning"] == 0


_READER = """
import os, sys
from datetime import timedelta
from siltstone.catalog.open import open_catalog
catalog = open_catalog(sys.argv[1], create=False)
catalog.leases.take(sys.argv[2], [1], id="r", who="a reader that is killed", lasts=timedelta(hours=1))
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_the_lease_of_a_process_that_has_died(root: Path) -> None:
    url = f"sqlite:///{root}/catalog.db"
    ended = subprocess.run([sys.executable, "-c", _READER, url, NAME], check=False, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    state, said = found(doctor("--warehouse", root), "leases")
    assert state == "warning" and "a reader that is killed" in said and "the next deletion or reader removes" in said
    with open_catalog(url, create=False) as catalog:
        assert [lease.who for lease in catalog.leases.list(NAME)] == ["a reader that is killed"], "as it was"
        catalog.leases.take(NAME, [1], id="x", who="one that lives", lasts=timedelta(hours=1))
    [leases] = [each for each in doctor("--warehouse", root)["findings"] if each["check"] == "leases"]
    assert leases["state"] == "ok" and leases["found"].startswith("one that lives, until ")


@pytest.mark.server
def test_runs_that_were_killed_or_hang(root: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    url = f"sqlite:///{root}/catalog.db"
    with open_catalog(url, create=False) as catalog:
        catalog.runs.begin(NAME, f"{socket.gethostname()}:{gone.pid}")
    state, said = found(doctor("--warehouse", root), "run")
    assert state == "warning" and "its process is gone" in said and f"`siltstone run {NAME}` takes over" in said
    with open_catalog(url, create=False, now=lambda: datetime.now(UTC) - timedelta(hours=2)) as catalog:
        catalog.runs.begin(NAME, f"{socket.gethostname()}:{os.getpid()}")
    assert doctor("--warehouse", root)["problem"] == 0, "checkpoints since: the copy was made just now"
    with open_catalog(url, create=False) as catalog:
        catalog.streams.register("still", 4, {})
    with open_catalog(url, create=False, now=lambda: datetime.now(UTC) - timedelta(hours=2)) as catalog:
        catalog.runs.begin("still", f"{socket.gethostname()}:{os.getpid()}")
    state, said = found(doctor("--warehouse", root), "run")
    assert state == "problem" and "has made no checkpoint for 7" in said


def delete(root: Path, *ids: int) -> None:
    with OpenWarehouse.open_existing(str(root)) as place:
        delete_checkpoints(place, NAME, ids)


def of_deletions(root: Path) -> str:
    [finding] = [each for each in doctor("--warehouse", root)["findings"] if each["check"] == "deletions"]
    assert finding["state"] == "ok" and finding["advice"] is None
    return finding["found"]


@pytest.mark.slow
def test_a_deletion_that_was_killed(root: Path) -> None:
    """With all rows written and the first of its objects about to go."""
    assert of_deletions(root) == "none under way"
    with frozen_at(lambda: delete(root, 1, 2), "os.remove"):
        pass
    state, said = found(doctor("--warehouse", root), "deletions")
    assert state == "warning" and f"`siltstone delete {NAME} 1` completes it" in said
    told = re.match(
        r"unfinished: 2 checkpoints \(checkpoints 1 to 2\), marked since (\S+), with (\d+) objects of ", said
    )
    with OpenWarehouse.open_existing(str(root)) as place:
        assert told and int(told[2]) == len(place.catalog.tombstones.list(NAME)) > 0
        assert {
            c.deleted_at.isoformat(timespec="seconds")
            for c in place.catalog.checkpoints.list_retained(NAME)
            if c.deleted_at
        } == {told[1]}
        place.catalog.streams.set_retention(NAME, {"keep_last": 2})
        epoch = place.catalog.runs.begin(NAME, f"{socket.gethostname()}:{os.getpid()}")
        assert "unfinished: 2 checkpoints" in of_deletions(root) and "the current run completes it" in of_deletions(
            root
        )
        place.catalog.runs.end(NAME, epoch, "done")
    assert siltstone("delete", NAME, 1, "--warehouse", root).code == 0
    assert of_deletions(root) == "none under way"


def test_what_waits_for_others_is_no_deletion_that_stopped(root: Path) -> None:
    delete(root, 3)
    assert of_deletions(root) == "1 marked checkpoints wait for newer ones that build on them"
    with OpenWarehouse.open_existing(str(root)) as place, hold_lease(place.catalog, NAME, [2], what="reads"):
        place.catalog.deletions.mark(NAME, place.catalog.streams.get(NAME).epoch, [2])
        assert of_deletions(root).endswith("; 1 marked checkpoints are being read")


def test_a_manifest_that_is_missing_or_altered(root: Path) -> None:
    with OpenWarehouse.open_existing(str(root)) as place:
        path = place.warehouse.local.objects / place.catalog.checkpoints.get_latest(NAME).manifest.name
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    state, said = found(doctor("--warehouse", root), "manifest")
    assert state == "problem" and path.name in said and f"`siltstone recover {NAME}`" in said
    path.unlink()
    state, said = found(doctor("--warehouse", root), "manifest")
    assert state == "problem" and path.name in said and f"`siltstone recover {NAME}`" in said


def test_a_proof_that_failed(root: Path) -> None:
    with OpenWarehouse.open_existing(str(root)) as place:
        place.catalog.checkpoints.record_proof(NAME, 4, False, "another digest")
    state, said = found(doctor("--warehouse", root), "proofs")
    assert state == "problem" and "checkpoint 4 is not proven: another digest" in said
    assert f"`siltstone recover {NAME}`" in said
    with OpenWarehouse.open_existing(str(root)) as place:
        place.catalog.checkpoints.record_proof(NAME, 4, True)
        place.catalog.checkpoints.record_proof(NAME, 1, False, "another digest")
    assert f"`siltstone verify {NAME} --at 1`" in found(doctor("--warehouse", root), "proofs")[1]


def test_a_catalog_from_a_backup(root: Path) -> None:
    shutil.copy(root / "catalog.db", root / "backup.db")
    with OpenWarehouse.open_writable(str(root)) as place:
        RegionRun(place, tiny_stream.STREAM, outbox_run.POLICY).region.close("done")
    state, said = found(doctor("--warehouse", root, "--catalog", f"sqlite:///{root}/backup.db"), "epochs")
    assert state == "problem" and "older than the store" in said and f"`siltstone recover {NAME} --accept-loss`" in said


def test_an_output_that_no_run_delivers(root: Path, tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "outbox")) as place:
        run = RegionRun(place, outbox_run.STREAM, outbox_run.POLICY)
        run.step(outbox_run.batch(0))
        run.region.close("failed")
        assert place.catalog.outbox.list(outbox_run.NAME, outstanding=True)
    state, said = found(doctor("--warehouse", tmp_path / "outbox"), "outputs")
    assert state == "warning" and f"`siltstone run {outbox_run.NAME}` delivers" in said
