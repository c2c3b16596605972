"""Servers and places that the contract suites run against: real ones, made for the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.postgres_server import new_schema, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[URL]:
    """A real PostgreSQL of this run alone."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database that holds nothing yet, of each kind a catalog can be in."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/catalog.db"
        return
    with new_schema(request.getfixturevalue("postgres")) as url:
        yield url
