"""Which errors of PostgreSQL are those of an outage, which passes."""

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, create_engine, text

from siltstone.catalog.database.engine import is_passing
from tests.proxy import Proxy

pytestmark = pytest.mark.server


def postgres_error(url: URL, *statements: str) -> sa.exc.SQLAlchemyError:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
    except sa.exc.SQLAlchemyError as error:
        return error
    finally:
        engine.dispose()
    raise AssertionError(f"{statements} did not fail")


def test_which_errors_of_postgresql_pass(schema: URL, through: str, proxy: Proxy) -> None:
    passing = [
        postgres_error(schema, "SET TRANSACTION READ ONLY", "CREATE TABLE refused (id int)"),
        postgres_error(schema, "SELECT pg_terminate_backend(pg_backend_pid())"),
        postgres_error(schema, "SELECT pg_terminate_backend(pg_backend_pid())", "SELECT 1"),
    ]
    lasting = [
        postgres_error(schema.set(database="nowhere"), "SELECT 1"),
        postgres_error(schema.set(username="nobody"), "SELECT 1"),
        postgres_error(schema, "SELECT * FROM nothing"),
        postgres_error(schema, "SELECT 1 / 0"),
    ]
    proxy.down()
    passing.append(postgres_error(schema.set(host="127.0.0.1", port=proxy.port, query={}), "SELECT 1"))
    assert [is_passing(error) for error in passing] == [True] * len(passing)
    assert [is_passing(error) for error in lasting] == [False] * len(lasting)
