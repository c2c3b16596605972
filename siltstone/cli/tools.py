"""Commands that start something bigger: the demo, the web server."""

from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import CatalogUrl, WarehouseUrl, client_of
from siltstone.cli.output import out

GROUP = "Get started"


@app.command(rich_help_panel=GROUP)
def demo(
    warehouse: WarehouseUrl = None,
    seed: Annotated[int | None, typer.Option(help="When to kill the stream; chosen at random if not given.")] = None,
) -> None:
    """The main job on real flights: run it, kill it in the middle, resume it, prove every checkpoint."""
    from siltstone.demo import run_demo

    run_demo(client_of(warehouse, None).settings, out, seed)


@app.command(rich_help_panel=GROUP)
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 3000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others reach needs a token (SILTSTONE_UI__TOKEN).")
    ] = "127.0.0.1",
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
) -> None:
    """Open the Dagster web server on the streams of this repository."""
    from siltstone.ui import serve

    serve(client_of(warehouse, catalog).settings, host, port)
