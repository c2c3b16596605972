"""Commands to get started: make a project, run the demo, start the web server."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, CatalogUrl, WarehouseUrl, client_of
from siltstone.cli.output import out, print_result

GROUP = "Get started"


@command(GROUP)
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A new directory, or an empty one.")],
    stream: Annotated[str, typer.Option(metavar="NAME", help="Name of its stream.")] = "purchases",
    as_json: AsJson = False,
) -> None:
    """Make a project: a stream over sample data, Dagster, tests, a Makefile."""
    from siltstone.templates import make_project

    made = make_project(directory, stream)
    line = f"{made.directory}: stream {made.stream}, {len(made.files)} files; go on there with `make demo`"
    print_result(made, as_json, line)


@command(GROUP)
def demo(
    warehouse: WarehouseUrl = None,
    seed: Annotated[int | None, typer.Option(help="When to kill the stream; chosen at random if not given.")] = None,
) -> None:
    """Run real flights, kill the run, resume it, prove every checkpoint."""
    from siltstone.demo import run_demo

    run_demo(client_of(warehouse, None).settings, out, seed)


@command(GROUP)
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 3000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; a public one needs a token (SILTSTONE_UI__TOKEN).")
    ] = "127.0.0.1",
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
) -> None:
    """Start Dagster's web server on the project in this directory."""
    from siltstone.ui import serve

    serve(client_of(warehouse, catalog).settings, host, port)
