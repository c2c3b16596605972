"""Servers and places that the contract suites run against: real ones, made for the run."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from tests.postgres_server import new_schema, postgres_server
from tests.proxy import Proxy


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


@pytest.fixture
def schema(postgres: URL) -> URL:
    """A place in the server for one test; it stays, as connections to it are cut."""
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    admin.dispose()
    return postgres.update_query_dict({"options": f"-csearch_path={name}"})


@pytest.fixture
def proxy(schema: URL) -> Iterator[Proxy]:
    with Proxy(f"{schema.query['host']}/.s.PGSQL.5432") as opened:
        yield opened


@pytest.fixture
def through(schema: URL, proxy: Proxy) -> str:
    """The URL of a database behind the proxy."""
    query = {name: value for name, value in schema.query.items() if name != "host"} | {"sslmode": "disable"}
    return schema.set(host="127.0.0.1", port=proxy.port, query=query).render_as_string(hide_password=False)
