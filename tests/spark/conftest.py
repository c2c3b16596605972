"""What several suites under Spark begin with."""

from collections.abc import Callable, Iterator
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
def with_settings(spark: SparkSession) -> Iterator[Callable[[dict[str, str]], None]]:
    """Changes settings of the session until the test ends."""
    before = dict[str, str | None]()

    def change(settings: dict[str, str]) -> None:
        for name, value in settings.items():
            before.setdefault(name, spark.conf.get(name, None))
            spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


@pytest.fixture
def new_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of the test's own, in which the test is."""
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path
