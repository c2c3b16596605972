"""The loss of a machine, with all that it kept to itself."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from tests.command_line import siltstone
from tests.fault.reference import small
from tests.fault.small_stream import SMALL
from tests.fault.warehouses import WAREHOUSES


@pytest.fixture(autouse=True)
def project(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not to be killed runs in this process, on its one JVM; nothing lands in the user's home."""
    (tmp_path / "siltstone.toml").write_text('streams = ["tests.fault.small_stream"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("kind", ["s3"])
def test_another_machine_goes_on_with_what_the_store_and_the_catalog_hold(kind: str, tmp_path: Path) -> None:
    """All that the first machine kept to itself is gone: working state, Spark's record, what the source prepared."""
    reference, url = small(), WAREHOUSES[kind](tmp_path / "machine")
    where = ["--warehouse", url, "--catalog", f"sqlite:///{tmp_path}/catalog.db"]
    for machine, batches in enumerate((3, 2)):
        done = siltstone("run", SMALL.name, *where, "--batches", batches, "--parallelism", 2, "--json").json
        assert len(done["checkpoints"]) == batches
        assert done["digest"] == reference.digests[done["checkpoints"][-1] - 1]
        assert (tmp_path / "machine" / "work").is_dir() and not (tmp_path / "machine" / "catalog.db").exists()
        if machine == 0:
            shutil.rmtree(tmp_path / "machine")
    with OpenWarehouse.open_existing(url, where[-1]) as place:
        assert [c.digest for c in place.catalog.checkpoints.list(SMALL.name)] == list(reference.digests[:5])
    shutil.rmtree(tmp_path / "machine")
    proven = siltstone("verify", SMALL.name, *where, "--all", "--json").json
    assert (proven["proven"], proven["failed"]) == ([*range(1, 6)], [])
    assert siltstone("restore", SMALL.name, *where, "--at", 4, "--json").json["digest"] == reference.digests[3]
