"""A stream is taken to another warehouse from the command line, and goes on there as it would have here."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.command_line import siltstone
from tests.spark.test_cli import CONFIGURATION


@pytest.mark.parametrize("name", ["little"])
def test_a_savepoint_travels(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    assert siltstone("run", name, "--batches", 3, "--json").json["checkpoints"] == [1, 2, 3]
    siltstone("savepoint", name, "plain", "--at", 2)
    siltstone("export-savepoint", name, "plain", "--to", "x").failed(2, "still reads deltas", "siltstone materialize")
    siltstone("savepoint", name, "../x", "--full").failed(2, "'../x' is not a savepoint name")
    made = siltstone("savepoint", name, "moving", "--full", "--json").json
    assert (made["name"], made["checkpoint"]) == ("moving", 3)
    assert siltstone("show", name, 3, "--json").json["chain"] == [3]
    siltstone("savepoint", name, "moving", "--full").failed(2, "has a savepoint moving already")
    siltstone("savepoint", name, "moving", "--drop", "--full").failed(2, "leave out --at, --expires and --full")
    exported = siltstone("export-savepoint", name, "moving", "--to", f"rocksdb://{tmp_path}/x", "--json").json
    assert list(exported) == [
        "stream",
        "savepoint",
        "checkpoint",
        "digest",
        "url",
        "objects",
        "bytes",
        "copied",
        "seconds",
    ]
    siltstone("import-savepoint", "nothing", "--warehouse", "there").failed(2, "no exported savepoint at")
    siltstone("import-savepoint", f"rocksdb://{tmp_path}/x", "--as", "../x", "--warehouse", "there").failed(2, "'../x'")
    assert not (tmp_path / "there").exists()
    there = ("--warehouse", "there")
    got = siltstone("import-savepoint", f"rocksdb://{tmp_path}/x", *there, "--json").json
    assert (got["digest"], got["exported_checkpoint"], got["checkpoint"]) == (exported["digest"], 3, 1)
    siltstone("import-savepoint", f"rocksdb://{tmp_path}/x", *there).failed(2, "exists here already", "--as")
    ours, theirs = siltstone("run", name, "--json").json, siltstone("run", name, *there, "--json").json
    assert ours["rows"] == theirs["rows"] > 0 and ours["digest"] == theirs["digest"]
    assert siltstone("verify", name, "--all", *there, "--json").json["failed"] == []
