"""Start Dagster's web server on the project in this directory, without importing Dagster."""

import importlib.util
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from sqlalchemy import make_url

from siltstone.catalog.database.engine import check_reachable
from siltstone.errors import Unreachable, UsageError
from siltstone.settings import Settings
from siltstone.store.open import Warehouse
from siltstone.store.private import make_private_directory, replace_file
from siltstone.stream import installed_streams

WORKSPACE = Path("workspace.yaml")
"""the code locations of a project; without one, the page shows the streams that siltstone.toml names"""
ALL_STREAMS = "siltstone.dagster.all_streams"
NEEDED = ("dagster", "dagster_webserver")
POSTGRES_DRIVER = "dagster_postgres"
STORAGE = "SILTSTONE_UI__STORAGE"
"""the variable from which Dagster reads the database's URL; it may contain a password, so no file holds it"""
HOST = "SILTSTONE_UI_HOST"
"""the variable from which `siltstone.dagster.page.webserver` reads its address"""
TOKEN_CHARACTERS = 16
"""the length of the shortest token accepted"""
OURS = "# Written by `siltstone ui` at each start.\n"
THEIRS = Path("dagster.yaml")
"""the user's own configuration of Dagster, beside workspace.yaml; if it exists, it replaces ours"""
INSTANCE = """\
telemetry:
  enabled: false
nux:  # the window that asks for an address at the first visit
  enabled: false
python_logs:  # the engine's events of a run appear in that run's log
  managed_python_loggers: [siltstone]
  python_log_level: INFO
concurrency:
  pools:
    default_limit: 1  # each operation on each stream has its own pool: one run of it at a time
    granularity: op
run_launcher:  # a run whose code server is gone has failed, too
  module: siltstone.dagster.page.launcher
  class: CodeServerRunLauncher
run_monitoring:  # a run whose process was killed becomes a failed run, which the sensors see
  enabled: true
  poll_interval_seconds: 5
  free_slots_after_run_end_seconds: 1  # frees its slots in a pool for the run that recovers
"""
IN_POSTGRES = f"""\
storage:
  postgres:
    postgres_url:
      env: {STORAGE}
"""


def serve(settings: Settings, host: str, port: int) -> NoReturn:
    """Replace this process by `dagster dev`: web server and daemon, with their home in the warehouse.

    Every run launched from the page uses the warehouse and catalog of `settings`.

    Raises:
        UsageError: Dagster is not installed, no project is here, the address or port cannot be listened on, others
            reach the address and there is no token, the storage is not a PostgreSQL URL, or the user's own
            dagster.yaml does not use it, or the warehouse holds a dagster.yaml that Siltstone did not write.
        Unreachable: the warehouse cannot be written, or the storage cannot be reached.
    """
    storage = settings.ui.storage
    for needed, extra in ((NEEDED, "dagster"), ((POSTGRES_DRIVER,) if storage else (), "dagster,postgres")):
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            raise UsageError(f"the page needs {' and '.join(missing)}: pip install 'siltstone[{extra}]'")
    if not WORKSPACE.is_file() and not (settings.streams or installed_streams()):
        raise UsageError(
            f"no {WORKSPACE} and no streams in {Path.cwd()}: run this in a project (`siltstone init DIRECTORY` makes "
            "one), or name the modules of your streams in siltstone.toml"
        )
    _check_token(settings.ui.token, is_private=_check_free(host, port))
    if storage:
        check_reachable(storage, "Dagster's storage")
    warehouse = Warehouse.at(settings.warehouse)
    warehouse.prepare()
    environment = {**os.environ, "SILTSTONE_WAREHOUSE": warehouse.url, "DAGSTER_HOME": str(_home(warehouse, storage))}
    if settings.catalog:
        environment["SILTSTONE_CATALOG"] = settings.catalog
    if storage:  # Dagster needs this driver; a plain URL would leave the choice to SQLAlchemy
        url = make_url(storage).set(drivername="postgresql+psycopg2")
        environment[STORAGE] = url.render_as_string(hide_password=False)
    environment[HOST] = host
    # Dagster warns at every start that it has a second command line, `dg`, for projects of another layout.
    python = [sys.executable, "-W", "ignore:Function `dev_command` is superseded"]
    where = ["-w", str(WORKSPACE)] if WORKSPACE.is_file() else ["-m", ALL_STREAMS, "-d", str(Path.cwd())]
    dagster = ["-m", "siltstone.dagster.page.dev", *where, "-p", str(port)]
    environment.pop("PYTHONSAFEPATH", None)  # the code location is here
    os.execve(sys.executable, [*python, *dagster], environment)


def _home(warehouse: Warehouse, storage: str | None) -> Path:
    """Prepare and return Dagster's home. Its configuration is rewritten at each start, from this project alone.

    The configuration names modules to run, and anyone who can write to the warehouse could have changed it. So a
    configuration found in the warehouse is never used.
    """
    home = warehouse.local.dagster
    configuration = home / THEIRS
    wanted = INSTANCE + (IN_POSTGRES if storage else "")
    try:
        if THEIRS.is_file():
            wanted = THEIRS.read_text()
            if storage and STORAGE not in wanted:
                lines = " ".join(IN_POSTGRES.split())
                raise UsageError(f"{THEIRS} is your own and does not use {STORAGE}: add `{lines}` to it as YAML")
        make_private_directory(home)
        if home.is_symlink():
            raise UsageError(f"{home} is a link: Dagster's home must be in the warehouse itself; remove the link")
        if configuration.exists() and not configuration.read_text().startswith(OURS[:32]):
            raise UsageError(
                f"{configuration} was not written by siltstone ui, and may name code to run: if it is yours, move it "
                f"to {THEIRS.absolute()}, else remove it"
            )
        replace_file(configuration, (OURS + wanted).encode())
    except OSError as error:
        raise Unreachable(f"cannot write {home}: {error.strerror}; check permissions and free space") from error
    return home


def _check_free(host: str, port: int) -> bool:
    """Check that `host` and `port` can be listened on; return whether only this machine reaches them.

    Raises:
        UsageError: they cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot listen on {host}, port {port} ({reason}): name another with --host or --port"
        ) from None
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def _check_token(token: str | None, *, is_private: bool) -> None:
    """Check the page's token.

    Raises:
        UsageError: a token is needed and missing, or too short.
    """
    if token is None and not is_private:
        raise UsageError(
            "other machines reach that address, and anyone who reaches the page can run things: set "
            'SILTSTONE_UI__TOKEN, such as to "$(openssl rand -hex 32)", and log in with it; or leave --host out'
        )
    if token is not None and len(token) < TOKEN_CHARACTERS:
        raise UsageError(f"the token of the page has {len(token)} characters: use {TOKEN_CHARACTERS} or more")
