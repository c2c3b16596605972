"""What most suites of the life cycle begin with: a warehouse of their own, or a copy of one written once a module."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from tests.clock import Clock
from tests.outbox_run import Heard
from tests.places import place_at


@pytest.fixture(scope="module")
def written() -> Path | None:
    """The warehouse that each test gets a copy of; a module that writes one has its own fixture of this name."""
    return None


@pytest.fixture
def clock() -> Clock | None:
    """The catalog's time; None for the real one. A module that sets the time has its own fixture of this name."""
    return None


@pytest.fixture
def place(written: Path | None, clock: Clock | None, tmp_path: Path) -> Iterator[OpenWarehouse]:
    """A warehouse `w` in the test's directory: a copy of `written`, or an empty one."""
    if written is not None:
        shutil.copytree(written, tmp_path / "w")
    with place_at(tmp_path / "w", clock) as opened:
        yield opened


@pytest.fixture
def heard() -> Heard:
    """The sink of an outbox, which has had nothing yet."""
    return Heard()
