"""A warehouse and an instance for the tests of a module, and what Dagster changes in the process, which goes on."""

import logging
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from siltstone.catalog.warehouse import OpenWarehouse


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A warehouse, which is that of the settings, as runs may use no other one."""
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", str(tmp_path / "warehouse"))
    return str(tmp_path / "warehouse")


@pytest.fixture
def place(url: str) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(url) as opened:
        yield opened


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """In files, as schedules open it again."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """A job that runs in this process sets the level of our loggers for good, and later tests would see more events."""
    ours = logging.getLogger("siltstone")
    before = ours.level
    yield
    ours.setLevel(before)
