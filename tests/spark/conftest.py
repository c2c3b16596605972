"""What several suites under Spark begin with."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.command_line import CONFIGURATION, siltstone


@pytest.fixture(scope="module")
def six(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of six checkpoints."""
    path = tmp_path_factory.mktemp("six")
    (path / "siltstone.toml").write_text(CONFIGURATION)
    assert siltstone("run", "little", cwd=path).code == 0
    return path


@pytest.fixture
def new_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of the test's own, in which the test is."""
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path
