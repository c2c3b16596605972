"""What Dagster changes in the process of the tests, which go on in it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """A job that runs in this process sets the level of our loggers for good, and later tests would see more events."""
    ours = logging.getLogger("siltstone")
    before = ours.level
    yield
    ours.setLevel(before)
