"""What commands say where an object, the catalog or the disk is damaged, and that the next one makes it good."""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.database.tables import REVISION_TABLE
from tests.command_line import CONFIGURATION, contents, in_process, siltstone
from tests.spark_streams import COUNTS


@pytest.fixture(scope="module")
def counted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of a stream that has run to its end, for tests that break a copy of it."""
    path = tmp_path_factory.mktemp("counted")
    (path / "siltstone.toml").write_text(CONFIGURATION)
    assert siltstone("run", COUNTS.name, "--policy", "adjust-d", "--batches", 3, cwd=path).code == 0
    return path


@pytest.fixture
def copy(counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `counted` to break; the warehouse's path is the test's own."""
    shutil.copytree(counted, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("damage", ["cut", "missing", "altered"])
@pytest.mark.parametrize("form", ["base", "delta"])
def test_a_damaged_object_is_named(damage: str, form: str, copy: Path) -> None:
    handles = [h for at in (1, 3) for h in siltstone("show", "counts", at, "--json").json["handles"]]
    name = next(h["object"] for h in handles if h["form"] == form)
    break_object(copy / "w" / "objects" / name, damage)
    siltstone("restore", "counts", "--to", "out").failed(1, name)
    assert sorted(os.listdir(copy)) == ["siltstone.toml", "w"]
    ended = siltstone("verify", "counts", "--json")
    assert (ended.code, ended.err) == (1, "")
    [failure] = json.loads(ended.out)["failed"]
    assert (failure["checkpoint"], failure["object"]) == (3, name) and name in failure["reason"]


def break_object(path: Path, damage: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-3] if damage == "cut" else data[:9] + bytes([data[9] ^ 1]) + data[10:])


def test_a_catalog_from_a_newer_version(copy: Path) -> None:
    with contextlib.closing(sqlite3.connect(copy / "w" / "catalog.db")) as catalog:
        catalog.execute(f"update {REVISION_TABLE} set version_num = 'r9999'")
        catalog.commit()
    for command in ("run", "checkpoints", "restore", "verify"):
        siltstone(command, "counts").failed(2, "written by a newer Siltstone (revision r9999): upgrade siltstone")


def test_a_catalog_that_is_none(copy: Path) -> None:
    for path in (copy / "w").glob("catalog.db*"):
        path.unlink()
    (copy / "w" / "catalog.db").write_bytes(b"not a database at all" * 500)
    for command in ("run", "checkpoints", "verify"):
        siltstone(command, "counts").failed(3, "cannot use the catalog", "catalog.db", "check that")
    assert (copy / "w" / "catalog.db").read_bytes() == b"not a database at all" * 500


def unprivileged() -> None:
    """Root without the right to pass over permissions, as everybody else is."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            assert libc.prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP


def test_a_warehouse_that_may_not_be_written(copy: Path) -> None:
    before = contents(copy / "w")
    for path in [copy / "w", *(copy / "w").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    ended = in_process("run", "counts", cwd=copy, preexec_fn=unprivileged)
    ended.failed(3, "cannot write the warehouse", "read-only", "check its permissions")
    listed = in_process("checkpoints", "counts", "--json", cwd=copy, preexec_fn=unprivileged)
    assert (listed.code, len(json.loads(listed.out)["checkpoints"])) == (0, 3)
    (copy / "w").chmod(0)
    in_process("checkpoints", "counts", cwd=copy, preexec_fn=unprivileged).failed(3, "cannot read the warehouse")
    for path in [copy / "w", *(copy / "w").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert contents(copy / "w") == before


def test_a_run_that_would_have_to_restore_a_damaged_object(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(counted)
    name = siltstone("show", "counts", 3, "--json").json["handles"][0]["object"]
    path = counted / "w" / "objects" / name
    whole = path.read_bytes()
    break_object(path, "cut")
    shutil.rmtree(counted / "w" / "work")
    monkeypatch.setenv("SILTSTONE_RECOVERY__AUTOMATIC", "false")
    siltstone("run", "counts").failed(1, name)
    assert len(siltstone("checkpoints", "counts", "--json").json["checkpoints"]) == 3
    path.write_bytes(whole)
    assert siltstone("run", "counts", "--json").json["checkpoints"] == [4]


def test_a_warehouse_that_is_full(new_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the driver's may grow: the checkpoint does not complete, and the next run does what was left."""
    monkeypatch.setenv("SILTSTONE_RECOVERY__RESET_DELAY_S", "0")
    monkeypatch.setenv("SILTSTONE_UPLOAD__CHECKPOINT_TIMEOUT_S", "0.1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        ended = siltstone("run", "filling")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ended.failed(3, "cannot", "/w/")
    assert len(siltstone("checkpoints", "filling", "--json").json["checkpoints"]) == 2
    found = siltstone("run", "filling", "--json").json
    assert found["checkpoints"] == [3, 4]
    assert found["digest"] == siltstone("run", "counts", "--json").json["digest"]
    assert siltstone("verify", "filling", "--all", "--json").json["proven"] == [1, 2, 3, 4]
