"""What several suites under Spark begin with."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.command_line import siltstone


@pytest.fixture(scope="module")
def six(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of six checkpoints."""
    path = tmp_path_factory.mktemp("six")
    (path / "siltstone.toml").write_text('streams = ["tests.spark_streams"]\nwarehouse = "w"\nparallelism = 2\n')
    assert siltstone("run", "little", cwd=path).code == 0
    return path
