"""Streams that are damaged on disk, through the real command line: `recover`, and `run` that goes on by itself."""

import shutil
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from tests.command_line import CONFIGURATION, Ended, plain, siltstone

BATCHES = 5


Project = tuple[Path, Path, str, list]
"""its directory, a copy of it after five batches of six, the digest after all six, and what its sinks have then"""


@pytest.fixture(scope="module")
def project(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Project:
    path = tmp_path_factory.mktemp("project") / "p"
    path.mkdir()
    (path / "siltstone.toml").write_text(CONFIGURATION)
    assert siltstone("run", "little", "--batches", BATCHES, cwd=path).code == 0
    copy = tmp_path_factory.mktemp("copy") / "p"
    shutil.copytree(path, copy)
    digest = siltstone("run", "little", "--json", cwd=path).json["digest"]
    return path, copy, digest, sinks(path)


@pytest.fixture
def damaged(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as it was after five batches, where it was: what Spark notes of files has their whole paths."""
    path, copy, *_ = project
    shutil.rmtree(path)
    shutil.copytree(copy, path)
    monkeypatch.chdir(path)
    return path


def sinks(project: Path) -> list:
    """The rows of each sink, in any order."""
    found = []
    for directory in sorted((project / "w" / "sink" / "little").iterdir()):
        rows = ds.dataset(directory, partitioning="hive", exclude_invalid_files=True).to_table()
        found.append((directory.name, sorted(map(str, rows.to_pylist()))))
    return found


def objects(checkpoint: int, kind: ObjectKind) -> list[Path]:
    with OpenWarehouse.open_existing("w") as place:
        found = place.catalog.objects.list("little", [checkpoint])
        return [place.warehouse.local.objects / o.name for o in found if o.kind is kind]


def lose_local_state() -> None:
    """So that a run has to restore."""
    shutil.rmtree(Path("w") / "work" / "little")


def check_whole(ran: Ended, digest: str) -> None:
    assert ran.code == 0 and digest in ran.out
    verified = siltstone("verify", "little", "--all", "--json").json
    assert verified["failed"] == [] and verified["proven"] == [1, 2, 3, 4, 5, 6]
    assert siltstone("sweep", "little", "--json").json["deleted"] == 0


def test_a_run_recovers_by_itself(project: Project, damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose_local_state()
    for path in objects(4, ObjectKind.SEGMENT) + objects(4, ObjectKind.BASE):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-7])
    ran = siltstone("run", "little")
    warned, said = [
        r.getMessage() for r in caplog.records if r.name.startswith("siltstone.") and r.levelname == "WARNING"
    ]
    assert 'stream is damaged: recovering it stream=little error="object little/' in warned
    assert "the next run begins with checkpoint 3" in said
    check_begun_again(project, damaged, ran, 3)


def test_a_run_does_not_begin_from_nothing_by_itself(project: Project, damaged: Path) -> None:
    lose_local_state()
    shutil.rmtree(damaged / "w" / "objects" / "little")
    assert siltstone("savepoint", "little", "precious", "--at", 2).code == 0
    refused = (
        "would lose checkpoints 1 to 5: the whole stream, more than 3 checkpoints, savepoint precious. Nothing was"
    )
    for command in (("run", "little"), ("recover", "little")):
        ended = siltstone(*command)
        assert ended.code == 2 and refused in ended.err and "siltstone recover little --accept-loss" in ended.err
    with OpenWarehouse.open_existing("w") as place:
        assert place.catalog.checkpoints.last_id("little") == 5 and len(place.catalog.savepoints.list("little")) == 1
    assert siltstone("recover", "little", "--accept-loss", "--json").json["given_up"] == [1, 2, 3, 4, 5]
    check_begun_again(project, damaged, siltstone("run", "little"), 0)


def check_begun_again(project: Project, damaged: Path, ran: Ended, newest: int) -> None:
    check_whole(ran, project[2])
    assert sinks(damaged) == project[3]
    with OpenWarehouse.open_existing("w") as place:
        assert [r.checkpoint for r in place.catalog.rollbacks.list("little")] == [newest]
        assert [s.batch_id for s in place.catalog.input_log.list("little", 99)] == list(range(6))
        assert [r.outcome for r in place.catalog.runs.list("little")][1:] == ["failed", "recovered", "done"]


def test_what_a_run_recovered_is_in_its_json(damaged: Path) -> None:
    objects(BATCHES, ObjectKind.MANIFEST)[0].unlink()
    ran = siltstone("run", "little", "--batches", 1, "--json")
    said = Ended(ran.code, ran.out, "").json
    assert said["recovered"]["given_up"] == [5] and said["recovered"]["checkpoint"] == 4 and said["checkpoints"] == [5]


def test_a_run_that_may_not_recover_says_what_is_damaged(damaged: Path) -> None:
    [manifest] = objects(BATCHES, ObjectKind.MANIFEST)
    manifest.unlink()
    with (damaged / "siltstone.toml").open("a") as file:
        file.write("[recovery]\nautomatic = false\n")
    siltstone("run", "little").failed(1, manifest.name)
    with OpenWarehouse.open_existing("w") as place:
        assert place.catalog.checkpoints.last_id("little") == BATCHES and place.catalog.rollbacks.list("little") == []


def test_recover(project: Project, damaged: Path) -> None:
    [manifest] = objects(BATCHES, ObjectKind.MANIFEST)
    manifest.unlink()
    assert siltstone("savepoint", "little", "lost").code == 0
    foreseen = siltstone("recover", "little", "--dry-run", "--json").json
    with OpenWarehouse.open_existing("w") as place:
        assert place.catalog.checkpoints.last_id("little") == BATCHES and len(place.catalog.runs.list("little")) == 1
    siltstone("recover", "little").failed(2, "savepoint lost", "siltstone recover little --accept-loss")
    head, reason = plain(siltstone("recover", "little", "--accept-loss"))
    assert head.startswith("little: gave up checkpoint 5; the next run begins with checkpoint 4; lost with them: save")
    assert reason.startswith("  checkpoint 5: ") and str(manifest.name) in reason
    done = siltstone("recover", "little", "--json").json
    assert list(done) == list(foreseen) and done["proven"] is True and not done["fenced"]
    assert foreseen["refusal"] == "savepoint lost"
    expected = {"checkpoint": 4, "given_up": [5], "savepoints": ["lost"], "edits": [], "dry_run": True, "rebuilt": []}
    assert expected.items() <= foreseen.items()
    assert foreseen["failures"][0]["checkpoint"] == 5 and foreseen["failures"][0]["object"].endswith(manifest.name)
    assert (done["checkpoint"], done["given_up"], done["swept_objects"]) == (4, [], 0)
    assert siltstone("verify", "little", "--all", "--json").json["failed"] == []
    check_whole(siltstone("run", "little"), project[2])
    assert sinks(damaged) == project[3]


def test_what_is_not_there_or_cannot_be_reached_changes_nothing(damaged: Path) -> None:
    siltstone("recover", "nothing").failed(2, "no stream 'nothing'", "little")
    siltstone("recover", "little", "--warehouse", "elsewhere").failed(2, "elsewhere")
    siltstone("recover").failed(2, "STREAM")
    with OpenWarehouse.open_existing("w") as place:
        place.catalog.streams.register("empty", 8, {"operators": {}, "options": {}})
    siltstone("recover", "empty").failed(2, "of stream empty: it has none yet, run it first")
    away = "redis://127.0.0.1:1?local=w&attempts=1"
    siltstone("recover", "little", "--warehouse", away, "--catalog", "sqlite:///w/catalog.db").failed(3, "127.0.0.1:1")
    with OpenWarehouse.open_existing("w") as place:
        assert [r.outcome for r in place.catalog.runs.list("little")] == ["done"]
        assert place.catalog.checkpoints.last_id("little") == BATCHES
