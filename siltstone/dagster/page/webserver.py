"""Run Dagster's web server behind the guard, with the arguments of `dagster-webserver`.

`page.dev` starts it. The address to listen on is in an environment variable. The `--host` argument is a name that
cannot be bound, so that a version of Dagster that ignores this module, and so the guard, fails to start.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from dagster_webserver import cli
from dagster_webserver.app import create_app_from_workspace_process_context

from siltstone.dagster.page.guard import Guard
from siltstone.settings import load_settings

HOST = "SILTSTONE_UI_HOST"
"""environment variable with the address to listen on"""


@asynccontextmanager
async def _lifespan(_: Any) -> AsyncIterator[None]:
    with suppress(asyncio.CancelledError):  # uvicorn raises it when it is stopped
        yield


def serve(
    context: Any, host: str, port: int, path_prefix: str, log_level: str, live_data_poll_rate: int | None = None
) -> None:
    """Serve the page behind the guard. Replaces Dagster's function with these arguments; `host` is ignored."""
    options = load_settings().ui
    at = os.environ[HOST]
    app = create_app_from_workspace_process_context(context, path_prefix, live_data_poll_rate, lifespan=_lifespan)
    own = {at, socket.gethostname(), socket.getfqdn()}
    hosts = {f"[{name}]" if ":" in name else name for name in own} | set(options.hosts)
    uvicorn.run(Guard(app, hosts, options.token), host=at, port=port, log_level=log_level)


if __name__ == "__main__":
    cli.host_dagster_ui_with_workspace_process_context = serve
    cli.main()
