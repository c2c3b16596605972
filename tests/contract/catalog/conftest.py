"""What most suites of the catalog begin with; those that begin otherwise have a `catalog` of their own."""

import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, create_engine, text

from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from tests.catalog_cases import Clock
from tests.proxy import Proxy


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    with open_catalog(catalog_url, now=clock) as opened:
        yield opened


@pytest.fixture
def flights(catalog: Catalog) -> Catalog:
    """A catalog with stream flights in writer epoch 1."""
    catalog.streams.register("flights", 128, {"operators": []})
    assert catalog.runs.begin("flights", "host:1") == 1
    return catalog


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
    """The URL of the catalog behind the proxy."""
    query = {name: value for name, value in schema.query.items() if name != "host"} | {"sslmode": "disable"}
    return schema.set(host="127.0.0.1", port=proxy.port, query=query).render_as_string(hide_password=False)
