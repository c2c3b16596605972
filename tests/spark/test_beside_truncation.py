"""What reads checkpoints leases them before Spark starts: a truncation in between takes nothing that is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.operations import materializing, proving, restoring, snapshots
from tests.command_line import siltstone


@pytest.fixture
def project(six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be in."""
    shutil.copytree(six, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (proving, "verify little --all"),
        (proving, "verify little --at 2"),
        (materializing, "materialize little --at 2"),
        (restoring, "restore little --at 2"),
        (snapshots, "snapshot little"),
    ],
)
def test_truncation_while_spark_starts(
    module: Any, command: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = module.spark_session
    truncated = []

    def starting(*arguments: Any, **named: Any) -> SparkSession:
        truncated.append(siltstone("truncate", "little", "--keep-last", 1).code)
        return starts(*arguments, **named)

    monkeypatch.setattr(module, "spark_session", starting)
    ended = siltstone(*command.split())
    assert (ended.code, set(truncated)) == (0, {0}), ended
    assert siltstone("verify", "little", "--all", "--json").json["failed"] == []
    siltstone("truncate", "little", "--keep-last", 1)
    assert [c["id"] for c in siltstone("checkpoints", "little", "--json").json["checkpoints"]] == [6]


@pytest.mark.parametrize(("command", "code"), [("verify little --all", 0), ("verify little --at 2", 2)])
def test_what_is_deleted_once_the_lease_is_lost_is_no_damage(
    command: str, code: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = proving.spark_map
    assert siltstone("materialize", "little").code == 0  # so that the newest checkpoint needs none of the others

    def after_a_long_sleep(*arguments: Any, **options: Any) -> list[Any]:
        with OpenWarehouse.open_existing("w") as place:
            for lease in place.catalog.leases.list_live("little"):
                place.catalog.leases.release(lease.id)
        assert siltstone("truncate", "little", "--keep-last", 1).code == 0
        return maps(*arguments, **options)

    monkeypatch.setattr(proving, "spark_map", after_a_long_sleep)
    ended = siltstone(*command.split())
    assert ended.code == code, ended
    assert ("1 checkpoints proven, 0 not" in ended.out) if code == 0 else ("no checkpoint 2" in ended.err)
