"""Hands over to Dagster's web server on this repository's code location. Starts Dagster, never imports it."""

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from siltstone.errors import Unreachable, UsageError
from siltstone.settings import Settings
from siltstone.store.open import Warehouse

WORKSPACE = Path("workspace.yaml")
NEEDED = ("dagster", "dagster_webserver")
INSTANCE = """\
# Dagster's own settings for this warehouse; Siltstone writes this file once and leaves it alone after that.
telemetry:
  enabled: false
nux:  # the window that asks for an address at the first visit
  enabled: false
concurrency:
  pools:
    default_limit: 1  # each operation on each stream is a pool of its own: one run of it at a time
    granularity: op
run_monitoring:  # a run whose process was killed becomes a failed run, which the sensors see
  enabled: true
  poll_interval_seconds: 10
"""
POSTGRES = """\
storage:
  postgres:
    postgres_url:
      env: {variable}
"""


def serve(settings: Settings, host: str, port: int) -> NoReturn:
    """Become `dagster dev`: web server and daemon, with their home in the warehouse.

    The warehouse and catalog of `settings` are those of every run that is launched from the page.

    Raises:
        UsageError: Dagster is not installed, no workspace.yaml here, an address or port that cannot be listened on.
        Unreachable: the warehouse cannot be written.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}: pip install 'siltstone[dagster]'")
    if not WORKSPACE.is_file():
        raise UsageError(f"no {WORKSPACE} in {Path.cwd()}: run this in a checkout of Siltstone's repository")
    _check_free(host, port)
    warehouse = Warehouse.at(settings.warehouse)
    warehouse.prepare()
    environment = {**os.environ, "SILTSTONE_WAREHOUSE": warehouse.url, "DAGSTER_HOME": str(_home(warehouse))}
    if settings.catalog:
        environment["SILTSTONE_CATALOG"] = settings.catalog
    # Dagster warns on every start that it has a second command line, `dg`, for projects of another layout.
    python = [sys.executable, "-W", "ignore:Function `dev_command` is superseded"]
    dagster = ["-m", "dagster", "dev", "-w", str(WORKSPACE), "-h", host, "-p", str(port)]
    os.execve(sys.executable, [*python, *dagster], environment)


def _home(warehouse: Warehouse) -> Path:
    """Dagster's home, made where it is missing."""
    home = warehouse.local.dagster
    try:
        home.mkdir(exist_ok=True)
        configuration = home / "dagster.yaml"
        if not configuration.exists():
            configuration.write_text(INSTANCE)
    except OSError as error:
        raise Unreachable(f"cannot write {home}: {error.strerror}; check permissions and free space") from error
    return home


def _check_free(host: str, port: int) -> None:
    """UsageError unless something can listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot listen on {host}, port {port} ({reason}): name another with --host or --port"
        ) from None
